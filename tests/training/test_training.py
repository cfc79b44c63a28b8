"""The parts of the training code whose mistakes would go unnoticed: captions, masks, attention, resuming."""

from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import Generator, nn

from instgenie.bench.photos import Photos
from training import latents, masks
from training.attention import MaskedAttention, attention_step, choose_kernel, is_right
from training.colours import COLOURS, colour_names, photo_colours
from training.cutouts import Cutouts, Pasted
from training.data import BACKGROUND_CAPTIONS, NUM_VARIANTS, caption_variants, recoloured, vocabulary
from training.examples import SHARES, Captions, Examples, ExampleSource
from training.feed import LONGEST_REUSE, Encoded, Feed, attention_mask, pad_tokens, reused_tokens
from training.garments import find_garments
from training.optim import Average, Clock, Muon, load_checkpoint, orthogonalise, save_checkpoint
from training.pipeline import NUM_TEXT_TOKENS, build_tokenizers, token_ids
from training.scenes import with_scenes
from training.views import Draw


def test_recoloured_captions_keep_their_grammar() -> None:
    assert recoloured("a photo of a red hat", "red", "orange") == "a photo of an orange hat"
    assert recoloured("a photo of an orange hat", "orange", "red") == "a photo of a red hat"
    assert recoloured("a photo of a pair of blue pants", "blue", "grey") == "a photo of a pair of grey pants"
    assert recoloured("a photo of a hat", "", "orange") == "a photo of an orange hat"
    assert recoloured("a photo of a pair of pants", "", "grey") == "a photo of a pair of grey pants"


def test_every_caption_is_made_of_known_words(photos: Photos) -> None:
    clip, t5 = build_tokenizers(vocabulary(photos))
    texts = Captions(photos).texts
    assert {t for c in caption_variants("a photo of a rose", "rose", "flower") for t in [c]} <= set(texts)
    for tokenizer in (clip, t5):
        ids = token_ids(tokenizer, texts)
        assert ids.shape == (len(texts), NUM_TEXT_TOKENS)
        assert not (ids == tokenizer.unk_token_id).any()
        assert (token_ids(tokenizer, ["a zebra"]) == tokenizer.unk_token_id).any()


@pytest.mark.parametrize("size", [(256, 256), (224, 288)])
def test_examples_hold_together(photos: Photos, size: tuple[int, int]) -> None:
    source = ExampleSource(photos, Captions(photos), Generator().manual_seed(1))
    examples = source.draw(40, *size)
    assert examples.pictures.shape == (40, 3, *size)
    assert examples.pictures.abs().max() <= 1 + 1e-5
    shares = examples.masks.float().mean((1, 2))
    assert shares.min() < 0.2
    assert shares.max() == 1
    assert len(examples.texts.unique()) > 5
    again = ExampleSource(photos, Captions(photos), Generator().manual_seed(1)).draw(40, *size)
    assert torch.equal(again.pictures, examples.pictures)


def test_background_captions_never_stand_for_pets(photos: Photos) -> None:
    captions = Captions(photos)
    source = ExampleSource(photos, captions, Generator().manual_seed(1))
    drawn = [source.draw(96, 64, 64) for _ in range(6)]
    rows = torch.cat([examples.rows[examples.untouched] for examples in drawn])
    texts = torch.cat([examples.texts[examples.untouched] for examples in drawn])
    is_background = (texts > 0) & (texts <= captions.num_background)
    assert {photos.species[row] for row in rows[is_background]} == {"cat", "flower", "clothing"}


@pytest.fixture
def shirt() -> torch.Tensor:
    """A red shirt with a white print on a grey floor, [3, 256, 256], and noise over all of it."""
    picture = torch.full((3, 256, 256), 120.0)
    picture[:, 60:200, 90:170] = picture[:, 60:110, 40:220] = torch.tensor([180.0, 40, 50])[:, None, None]
    picture[:, 100:112, 110:150] = 240
    noise = torch.randn(picture.shape, generator=Generator().manual_seed(0))
    return (picture + 6 * noise).clamp(0, 255).byte()


