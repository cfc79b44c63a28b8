"""Models without weights: the published shapes, counted on the meta device. None of them is made here."""

import pytest
import torch
from diffusers import UNet2DConditionModel

from instgenie.errors import ModelError
from instgenie.models.loading.dummy import RECIPES, Recipe, count_dummy, fill_randomly, find_recipe, make_parts, on_meta
from instgenie.models.loading.dummy import sd21_others as others
from instgenie.models.loading.folder import PIPELINES
from instgenie.models.loading.load import load

PUBLISHED = {"flux.1-dev": 11_901_408_320, "sdxl-base-1.0": 2_567_463_684, "sd2.1": 865_910_724}


@pytest.mark.parametrize("name", RECIPES)
def test_published_shapes(name: str) -> None:
    recipe = RECIPES[name]
    network, vae = on_meta(recipe.network), on_meta(recipe.vae)
    assert sum(parameter.numel() for parameter in network.parameters()) == PUBLISHED[name]
    assert sum(parameter.numel() for parameter in vae.parameters()) == pytest.approx(83.7e6, rel=0.005)
    assert {parameter.device.type for parameter in network.parameters()} == {"meta"}
    assert {*recipe.large, *recipe.others()} == set(PIPELINES[recipe.pipeline])
    assert count_dummy(recipe) > PUBLISHED[name]


def test_unknown() -> None:
    assert find_recipe("dummy:sd2.1") is RECIPES["sd2.1"]
    with pytest.raises(ModelError, match=r"'dummy:sd9': dummy:flux.1-dev, dummy:sdxl-base-1.0, dummy:sd2.1 are"):
        load("dummy:sd9", "cpu")


def tiny_unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(block_out_channels=(8, 8), norm_num_groups=4, cross_attention_dim=1024,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=2)  # fmt: skip


@torch.no_grad()
def test_every_weight_is_filled() -> None:
    recipe = Recipe("StableDiffusionPipeline", tiny_unet, lambda: fill_randomly(torch.nn.Linear(3, 4)), others)
    parts = make_parts(recipe, torch.device("cpu"), torch.float32)
    text = parts["text_encoder"](torch.zeros(1, 77, dtype=torch.long))[0]
    answer = parts["unet"](torch.randn(1, 4, 8, 8), 5, text).sample
    assert answer.isfinite().all()
    assert 0.01 < answer.std() < 100
