"""Dummies: the published shapes, counted on the meta device. None of them is made here."""

from dataclasses import replace

import pytest
import torch
from diffusers import UNet2DConditionModel, ZImageTransformer2DModel

from instgenie.errors import ModelError
from instgenie.models.families import DUMMIES, FAMILIES
from instgenie.models.layers.linear import as_one
from instgenie.models.loading.dummy import count_dummy, fill_randomly, find_dummy, make_parts, on_meta
from instgenie.models.loading.load import load
from instgenie.models.recipe import Recipe
from instgenie.models.unet.family import sd21_others
from instgenie.models.zimage.network import ZImageNetwork

PUBLISHED = {
    "flux.1-dev": 11_901_408_320,
    "flux.1-kontext-dev": 11_901_408_320,
    "flux.2-klein-4b": 3_875_544_576,
    "flux.2-klein-base-4b": 3_875_544_576,
    "flux.2-klein-9b": 9_078_581_248,
    "flux.2-klein-base-9b": 9_078_581_248,
    "qwen-image": 20_430_401_088,
    "qwen-image-edit": 20_430_401_088,
    "sd3.5-large": 8_056_627_520,
    "sd3.5-medium": 2_243_171_520,
    "sdxl-base-1.0": 2_567_463_684,
    "sd2.1": 865_910_724,
    "z-image-turbo": 6_154_908_736,
}


@pytest.mark.parametrize("name", DUMMIES)
def test_published_shapes(name: str) -> None:
    family, recipe = find_dummy(name)
    network, vae = on_meta(recipe.network), on_meta(recipe.vae)
    assert sum(parameter.numel() for parameter in network.parameters()) == PUBLISHED[name]
    num_vae = 126.9e6 if name.startswith("qwen") else 83.7e6
    assert sum(parameter.numel() for parameter in vae.parameters()) == pytest.approx(num_vae, rel=0.005)
    assert {parameter.device.type for parameter in network.parameters()} == {"meta"}
    assert {family.network_name, "vae", *recipe.others()} == set(family.pipelines[recipe.pipeline])
    assert count_dummy(recipe, family) > 2 * PUBLISHED[name]  # bytes, of bfloat16


def test_unknown() -> None:
    assert find_dummy("dummy:sd2.1") == (FAMILIES["unet"], FAMILIES["unet"].dummies["sd2.1"])
    with pytest.raises(
        ModelError, match=r"'dummy:sd9': dummy:flux.1-dev, dummy:flux.1-kontext-dev, .*dummy:sd2.1.* are"
    ):
        load("dummy:sd9", "cpu")


def tiny_unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(block_out_channels=(8, 8), norm_num_groups=4, cross_attention_dim=1024,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=2)  # fmt: skip


TINY_RECIPE = Recipe("StableDiffusionPipeline", tiny_unet, lambda: fill_randomly(torch.nn.Linear(3, 4)), sd21_others)


@torch.no_grad()
def test_every_weight_is_filled() -> None:
    parts = make_parts(TINY_RECIPE, FAMILIES["unet"], torch.device("cpu"), torch.float32)
    text = parts["text_encoder"](torch.zeros(1, 77, dtype=torch.long))[0]
    answer = parts["unet"](torch.randn(1, 4, 8, 8), 5, text).sample
    assert answer.isfinite().all()
    assert 0.01 < answer.std() < 100


def test_hollow_parts_have_no_weights() -> None:
    hollow = ("unet", "text_encoder")
    parts = make_parts(TINY_RECIPE, FAMILIES["unet"], torch.device("cpu"), torch.float32, hollow)
    assert all(parameter.is_meta for part in hollow for parameter in parts[part].parameters())
    assert not any(parameter.is_meta for parameter in parts["vae"].parameters())


@torch.no_grad()
def test_joined_layers_are_filled_at_their_places() -> None:
    family = FAMILIES["zimage"]
    recipe = replace(family.dummies["z-image-turbo"], network=tiny_z_image, vae=TINY_RECIPE.vae)
    parts = make_parts(recipe, family, torch.device("cpu"), torch.float32, quantize=family.join_layers)
    attention = parts["transformer"].layers[0].attention
    weight = as_one([layer.weight for layer in (attention.to_q, attention.to_k, attention.to_v)])
    assert weight is not None
    assert weight.shape == (3 * 48, 48)
    assert 0.1 < weight.std() < 0.2


@torch.no_grad()
def test_prompts_of_a_hollow_network_have_the_weights_that_they_pass() -> None:
    """A language model embeds the words of a chat, and the network's own layers what it answers."""
    family = FAMILIES["zimage"]
    published = family.dummies["z-image-turbo"]
    recipe = replace(published, network=tiny_z_image, vae=TINY_RECIPE.vae)
    parts = make_parts(recipe, family, torch.device("cpu"), torch.float32, ("transformer",))
    network, tokenizer = parts["transformer"], parts["tokenizer"]
    assert all(one.is_meta != family.is_of_prompts(name) for name, one in network.named_parameters())
    said = tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    words = tokenizer(said, return_tensors="pt").input_ids
    told = parts["text_encoder"](words, output_hidden_states=True).hidden_states[-2][0]
    text = ZImageNetwork(network).embed_prompt(told)
    assert text.shape == (32, 48)
    assert text.isfinite().all()


def tiny_z_image() -> ZImageTransformer2DModel:
    return ZImageTransformer2DModel(
        in_channels=4, dim=48, n_layers=1, n_refiner_layers=1, n_heads=3, n_kv_heads=3, axes_dims=[4, 6, 6]
    )
