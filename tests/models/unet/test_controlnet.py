"""ControlNets of UNets against diffusers' modules and, where they know several kinds of images, its pipeline."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel, ControlNetUnionModel, StableDiffusionXLControlNetUnionInpaintPipeline
from helpers.controlnets import controlled, save_controlnet
from helpers.edits import CLOSE, apart, close, make_edit, prepare, run, stock_arguments
from helpers.families import widen
from PIL import Image

from instgenie.adapters.controlnets import ControlNetRegistry, open_controlnet
from instgenie.engine.controls import control_shape, open_job, step_of
from instgenie.engine.prepare import draw_noise
from instgenie.errors import ControlError
from instgenie.models.model import Model, unpack_latents
from instgenie.models.unet.controlnet import load_unet_controlnet
from instgenie.types import ControlUse

NO_TRANSFORMERS: dict[str, Any] = {"down_block_types": ("DownBlock2D",) * 3, "mid_block_type": "UNetMidBlock2D"}


@pytest.fixture
def model(models: dict[str, Model]) -> Any:
    return models["sdxl"]


@pytest.fixture
def net(model: Any, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    names = (
        "down_block_types", "block_out_channels", "layers_per_block", "norm_num_groups", "cross_attention_dim",
        "attention_head_dim", "transformer_layers_per_block", "use_linear_projection", "addition_embed_type",
        "addition_time_embed_dim", "projection_class_embeddings_input_dim",
    )  # fmt: skip
    own = {name: model.unet.config[name] for name in names}
    network = ControlNetUnionModel(
        **own, in_channels=4, conditioning_embedding_out_channels=(4, 8, 8), num_control_type=4,
        num_trans_channel=16, num_trans_head=2, num_proj_channel=16,
    )  # fmt: skip
    widen(network)
    network.save_pretrained(tmp_path)
    return tmp_path


def test_a_mode_is_that_of_diffusers(model: Any, net: Path) -> None:
    edit = controlled(make_edit(share=1.0, guidance=2.5, steps=3), (net, {"scale": 0.7, "mode": 2}))
    [latents] = run(model, [edit])
    pipeline = StableDiffusionXLControlNetUnionInpaintPipeline(
        **model.parts, controlnet=ControlNetUnionModel.from_pretrained(net),
        force_zeros_for_empty_prompt=model.empty_is_zero, add_watermarker=False,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    height, width = edit.picture.shape[:2]
    grid = height // model.patch, width // model.patch
    stock = pipeline(
        **stock_arguments(edit), control_image=[Image.fromarray(edit.control_images[0])], control_mode=[2],
        controlnet_conditioning_scale=0.7, latents=unpack_latents(draw_noise(edit.seed, grid, model), grid, 1),
    ).images[0]  # fmt: skip
    assert apart(latents, stock.flatten(1).T) <= CLOSE * latents.abs().max()


def test_a_batch_mixes_modes(model: Any, net: Path) -> None:
    edits = [controlled(make_edit(seed=mode, steps=2), (net, {"mode": mode})) for mode in range(3)]
    together, alone = run(model, edits), [run(model, [edit])[0] for edit in edits]
    assert max(map(apart, together, alone)) <= CLOSE * max(one.abs().max().item() for one in alone)
    same = [controlled(make_edit(steps=2), (net, {"mode": mode})) for mode in range(2)]
    assert apart(*run(model, same)) > 10 * CLOSE


def test_modes_are_checked(model: Any, net: Path) -> None:
    found = open_controlnet("union", net)
    found.check(control_shape(model))
    assert (found.num_modes, found.places) == (4, (4, 1))
    with pytest.raises(ControlError, match="is 4: a number from 0 to 3"):
        ControlNetRegistry({"union": str(net)}).resolve([ControlUse("union", mode=4)])


@pytest.mark.parametrize(
    ("name", "fields", "is_copy"),
    [
        ("sd", {}, True),
        ("sdxl", {}, True),
        ("sd", NO_TRANSFORMERS, True),
        ("sd", {"only_cross_attention": True}, False),
        ("sd", {"controlnet_conditioning_channel_order": "bgr"}, True),
    ],
    ids=["sd", "sdxl", "no transformers", "other transformers", "bgr"],
)
def test_residuals_are_those_of_diffusers(
    name: str, fields: dict[str, Any], is_copy: bool, models: dict[str, Model], tmp_path: Path
) -> None:
    """Two branches; the image is embedded and the texts are crossed before the step."""
    model = models[name]
    folder = save_controlnet(tmp_path, model, **fields)
    job = prepare(controlled(make_edit(true_guidance=2.0), (folder, {"scale": 0.7})), model)
    net = load_unet_controlnet(folder, model.device, model.dtype)
    assert net.is_copy is is_copy
    stock = ControlNetModel.from_pretrained(folder)
    with torch.inference_mode():
        opened, step = open_job(job, [net]), step_of(job, model)
        batch = net.pack([(opened, step, 0)])
        found = net.run(batch)
        skips, middle = stock(
            batch.sample,
            batch.timestep,
            encoder_hidden_states=torch.stack(opened.texts),
            controlnet_cond=torch.stack([job.controls[0].hint] * 2),
            conditioning_scale=0.7,
            added_cond_kwargs={"text_embeds": batch.facts["pooled"], "time_ids": batch.facts["sizes"]},
            return_dict=False,
        )
    assert len(batch.sample) == 2
    assert max(map(apart, found, [*skips, middle])) <= close(model)
    assert min(residual.abs().max().item() for residual in found) > 100 * close(model)
