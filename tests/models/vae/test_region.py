"""Decoding a box of a picture against decoding the whole picture."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderTiny
from helpers.edits import make_edit

from instgenie.engine.finish import finish, finish_many, to_pixels
from instgenie.engine.prepare import prepare
from instgenie.models.model import Model, unpack_latents
from instgenie.models.vae.region import can_decode_boxes, decode_box
from instgenie.pictures import compositing
from instgenie.pictures.compositing import composited
from instgenie.types import Box, Edit, Pixels

BOXES = {
    "all": Box(range(64), range(96)),
    "inside": Box(range(20, 41), range(33, 50)),
    "corner": Box(range(57, 64), range(7)),
    "a pixel": Box(range(31, 32), range(95, 96)),
    "a row": Box(range(13, 14), range(96)),
}


@pytest.fixture(scope="module", params=["relu", "silu"])
def vae(request: pytest.FixtureRequest) -> AutoencoderTiny:
    torch.manual_seed(0)
    widths = (8, 8, 8, 8)
    made = AutoencoderTiny(
        encoder_block_out_channels=widths, decoder_block_out_channels=widths, num_decoder_blocks=(1, 2, 0, 1),
        act_fn=request.param,
    )  # fmt: skip
    return made.eval()


@torch.inference_mode()
@pytest.mark.parametrize("name", BOXES)
def test_a_box_is_part_of_the_whole(vae: AutoencoderTiny, name: str) -> None:
    box, latents = BOXES[name], torch.randn(2, 4, 8, 12)
    whole = vae.decode(latents).sample
    found = decode_box(vae, latents, box)
    torch.testing.assert_close(found, whole[:, :, box.rows.start : box.rows.stop, box.cols.start : box.cols.stop])


def test_other_autoencoders_decode_whole_pictures(vae: AutoencoderTiny) -> None:
    assert can_decode_boxes(vae)
    assert not can_decode_boxes(AutoencoderTiny(upsample_fn="bilinear"))
    assert not can_decode_boxes(AutoencoderTiny(upsampling_scaling_factor=4))
    assert not can_decode_boxes(AutoencoderKL())


@torch.inference_mode()
def test_a_box_computes_less(vae: AutoencoderTiny) -> None:
    sizes: list[int] = []
    latents = torch.randn(1, 4, 32, 32)
    hook = vae.decoder.layers[-1].register_forward_hook(lambda _, __, out: sizes.append(out[0, 0].numel()))
    decode_box(vae, latents, Box(range(100, 110), range(250, 256)))
    hook.remove()
    assert sizes[0] < 256 * 256 / 50


def whole_picture(edit: Edit, model: Model) -> Pixels:
    job = prepare(edit, model)
    config = model.vae.config
    latents = unpack_latents(job.latents, job.grid, model.latents_per_token) / config.scaling_factor
    [pixels] = to_pixels(model.vae.decode(latents + (config.shift_factor or 0)).sample)
    whole = compositing.whole_picture(edit.picture, None)
    return compositing.paint(whole, pixels, edit.mask, edit.feather, edit.seed)


def off(found: Pixels, truth: Pixels) -> int:
    """The largest difference in pixel levels: convolutions of another shape may sum in another order."""
    return int(np.abs(found.astype(int) - truth).max())


@torch.inference_mode()
@pytest.mark.parametrize("size", [(64, 48), (256, 192), (40, 300)])
def test_pictures_of_any_size_equal_whole_decoding(models: dict[str, Model], size: tuple[int, int]) -> None:
    """The working size is 64 x 48, so compositing resizes the decoded picture in some cases."""
    model = models["fill"]
    assert isinstance(model.vae, AutoencoderTiny)
    random = np.random.default_rng(0)
    picture = random.integers(0, 256, (*size, 3), np.uint8)
    for _ in range(8):
        mask = np.zeros(size, np.bool_)
        top, left = random.integers(0, size[0] - 8), random.integers(0, size[1] - 8)
        mask[top : top + 8, left : left + random.integers(1, 9)] = True
        edit = replace(make_edit(steps=1), picture=picture, mask=mask, size=(64, 48), feather=2)
        assert off(finish(prepare(edit, model), model), whole_picture(edit, model)) <= 1


@torch.inference_mode()
def test_pictures_decoded_together_each_get_what_they_need(models: dict[str, Model]) -> None:
    model = models["fill"]
    masks = [np.zeros((64, 48), np.bool_) for _ in range(2)]
    masks[0][3:9, 4:7] = masks[1][50:, 40:] = True
    picture = np.full((64, 48, 3), 90, np.uint8)
    edits = [replace(make_edit(steps=1), picture=picture, mask=mask, size=(64, 48)) for mask in masks]
    together = finish_many([prepare(edit, model) for edit in edits], model)
    for edit, found in zip(edits, together, strict=True):
        assert off(found, whole_picture(edit, model)) <= 1


def test_the_composited_box() -> None:
    mask = np.zeros((100, 50), np.bool_)
    mask[20:30, 49] = True
    assert composited(mask, (100, 50)) == Box(range(20, 30), range(49, 50))
    assert composited(mask, (200, 50)) == Box(range(33, 67), range(49, 50))  # 3 pixels of the coarser, and 1
    assert composited(mask, (50, 25)) == Box(range(6, 19), range(20, 25))
