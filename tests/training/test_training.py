"""The parts of the training code whose mistakes would go unnoticed: captions, masks, attention, resuming."""

from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import Generator, nn

from instgenie.bench.photos import Photos
from training import latents, masks
from training.attention import MaskedAttention
from training.data import caption_variants, recoloured, vocabulary
from training.examples import Captions, ExampleSource
from training.optim import Average, Clock, Muon, load_checkpoint, orthogonalise, save_checkpoint
from training.pipeline import build_tokenizers, token_ids
from training.train_transformer import attention_mask, pad_tokens


@pytest.fixture
def photos() -> Photos:
    generator = Generator().manual_seed(0)
    outlines = torch.zeros(8, 256, 256, dtype=torch.bool)
    outlines[:4, 80:180, 60:200] = True  # the first four are pets
    return Photos(
        pictures=torch.randint(0, 256, (8, 3, 256, 256), generator=generator, dtype=torch.uint8),
        outlines=outlines,
        captions=["a photo of a Siamese cat"] * 4 + ["a photo of a rose"] * 2 + ["a photo of a red hat"] * 2,
        labels=["Siamese"] * 4 + ["rose"] * 2 + ["hat"] * 2,
        species=["cat"] * 4 + ["flower"] * 2 + ["clothing"] * 2,
        colours=[""] * 6 + ["red"] * 2,
        ids=list("abcdefgh"),
    )


def test_recoloured_captions_keep_their_grammar() -> None:
    assert recoloured("a photo of a red hat", "red", "orange") == "a photo of an orange hat"
    assert recoloured("a photo of an orange hat", "orange", "red") == "a photo of a red hat"
    assert recoloured("a photo of a pair of blue pants", "blue", "grey") == "a photo of a pair of grey pants"


def test_every_caption_is_made_of_known_words(photos: Photos) -> None:
    clip, t5 = build_tokenizers(vocabulary(photos))
    texts = Captions(photos).texts
    assert {t for c in caption_variants("a photo of a rose", "rose", "flower") for t in [c]} <= set(texts)
    for tokenizer in (clip, t5):
        ids = token_ids(tokenizer, texts)
        assert ids.shape == (len(texts), 16)
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
    drawn = [source.draw(48, 256, 256) for _ in range(3)]
    rows = torch.cat([examples.rows[examples.untouched] for examples in drawn])
    texts = torch.cat([examples.texts[examples.untouched] for examples in drawn])
    is_background = (texts > 0) & (texts <= captions.num_background)
    assert {photos.species[row] for row in rows[is_background]} == {"cat", "flower", "clothing"}


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


def run(transformer: FluxTransformer2DModel, image: torch.Tensor, attention: torch.Tensor | None) -> torch.Tensor:
    generator = Generator().manual_seed(3)
    with torch.inference_mode():
        return transformer(
            hidden_states=image,
            encoder_hidden_states=torch.randn(2, 16, 8, generator=generator),
            pooled_projections=torch.randn(2, 8, generator=generator),
            timestep=torch.tensor([0.3, 0.7]),
            img_ids=pad_tokens(latents.image_ids(192, 256, image.device)[None])[0][: image.shape[1]],
            txt_ids=torch.zeros(16, 3),
            joint_attention_kwargs=None if attention is None else {"attention_mask": attention},
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
