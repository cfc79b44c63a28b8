"""The first law on Stable Diffusion 3, its forward pass against diffusers' own, and what is refused.

Full mask, no cache == diffusers' stock inpainting pipeline; partial mask == a plain loop over diffusers' transformer
and its scheduler's own stepping.
"""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cached import KINDS, make_cached
from helpers.edits import apart, close, far, make_edit, mixed_edits, quiet_pipeline, run, stock_arguments
from helpers.families import sd3_plain
from PIL import Image
from torch import Tensor

from instgenie.engine.prepare import draw_noise, prepare, template_seed
from instgenie.errors import EditError, ModelError
from instgenie.models.loading.load import load
from instgenie.models.model import Model, pack_latents, unpack_latents
from instgenie.models.sd3.model import Sd3Model, take_turns
from instgenie.types import Edit


@pytest.fixture(scope="session")
def plain(where: Any, tmp_path_factory: pytest.TempPathFactory) -> Sd3Model:
    """Another shape, for the tests of this family alone."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("sd3_plain")
    sd3_plain().save_pretrained(folder)
    return load(str(folder), where.device, where.dtype)


@pytest.fixture(params=["dual", "plain"])
def model(request: pytest.FixtureRequest, models: dict[str, Model], plain: Sd3Model) -> Sd3Model:
    return models["sd3"] if request.param == "dual" else plain


def noise_of(seed: int, edit: Edit, model: Sd3Model) -> Tensor:  # [1, channels, rows, columns]
    height, width = edit.picture.shape[:2]
    grid = height // model.patch, width // model.patch
    return unpack_latents(draw_noise(seed, grid, model), grid).to(model.dtype)


@torch.no_grad()
def stock_latents(model: Sd3Model, edit: Edit) -> Tensor:
    given = stock_arguments(edit) | {"negative_prompt": edit.negative_prompt} | model.stock_arguments
    latents = quiet_pipeline(model)(**given, latents=noise_of(edit.seed, edit, model)).images
    return pack_latents(latents).float()


@torch.no_grad()
def plain_loop(model: Sd3Model, edit: Edit) -> Tensor:
    """Edit with diffusers' transformer and scheduler, computing every token; unmasked tokens are reset after each
    step."""
    pipeline = quiet_pipeline(model)
    scheduler, config = pipeline.scheduler, model.vae.config
    height, width = edit.picture.shape[:2]
    here = {"device": model.device, "dtype": model.dtype}
    picture = pipeline.image_processor.preprocess(Image.fromarray(edit.picture)).to(**here)
    pixels = torch.tensor(edit.mask)[None, None].to(**here)
    inside = torch.nn.functional.max_pool2d(pixels, model.patch).repeat_interleave(2, 2).repeat_interleave(2, 3) > 0
    clean = (model.vae.encode(picture).latent_dist.mode() - config.shift_factor) * config.scaling_factor
    noise = noise_of(template_seed(edit.picture, (height, width)), edit, model)

    num_tokens = height * width // model.patch**2
    mu = 0.5 + (1.15 - 0.5) * (num_tokens - 256) / (4096 - 256)
    scheduler.set_timesteps(edit.steps, mu=mu, device=model.device)
    timesteps, _ = pipeline.get_timesteps(edit.steps, edit.strength, model.device)
    sigmas = scheduler.sigmas[-len(timesteps) - 1 :].tolist()
    x = sigmas[0] * torch.where(inside, noise_of(edit.seed, edit, model), noise) + (1 - sigmas[0]) * clean

    texts = pipeline.encode_prompt(
        edit.prompt, None, None, negative_prompt=edit.negative_prompt, max_sequence_length=model.num_t5_tokens
    )
    pairs = [(texts[0], texts[2]), (texts[1], texts[3])][: 1 + (edit.guidance > 1)]
    for timestep, sigma_next in zip(timesteps, sigmas[1:], strict=True):
        positive, *negative = [
            model.transformer(x, sequence, pooled, timestep[None]).sample for sequence, pooled in pairs
        ]
        velocity = negative[0] + edit.guidance * (positive - negative[0]) if negative else positive
        x = scheduler.step(velocity, timestep, x, return_dict=False)[0]
        x = torch.where(inside, x, (1 - sigma_next) * clean + sigma_next * noise)
    return pack_latents(x).float()


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_law_1_full_mask_is_the_stock_pipeline(model: Sd3Model, guidance: float) -> None:
    edit = make_edit(share=1.0, seed=7, guidance=guidance, negative_prompt="nothing blue")
    [latents] = run(model, [edit])
    assert apart(latents, stock_latents(model, edit)) <= close(model)
    assert latents.std() > 0.1
    assert apart(latents, stock_latents(model, replace(edit, prompt="a blue dog on grass"))) > far(model)


@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_law_1_partial_mask_is_a_plain_loop(model: Sd3Model, guidance: float, strength: float) -> None:
    edit = make_edit(steps=5, seed=7, guidance=guidance, negative_prompt="nothing blue", strength=strength)
    [latents] = run(model, [edit])
    assert apart(latents, plain_loop(model, edit)) <= close(model)
    assert apart(latents, plain_loop(model, replace(edit, seed=8))) > far(model)
    assert apart(latents, plain_loop(model, replace(edit, mask=edit.mask[::-1].copy()))) > far(model)


@torch.no_grad()
def test_ragged_is_diffusers_in_bfloat16(model: Sd3Model) -> None:
    """A batch of jobs of several sizes and prompts, against one call of diffusers' transformer for each."""
    low = replace(model, transformer=copy.deepcopy(model.transformer).bfloat16(), dtype=torch.bfloat16)
    jobs = [prepare(edit, model) for edit in mixed_edits()[1:3]]
    for job in jobs:
        job.branches = tuple(
            replace(branch, text=branch.text.bfloat16(), pooled=branch.pooled.bfloat16()) for branch in job.branches
        )
    low.transformer.context_embedder = torch.nn.Identity()  # the text of a branch is embedded
    for job, found in zip(jobs, low.predict(jobs), strict=True):
        x = unpack_latents(job.latents, job.grid).bfloat16()
        for branch, one in zip(job.branches, found, strict=True):
            stock = low.transformer(x, branch.text[None], branch.pooled[None], 1000 * job.timestep[None]).sample
            truth = pack_latents(stock)
            assert one.dtype == torch.bfloat16
            assert apart(one, truth) / truth.abs().max() < 0.05