def shirt_shape() -> torch.Tensor:
    shape = torch.zeros(256, 256, dtype=torch.bool)
    shape[60:200, 90:170] = shape[60:110, 40:220] = True
    return shape


def test_a_garment_is_found_with_its_print_and_noise_is_none(shirt: torch.Tensor, photos: Photos) -> None:
    pale = shirt.float().mean(0, keepdim=True).expand(3, -1, -1) * 0.02 + 118  # hardly differs from the floor
    found, nothing, noise = find_garments(torch.stack([shirt, pale.byte(), photos.pictures[6]]))
    both = (found & shirt_shape()).sum() / (found | shirt_shape()).sum()
    assert both > 0.97
    assert not nothing.any()
    assert not noise.any()
    assert find_garments(photos.pictures[:0]).shape == (0, 256, 256)


def test_a_garment_has_another_colour_inside_itself_and_the_mask_alone(photos: Photos, shirt: torch.Tensor) -> None:
    photos.pictures[6:], photos.colours[6:], photos.captions[6:] = (
        shirt,
        ["", "red"],
        ["a photo of a hat", "a photo of a red hat"],
    )
    source = ExampleSource(photos, captions := Captions(photos), Generator().manual_seed(1))
    assert source.sources["recoloured"].tolist() == [6, 7]
    rows, before = torch.tensor([6, 7] * 8), (shirt.float() / 127.5 - 1).expand(16, -1, -1, -1)
    given = torch.zeros(16, 256, 256, dtype=torch.bool)
    given[:, :, :128] = True
    after, mask, texts = source._recolour(before, given, rows, shirt_shape().expand(16, -1, -1))
    changed = ((after - before).abs() > 0.01).any(1)
    assert changed.flatten(1).any(1).all()
    assert not (changed & ~mask).any()
    assert not (changed & ~shirt_shape()).any()
    assert {tuple(m.any(0).nonzero()[[0, -1], 0].tolist()) for m in mask} > {(0, 127)}  # some are the whole garment
    assert all(set(captions.texts[text].split()) & set(COLOURS) for text in texts)


def test_what_is_pasted_is_called_by_its_name_and_not_by_its_background(photos: Photos) -> None:
    photos.pictures[:4] = torch.where(photos.outlines[:4, None], photos.pictures[:4], 20)  # behind the pets it is black
    source = ExampleSource(photos, captions := Captions(photos), Generator().manual_seed(1))
    assert any("black background" in captions.texts[text] for text in captions.variants[0].tolist())
    pasted = source.cutouts.paste(torch.zeros(64, 3, 256, 256), torch.zeros(64, dtype=torch.long), 0.5, 0.9)
    assert not any("background" in captions.texts[text] for text in source._put(pasted)[2].tolist())


def test_flowers_and_garments_are_often_pasted_into_photographs_of_their_own_kind(photos: Photos) -> None:
    source = ExampleSource(photos, Captions(photos), Generator().manual_seed(1))
    source.sources |= {"flowers": torch.tensor([4, 5]), "garments": torch.tensor([6, 7])}
    for name, species in (("flowers", "flower"), ("garments", "clothing")):
        part = source._parts(96)[name]
        below = torch.cat([source.draw(96, 64, 64).rows[part] for _ in range(12)])
        share = sum(photos.species[row] == species for row in below.tolist()) / len(below)
        assert 0.45 < share < 0.85


def test_some_masks_around_what_is_pasted_have_another_outline(photos: Photos) -> None:
    photos.outlines[1:4] = False
    photos.outlines[1:4, 10:240, 110:140] = True
    source = ExampleSource(photos, Captions(photos), Generator().manual_seed(1))
    theta = torch.eye(3)[:2].expand(400, -1, -1)
    shapes = photos.outlines[:1].expand(400, -1, -1)
    mask = source._put(Pasted(torch.zeros(400, 3, 256, 256), shapes, torch.zeros(400, dtype=torch.long), theta))[1]
    assert (mask | ~shapes).float().mean() > 0.999
    assert 0.1 < mask[:, 20, 125].float().mean() < 0.4


