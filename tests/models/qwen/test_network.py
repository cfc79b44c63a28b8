"""The first law on Qwen-Image, its forward pass against diffusers' own, and what is refused.

Full mask, no cache == diffusers' stock inpainting pipeline; partial mask == a plain loop over diffusers' transformer
and its scheduler's own stepping. The stock pipeline draws its latents from the autoencoder's distribution and takes no
noise, so it is given both: the mode of the distribution, and the noise of the edit.
"""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from helpers.edits import apart, close, far, make_edit, mixed_edits, quiet_pipeline, run, stock_arguments
from PIL import Image
from torch import Tensor

from instgenie.engine.prepare import draw_noise, prepare, template_seed
from instgenie.errors import EditError, ModelError
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.models.qwen.model import QwenModel
from instgenie.types import Edit


@pytest.fixture
def model(models: dict[str, Model]) -> QwenModel:
    return models["qwen"]


def noise_of(seed: int, edit: Edit, model: QwenModel) -> Tensor:  # [1, tokens, channels]
    height, width = edit.picture.shape[:2]
    return draw_noise(seed, (height // model.patch, width // model.patch), model)[None].to(model.dtype)


def clean_of(pipeline: DiffusionPipeline, edit: Edit, model: QwenModel) -> Tensor:  # [1, tokens, channels]
    """By diffusers' own normalisation and packing."""
    height, width = (side // model.pixels_per_latent for side in edit.picture.shape[:2])
    picture = pipeline.image_processor.preprocess(Image.fromarray(edit.picture)).to(model.device, model.dtype)
    mode = model.vae.encode(picture[:, :, None]).latent_dist.mode()
    config = model.vae.config
    mean, std = (torch.tensor(one).view(1, -1, 1, 1, 1).to(mode) for one in (config.latents_mean, config.latents_std))
    return pipeline._pack_latents((mode - mean) / std, 1, model.latent_channels, height, width)


@torch.no_grad()
def stock_latents(model: QwenModel, edit: Edit, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    pipeline = quiet_pipeline(model)
    noise, clean = noise_of(edit.seed, edit, model), clean_of(pipeline, edit, model)
    monkeypatch.setattr(pipeline, "prepare_latents", lambda *_: (noise, noise, clean))
    given = stock_arguments(edit) | model.stock_arguments | {"guidance_scale": None}
    guided = {"true_cfg_scale": edit.guidance, "negative_prompt": edit.negative_prompt}
    return pipeline(**given, **guided).images[0].float()


@torch.no_grad()
def plain_loop(model: QwenModel, edit: Edit) -> Tensor:
    """Edit with diffusers' transformer and scheduler, computing every token; unmasked tokens are reset after each
    step."""
    pipeline = quiet_pipeline(model)
    scheduler = pipeline.scheduler
    height, width = edit.picture.shape[:2]
    pixels = torch.tensor(edit.mask)[None, None].to(model.device, model.dtype)
    inside = torch.nn.functional.max_pool2d(pixels, model.patch).view(1, -1, 1) > 0
    clean, drawn = clean_of(pipeline, edit, model), noise_of(edit.seed, edit, model)
    noise = noise_of(template_seed(edit.picture, (height, width)), edit, model)
    config, num_tokens = scheduler.config, clean.shape[1]
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    mu = config.base_shift + slope * (num_tokens - config.base_image_seq_len)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / edit.steps, edit.steps), mu=mu, device=model.device)
    timesteps, _ = pipeline.get_timesteps(edit.steps, edit.strength, model.device)
    sigmas = scheduler.sigmas[-len(timesteps) - 1 :].tolist()
    x = sigmas[0] * torch.where(inside, drawn, noise) + (1 - sigmas[0]) * clean
    prompts = [edit.prompt, edit.negative_prompt][: 1 + (edit.guidance > 1)]
    texts = [pipeline.encode_prompt(prompt)[0] for prompt in prompts]
    shapes = [[(1, height // model.patch, width // model.patch)]]
    for timestep, sigma_next in zip(timesteps, sigmas[1:], strict=True):
        time = timestep[None].to(model.dtype) / 1000
        positive, *negative = [
            model.transformer(hidden_states=x, encoder_hidden_states=text, timestep=time, img_shapes=shapes).sample
            for text in texts
        ]
        velocity = positive
        if negative:
            velocity = negative[0] + edit.guidance * (positive - negative[0])
            velocity = velocity * (positive.norm(dim=-1, keepdim=True) / velocity.norm(dim=-1, keepdim=True))
        x = scheduler.step(velocity, timestep, x, return_dict=False)[0]
        x = torch.where(inside, x, (1 - sigma_next) * clean + sigma_next * noise)
    return x[0].float()


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_law_1_full_mask_is_the_stock_pipeline(
    model: QwenModel, guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit = make_edit(share=1.0, seed=7, guidance=guidance, negative_prompt="nothing blue")
    [latents] = run(model, [edit])
    assert apart(latents, stock_latents(model, edit, monkeypatch)) <= close(model)
    assert latents.std() > 0.1
    other = replace(edit, prompt="a blue dog on grass")
    assert apart(latents, stock_latents(model, other, monkeypatch)) > far(model)


@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_law_1_partial_mask_is_a_plain_loop(model: QwenModel, guidance: float, strength: float) -> None:
    edit = make_edit(steps=5, seed=7, guidance=guidance, negative_prompt="nothing blue", strength=strength)
    [latents] = run(model, [edit])
    assert apart(latents, plain_loop(model, edit)) <= close(model)
    assert apart(latents, plain_loop(model, replace(edit, seed=8))) > far(model)
    assert apart(latents, plain_loop(model, replace(edit, mask=edit.mask[::-1].copy()))) > far(model)


def test_law_1_the_last_noise_level_may_be_given(model: QwenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the published schedule. A single step would have to begin and to end at that level."""
    config = {**model.scheduler.config, "shift_terminal": 0.02}
    published = replace(model, scheduler=type(model.scheduler).from_config(config))
    edit = make_edit(share=1.0, seed=7, guidance=1.0)
    [latents] = run(published, [edit])
    assert apart(latents, stock_latents(published, edit, monkeypatch)) <= close(model)
    assert apart(latents, *run(model, [edit])) > far(model)
    with pytest.raises(EditError, match="the number of steps is 1: this model takes at least 2"):
        prepare(replace(edit, steps=1), published)


@torch.no_grad()
def test_ragged_is_diffusers_in_bfloat16(model: QwenModel) -> None:
    """A batch of jobs of several sizes and prompts, against one call of diffusers' transformer for each."""
    low = replace(model, transformer=copy.deepcopy(model.transformer).bfloat16(), dtype=torch.bfloat16)
    jobs = [prepare(edit, model) for edit in mixed_edits()[1:3]]
    for job in jobs:
        job.branches = tuple(
            replace(branch, text=branch.text.bfloat16(), pooled=branch.pooled.bfloat16()) for branch in job.branches
        )
    low.transformer.txt_norm = low.transformer.txt_in = torch.nn.Identity()  # the text of a branch is embedded
    for job, found in zip(jobs, low.predict(jobs), strict=True):
        for branch, one in zip(job.branches, found, strict=True):
            [truth] = low.transformer(
                hidden_states=job.latents[None].bfloat16(),
                encoder_hidden_states=branch.text[None],
                timestep=job.timestep[None],
                img_shapes=[[(1, *job.grid)]],
            ).sample
            assert one.dtype == torch.bfloat16
            assert apart(one, truth) / truth.abs().max() < 0.05


def test_texts_are_as_long_as_their_prompts(model: QwenModel) -> None:
    lengths = [len(model.branch(prompt, (2, 2)).text) for prompt in ("", "a red cat", "a blue dog on grass")]
    assert lengths == [lengths[0], lengths[0] + 3, lengths[0] + 5]
    assert model.num_flowing_text == 0


def test_facts(model: QwenModel) -> None:
    assert (model.patch, model.latent_channels, model.own_size) == (4, 4, 1024)
    assert (model.steps, model.guidance, model.keeps_norm) == (50, 4.0, True)


@pytest.mark.parametrize(
    ("part", "config", "says"),
    [
        ("transformer", {"in_channels": 20}, "has 20 channels and patches of 2: 16 and 2 are expected"),
        ("transformer", {"guidance_embeds": True}, "has guidance_embeds on: all of guidance_embeds, .* must be off"),
        ("transformer", {"use_additional_t_cond": True}, "has use_additional_t_cond on"),
        ("scheduler", {"invert_sigmas": True}, "invert_sigmas on: both must be off"),
    ],
)
def test_what_the_pass_does_not_compute_is_refused(
    part: str, config: dict[str, Any], says: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Only the configs are read: the parts have no weights."""
    folder = shutil.copytree(folders["qwen"], tmp_path / "model")
    path = folder / part / ("scheduler_config.json" if part == "scheduler" else "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(ModelError, match=says):
        load(str(folder), "cpu", weights=frozenset())
