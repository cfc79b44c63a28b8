"""What guidance adds to a prediction, and what of it is distilled."""

import torch
from torch import Generator, nn

from instgenie.bench.photos import Photos
from training.distillation import Distillation
from training.examples import Captions, Examples, ExampleSource
from training.feed import Encoded, Feed, Inputs
from training.guidance import Guidance, across
from training.sampling import guided


class Teacher(nn.Module):
    """Says 0 without a caption, and with one what guidance is to make stronger."""

    def forward(self, inputs: Inputs, texts: torch.Tensor, guidance: torch.Tensor) -> torch.Tensor:
        wave = torch.tensor([1.0, -1.0]).repeat(inputs.clean.shape[1] // 2)[:, None]
        return wave * (texts > 0)[:, None, None] * torch.ones_like(inputs.clean)


class Student(Teacher):
    """Knows a share of what guidance adds, inside the mask alone."""

    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        self.share = share

    def forward(self, inputs: Inputs, texts: torch.Tensor, guidance: torch.Tensor) -> torch.Tensor:
        scale = torch.where(inputs.masked, 1 + self.share * (guidance[:, None] - 1), 1.0)
        return super().forward(inputs, texts, guidance) * scale[:, :, None]


def noised(photos: Photos, num: int, num_masked: int) -> Inputs:
    """Two noisy versions each of so many pictures whose first tokens are masked."""
    feed = Feed(ExampleSource(photos, Captions(photos), Generator().manual_seed(1)), None, 2 * num)
    texts, clean = torch.ones(num, dtype=torch.long), torch.ones(num, 256, 4)
    masked = torch.arange(256).expand(num, -1) < num_masked
    return feed.noised(Encoded(Examples(*[texts] * 6), clean, clean, masked, clean[0], 256))


def test_what_is_distilled_is_guidance_inside_the_mask(photos: Photos) -> None:
    inputs = noised(photos, 100, 192)
    inputs.noisy, inputs.times = torch.ones_like(inputs.noisy), torch.zeros_like(inputs.times)
    teacher = Teacher()
    loss = Distillation(teacher, Guidance(), Generator().manual_seed(0)).loss
    masked_share = 192 / (192 + 0.3 * 64)
    # the mean of (w - 1)^2 / w, where w is 1 in 15 % of the examples and else triangular over 1 to 7
    assert abs(loss(teacher, inputs, 0.0) / masked_share - 0.85 * 2.29) < 0.25
    assert loss(Student(), inputs, 0.0) < 1e-10
    inputs.times[:] = 1
    assert loss(teacher, inputs, 0.0) < 1e-10  # near pure noise, guidance changes nothing


def test_steps_of_a_reusing_pair_share_their_guidance(photos: Photos) -> None:
    inputs = noised(photos, 100, 0)
    first, second = Distillation(Teacher(), Guidance(), Generator().manual_seed(0)).scales(inputs).chunk(2)
    is_reusing, is_guided = inputs.reused[100:].any(1), (first > 1) | (second > 1)
    assert torch.equal(first[is_guided] == second[is_guided], is_reusing[is_guided])
    assert torch.equal(first[is_reusing], second[is_reusing])


def test_a_share_of_examples_is_not_guided(photos: Photos) -> None:
    scales = Distillation(Teacher(), Guidance(), Generator().manual_seed(0)).scales(noised(photos, 500, 0))
    assert abs((scales == 1).float().mean() - 0.15) < 0.05
    assert 3.7 < scales[scales > 1].mean() < 4.3
    assert scales.max() <= 7


def test_the_share_of_guidance_that_a_student_misses(photos: Photos) -> None:
    inputs, teacher = noised(photos, 4, 192), Teacher()
    inputs.times = torch.full_like(inputs.times, 0.5)
    distillation = Distillation(teacher, Guidance(is_projected=False), Generator().manual_seed(0))
    assert abs(distillation.missed(teacher, [inputs]) - 1) < 1e-5
    assert abs(distillation.missed(Student(0.5), [inputs]) - 0.25) < 1e-5


def test_guidance_changes_no_prediction_along_itself() -> None:
    picture, change = torch.randn(3, 8, 4), torch.randn(3, 8, 4)
    masked = torch.ones(3, 8, dtype=torch.bool)
    left = across(change, picture, masked)
    assert (left * picture).sum((1, 2)).abs().max() < 1e-4
    assert across(2.5 * picture, picture, masked).abs().max() < 1e-4
    masked[:, 4:] = False
    left = across(change, picture, masked)
    assert ((left * picture)[:, :4]).sum((1, 2)).abs().max() < 1e-4
    assert torch.equal(left[:, 4:], change[:, 4:])


def test_guidance_is_left_out_near_pure_noise() -> None:
    times = torch.tensor([1.0, 0.96, 0.9, 0.85, 0.3])
    rule = Guidance(0.95, 0.85)
    assert torch.allclose(rule.share(times), torch.tensor([0, 0, 0.5, 1, 1]), atol=1e-5)
    assert Guidance().share(times[:1]) == 0
    assert Guidance(0.9, 0.9).share(times).tolist() == [0, 0, 1, 1, 1]
    said, unsaid, noisy = (torch.randn(5, 8, 4, generator=Generator().manual_seed(i)) for i in range(3))
    masked = torch.ones(5, 8, dtype=torch.bool)
    change = Guidance(0.95, 0.85, is_projected=False).change(said, unsaid, noisy, times, masked)
    assert not change[:2].any()
    assert torch.allclose(change[3:], (said - unsaid)[3:])
    picture = noisy - times[:, None, None] * said
    projected = rule.change(said, unsaid, noisy, times, masked)
    assert (projected * picture).sum((1, 2)).abs().max() < 1e-4
    masked[:, 4:] = False
    assert not rule.change(said, unsaid, noisy, times, masked)[:, 4:].any()


def test_two_branches_are_one_at_scale_1_and_near_pure_noise() -> None:
    def said(x: torch.Tensor, sigma: float) -> torch.Tensor:
        return x + 1

    def unsaid(x: torch.Tensor, sigma: float) -> torch.Tensor:
        assert sigma < 1, "the second branch is computed where it counts for nothing"
        return x * 0.5

    x, masked = torch.randn(2, 8, 4), torch.ones(2, 8, dtype=torch.bool)
    assert torch.equal(guided(said, unsaid, masked, 3.5, Guidance())(x, 1.0), said(x, 1.0))
    assert torch.equal(guided(said, unsaid, masked, 1.0, Guidance())(x, 0.5), said(x, 0.5))
    plain = guided(said, unsaid, masked, 3.0, Guidance(is_projected=False))(x, 0.5)
    assert torch.allclose(plain, unsaid(x, 0.5) + 3 * (said(x, 0.5) - unsaid(x, 0.5)), atol=1e-5)