def test_half_of_the_photographs_are_pets(photos: Photos) -> None:
    both = with_scenes(photos, torch.full((40, 3, 256, 256), 20, dtype=torch.uint8))
    source = ExampleSource(both, Captions(both), Generator().manual_seed(1))
    drawn = torch.multinomial(source.weights, 2000, replacement=True, generator=source.generator)
    share = sum(both.species[row] == "cat" for row in drawn.tolist()) / 2000
    assert abs(share - SHARES["pet"]) < 0.05


def test_a_small_batch_may_hold_plain_examples_only(photos: Photos) -> None:
    examples = ExampleSource(photos, Captions(photos), Generator().manual_seed(1)).draw(2, 256, 256)
    assert examples.untouched.all()


def test_masks_have_the_shape_they_are_named_for() -> None:
    generator = Generator().manual_seed(2)
    box = masks.boxes(16, 64, 96, generator)
    assert torch.equal(masks.bounding_boxes(box), box)
    point = torch.zeros(1, 32, 32, dtype=torch.bool)
    point[0, 16, 16] = True
    assert masks.dilate(point, 3).sum() == 49
    thin = masks.strokes(16, 64, 64, (0.01, 0.03), generator).float().mean()
    thick = masks.strokes(16, 64, 64, (0.1, 0.15), generator).float().mean()
    assert 0 < thin < thick < 1


def test_packing_and_unpacking_are_inverse() -> None:
    x = torch.randn(2, 5, 12, 8)
    assert torch.equal(latents.unpack(latents.pack(x), 12, 8), x)


@pytest.fixture(scope="module")
def transformer() -> FluxTransformer2DModel:
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        in_channels=12,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 6, 6),
    ).eval()


def run(
    transformer: FluxTransformer2DModel, image: torch.Tensor, attention: torch.Tensor | None, **reuse: torch.Tensor
) -> torch.Tensor:
    generator = Generator().manual_seed(3)
    with torch.inference_mode():
        return transformer(
            hidden_states=image,
            encoder_hidden_states=torch.randn(len(image), NUM_TEXT_TOKENS, 8, generator=generator),
            pooled_projections=torch.randn(len(image), 8, generator=generator),
            timestep=torch.linspace(0.3, 0.7, len(image)),
            img_ids=pad_tokens(latents.image_ids(192, 256, image.device)[None])[0][: image.shape[1]],
            txt_ids=torch.zeros(NUM_TEXT_TOKENS, 3),
            joint_attention_kwargs=None if attention is None else {"attention_mask": attention} | reuse,
            return_dict=False,
        )[0]


def test_padding_is_unseen_and_isolated_tokens_see_no_masked_one(transformer: FluxTransformer2DModel) -> None:
    num_tokens = 192  # of 256
    generator = Generator().manual_seed(4)
    image = torch.randn(2, num_tokens, 12, generator=generator)
    masked = torch.rand(2, num_tokens, generator=generator) < 0.3
    plain = run(transformer, image, None)
    transformer.set_attn_processor(MaskedAttention())
    attention = attention_mask(pad_tokens(masked), torch.tensor([True, False]), num_tokens)
    padded = run(transformer, pad_tokens(image), attention)[:, :num_tokens]
    torch.testing.assert_close(padded[1], plain[1], atol=1e-5, rtol=1e-4)

    other = torch.where(masked[..., None], torch.randn(image.shape, generator=generator), image)
    changed = run(transformer, pad_tokens(other), attention)[:, :num_tokens]
    torch.testing.assert_close(changed[0][~masked[0]], padded[0][~masked[0]], atol=1e-5, rtol=1e-4)
    assert (changed[1][~masked[1]] - padded[1][~masked[1]]).abs().max() > 1e-3