def test_prompts_of_all_encoders_come_first() -> None:
    order, num_prompt = take_turns((3, 2), (5, 1))
    assert order.tolist() == [0, 3, 1, 4, 2, 5, 6, 7]
    assert num_prompt == 3  # two of the first sequence, and what stands between them
    assert take_turns((3, 2), (5, 4))[1] == 7
    assert take_turns((3, 3), (5, 5))[1] == 8


def test_guidance_is_true_guidance(model: Sd3Model) -> None:
    either = [make_edit(guidance=2.5), make_edit(true_guidance=2.5, guidance=9.0)]
    assert torch.equal(*run(model, either[:1]), *run(model, either[1:]))
    assert [len(prepare(make_edit(guidance=scale), model).branches) for scale in (0.0, 1.0, 1.5)] == [1, 1, 2]


def test_facts(models: dict[str, Model], plain: Sd3Model) -> None:
    facts = [
        (one.is_fill, one.patch, one.own_size, one.num_text_tokens, one.steps, one.guidance, one.max_side)
        for one in (models["sd3"], plain)
    ]
    assert facts == [(False, 4, 32, 20, 28, 7.0, 100), (False, 4, 32, 15, 28, 7.0, 96)]
    assert [block.num_attentions for block in models["sd3"].joint_network.blocks] == [2, 1, 1]


@pytest.mark.parametrize("true_guidance", [1.0, 2.5])
def test_law_4_kv_is_y_without_norms(plain: Sd3Model, true_guidance: float) -> None:
    edit = make_edit(prompt="a blue dog", true_guidance=true_guidance, negative_prompt="sky")
    [kv, y] = run(plain, [make_cached(plain, edit, kind) for kind in KINDS])
    assert apart(kv, y) <= close(plain)


def test_a_side_beyond_the_table_of_positions_is_refused(plain: Sd3Model) -> None:
    prepare(make_edit(size=(32, 96), steps=1), plain)
    with pytest.raises(EditError, match=r"size is \(32, 112\): this model takes sides up to 96 pixels"):
        prepare(make_edit(size=(32, 112), steps=1), plain)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"in_channels": 33}, "33 channels: 16, those of a latent, are expected"),
        ({"qk_norm": "layer_norm"}, "qk_norm='layer_norm': rms_norm or none"),
        ({"patch_size": 4}, "patches of 4 and pos_embed_max_size=25: patches of 2"),
    ],
)
def test_unsupported_transformers(folders: dict[str, Path], tmp_path: Path, changes: dict, says: str) -> None:
    folder = shutil.copytree(folders["sd3"], tmp_path / "model")
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=says):
        load(str(folder), "cpu", weights=frozenset({"vae"}))