def test_a_reusing_example_reads_the_keys_of_its_earlier_step(transformer: FluxTransformer2DModel) -> None:
    generator = Generator().manual_seed(5)
    earlier, later = torch.randn(2, 1, 256, 12, generator=generator)
    masked = torch.rand(1, 256, generator=generator) < 0.3
    pair, both = torch.cat([earlier, later]), torch.cat([masked, masked])
    transformer.set_attn_processor(MaskedAttention())
    visible = attention_mask(both, torch.tensor([False, False]), 256)
    source, reusing = torch.tensor([0, 0]), torch.tensor([False, True])
    reused = reused_tokens(both, reusing)
    assert not reused[0].any()
    assert torch.equal(reused[1], torch.cat([torch.zeros(NUM_TEXT_TOKENS, dtype=torch.bool), ~masked[0]]))
    plain = run(transformer, pair, visible)
    found = run(transformer, pair, visible, source=source, reused=reused)
    torch.testing.assert_close(found[0], plain[0])
    assert (found[1][masked[0]] - plain[1][masked[0]]).abs().max() > 1e-3
    other = torch.where(masked[..., None], later, torch.randn(later.shape, generator=generator))
    again = run(transformer, torch.cat([earlier, other]), visible, source=source, reused=reused)
    torch.testing.assert_close(again[1][masked[0]], found[1][masked[0]], atol=1e-5, rtol=1e-4)


def test_attention_that_forgets_who_sees_whom_is_found_out() -> None:
    inputs = [torch.randn(2, 6, 2, 8, generator=Generator().manual_seed(i)) for i in range(3)]
    mask = torch.eye(6, dtype=torch.bool).expand(2, 1, -1, -1)
    assert torch.allclose(attention_step(inputs, mask)()[0], inputs[2].flatten(2), atol=1e-6)
    everything = torch.ones_like(mask)
    assert is_right(attention_step(inputs, everything), inputs, everything)
    assert not is_right(attention_step(inputs, mask), inputs, everything)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch warns of a kernel that a GPU lacks
def test_a_kernel_is_chosen_for_attention() -> None:
    before = torch.backends.cuda.mem_efficient_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()
    chosen = choose_kernel(16, 320, 6, 64)
    enabled = torch.backends.cuda.mem_efficient_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_mem_efficient_sdp(before[0])
    torch.backends.cuda.enable_cudnn_sdp(before[1])
    assert sum(enabled) == 1
    assert chosen.startswith(("efficient", "cuDNN"))


def test_a_reusing_pair_shares_its_noise_and_the_earlier_step_is_noisier(photos: Photos) -> None:
    num = 200
    feed = Feed(ExampleSource(photos, Captions(photos), Generator().manual_seed(1)), None, 2 * num)
    nothing = torch.zeros(num, dtype=torch.long)
    examples = Examples(nothing, nothing, nothing, nothing, nothing, nothing)
    known = torch.zeros(num, 256, 3)
    inputs = feed.noised(Encoded(examples, known, known, torch.zeros(num, 256, dtype=torch.bool), known[0], 256))
    first, second = inputs.times.chunk(2)
    reusing = inputs.reused[num:].any(1)
    assert 0 < reusing.sum() < num
    assert not inputs.reused[:num].any()
    assert (first >= second)[reusing].all()
    assert (first - second)[reusing].max() <= LONGEST_REUSE + 0.01
    same = (inputs.noise[:num] == inputs.noise[num:]).flatten(1).all(1)
    assert torch.equal(same, reusing)
    assert torch.equal(inputs.source[num:], torch.arange(num))
    assert 0.1 < (inputs.times > 0.85).float().mean() < 0.35


class NumberedFeed(Feed):
    """A feed whose encoded batches are numbers."""

    drawn = -1

    def encode(self, examples: Examples) -> int:
        self.drawn += 1
        return self.drawn

    def noised(self, encoded: int) -> int:
        return encoded


def test_every_encoded_batch_is_used_three_times_and_not_in_a_row(photos: Photos) -> None:
    feed = NumberedFeed(ExampleSource(photos, Captions(photos), Generator().manual_seed(1)), None, 2)
    order = [feed.next() for _ in range(60)]
    for number in range(10):
        first, second, third = (step for step, served in enumerate(order) if served == number)
        assert second - first > 8
        assert third - second > 8


def test_colours_are_named_where_one_wins(photos: Photos) -> None:
    pure = torch.tensor([[0.9, 0.1, 0.1], [0.1, 0.6, 0.2], [0.05, 0.05, 0.05], [0.95, 0.95, 0.95], [0.4, 0.25, 0.1]])
    names = [COLOURS[name] for name in colour_names(pure[:, :, None, None])[:, 0, 0]]
    assert names == ["red", "green", "black", "white", "brown"]
    photos.pictures[0] = 20  # a black pet
    photos.pictures[1] = torch.tensor([30, 60, 200])[:, None, None]
    subjects, backgrounds = photo_colours(photos)
    assert (subjects[0], backgrounds[0]) == ("black", "black")
    assert (subjects[1], backgrounds[1]) == ("blue", "blue")
    assert subjects[6] == "red"  # given with the photograph


def test_captions_say_colour_and_background() -> None:
    texts = caption_variants("a photo of a tulip", "tulip", "flower", "orange", "green")
    assert len(texts) == NUM_VARIANTS
    assert "an orange tulip" in texts
    assert any("green background" in text for text in texts)
    assert "a photo of a pair of blue trousers" in caption_variants(
        "a photo of a pair of blue pants", "pants", "clothing", "blue"
    )


def test_removal_shows_the_scene_inside_and_the_object_outside_the_mask(photos: Photos) -> None:
    photos.pictures[:] = 250  # whatever is pasted is nearly white
    both = with_scenes(photos, torch.full((8, 3, 256, 256), 20, dtype=torch.uint8))
    source = ExampleSource(both, Captions(both), Generator().manual_seed(1))
    pictures, mask, texts = source._remove(torch.full((16, 3, 256, 256), -0.8))
    inside = pictures[mask[:, None].expand_as(pictures)]
    assert (inside == -0.8).all()
    assert {source.captions.texts[text] for text in texts.tolist()} <= {"", *BACKGROUND_CAPTIONS}
    assert mask.flatten(1).any(1).all()


def test_cutouts_are_whole_objects(photos: Photos) -> None:
    photos.outlines[0] = False
    photos.outlines[0, :, :128] = True  # cut by three edges of the frame
    cutouts = Cutouts(photos, Draw(Generator().manual_seed(1)))
    assert cutouts.pets.tolist() == [1, 2, 3]
    pasted = cutouts.paste(torch.zeros(3, 3, 256, 256), cutouts.pets, 0.5, 0.9)
    changed = (pasted.pictures != 0).any(1)
    assert changed.any()
    assert not (changed & ~masks.dilate(pasted.shapes, 2)).any()


def test_orthogonalise_brings_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(orthogonalise(torch.randn(3, 24, 48)).float())
    assert 0.5 < values.min() < values.max() < 1.5


def step(parameters: list[nn.Parameter], optimisers: list[torch.optim.Optimizer], average: Average, seed: int) -> None:
    for i, parameter in enumerate(parameters):
        parameter.grad = torch.randn(parameter.shape, generator=Generator().manual_seed(seed * 10 + i))
    for optimiser in optimisers:
        optimiser.step()
    average.update()


def fresh() -> tuple[list[nn.Parameter], list[torch.optim.Optimizer], Average, Clock]:
    parameters = [nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(5))]
    optimisers = [Muon(parameters[:1], lr=0.1), torch.optim.AdamW(parameters[1:], lr=0.1)]
    return parameters, optimisers, Average(parameters, 0.9), Clock(1.0)


def test_a_resumed_run_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    parameters, optimisers, average, clock = fresh()
    for seed in range(3):
        step(parameters, optimisers, average, seed)
    save_checkpoint(tmp_path / "checkpoint.safetensors", parameters, average, optimisers, clock, 3)
    step(parameters, optimisers, average, 3)

    resumed, resumed_optimisers, resumed_average, resumed_clock = fresh()
    path = tmp_path / "checkpoint.safetensors"
    assert load_checkpoint(path, resumed, resumed_average, resumed_optimisers, resumed_clock) == 3
    assert resumed_clock.before > 0
    step(resumed, resumed_optimisers, resumed_average, 3)
    torch.testing.assert_close(resumed, parameters)
    torch.testing.assert_close(resumed_average.values, average.values)
