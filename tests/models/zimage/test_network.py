"""The first law on Z-Image, its forward pass against diffusers' own, and what is refused.

Full mask, no cache == diffusers' stock inpainting pipeline; partial mask == a plain loop over diffusers' transformer
and its scheduler's own stepping.
"""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.cached import KINDS, make_cached, on_trajectory, predict, register_for
from helpers.edits import apart, close, far, make_edit, mixed_edits, quiet_pipeline, run, stock_arguments
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from instgenie.engine.prepare import draw_noise, prepare, template_seed
from instgenie.engine.register import reuse
from instgenie.errors import EditError, ModelError
from instgenie.models.loading.load import load
from instgenie.models.model import Model, pack_latents, unpack_latents
from instgenie.models.zimage.model import ZImageModel
from instgenie.models.zimage.network import MULTIPLE, num_missing
from instgenie.types import Edit

LONG = "a red cat on grass " * 7  # more tokens than one multiple


@pytest.fixture
def model(models: dict[str, Model]) -> ZImageModel:
    model = models["zimage"]
    assert isinstance(model, ZImageModel)
    return model


def noise_of(seed: int, edit: Edit, model: ZImageModel) -> Tensor:  # [1, channels, rows, columns]
    height, width = edit.picture.shape[:2]
    grid = height // model.patch, width // model.patch
    return unpack_latents(draw_noise(seed, grid, model), grid)


@torch.no_grad()
def stock_latents(model: ZImageModel, edit: Edit) -> Tensor:
    given = stock_arguments(edit) | {"negative_prompt": edit.negative_prompt} | model.stock_arguments
    latents = quiet_pipeline(model)(**given, latents=noise_of(edit.seed, edit, model)).images
    return pack_latents(latents).float()


@torch.no_grad()
def plain_loop(model: ZImageModel, edit: Edit) -> Tensor:
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

    scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / edit.steps, edit.steps).tolist(), device=model.device)
    timesteps, _ = pipeline.get_timesteps(edit.steps, edit.strength, model.device)
    sigmas = scheduler.sigmas[-len(timesteps) - 1 :].tolist()
    x = sigmas[0] * torch.where(inside, noise_of(edit.seed, edit, model), noise) + (1 - sigmas[0]) * clean

    prompts = [edit.prompt, edit.negative_prompt][: 1 + (edit.guidance > 0)]
    texts = [pipeline.encode_prompt(one, do_classifier_free_guidance=False)[0][0] for one in prompts]
    for timestep, sigma_next in zip(timesteps, sigmas[1:], strict=True):
        seen = [x[0, :, None].to(model.dtype)] * len(texts)
        first, *others = model.transformer(seen, ((1000 - timestep) / 1000).expand(len(texts)), texts)[0]
        guided = first.float() + edit.guidance * (first.float() - others[0].float()) if others else first.float()
        x = scheduler.step(-guided[None, :, 0], timestep, x, return_dict=False)[0]
        x = torch.where(inside, x, (1 - sigma_next) * clean + sigma_next * noise)
    return pack_latents(x).float()


@pytest.mark.parametrize("size", [(32, 48), (32, 64)])  # without and with as many tokens as a multiple
@pytest.mark.parametrize(("guidance", "prompt"), [(0.0, "a red cat"), (0.7, "a red cat"), (4.0, LONG)])
def test_law_1_full_mask_is_the_stock_pipeline(
    model: ZImageModel, guidance: float, prompt: str, size: tuple[int, int]
) -> None:
    edit = make_edit(prompt, size, share=1.0, seed=7, guidance=guidance, negative_prompt="nothing blue")
    [latents] = run(model, [edit])
    assert apart(latents, stock_latents(model, edit)) <= close(model)
    assert latents.std() > 0.1
    assert apart(latents, stock_latents(model, replace(edit, prompt="a blue dog on grass"))) > far(model)


@pytest.mark.parametrize(("guidance", "strength"), [(0.0, 1.0), (1.5, 0.6)])
def test_law_1_partial_mask_is_a_plain_loop(model: ZImageModel, guidance: float, strength: float) -> None:
    edit = make_edit(steps=5, seed=7, guidance=guidance, negative_prompt="nothing blue", strength=strength)
    [latents] = run(model, [edit])
    assert apart(latents, plain_loop(model, edit)) <= close(model)
    assert apart(latents, plain_loop(model, replace(edit, seed=8))) > far(model)
    assert apart(latents, plain_loop(model, replace(edit, mask=edit.mask[::-1].copy()))) > far(model)


@torch.no_grad()
def test_ragged_is_diffusers_in_bfloat16(model: ZImageModel) -> None:
    """A batch of jobs of several sizes and prompts, against one call of diffusers' transformer for each."""
    low = replace(
        model,
        transformer=copy.deepcopy(model.transformer).bfloat16(),
        text_encoder=copy.deepcopy(model.text_encoder).bfloat16(),
        dtype=torch.bfloat16,
    )
    edits = mixed_edits()[:3]
    jobs = [prepare(edit, model) for edit in edits]
    for job, edit in zip(jobs, edits, strict=True):
        job.branches = low.branches(edit, job.grid)
    for job, edit, found in zip(jobs, edits, low.predict(jobs), strict=True):
        x = unpack_latents(job.latents, job.grid)[0, :, None].bfloat16()
        for prompt, one in zip((edit.prompt, edit.negative_prompt), found, strict=False):
            [stock] = low.transformer([x], 1 - job.timestep[None], [low.encode(prompt)])[0]
            truth = -pack_latents(stock[None, :, 0])
            assert one.dtype == torch.bfloat16
            assert apart(one, truth) / truth.abs().max() < 0.05


@torch.no_grad()
def test_law_3_refined_rows_serve_prompts_of_any_length(model: ZImageModel) -> None:
    """No text has reached the rows that the refiner leaves, wherever a prompt puts the image."""
    edit = make_edit(LONG, (32, 64), guidance=0.0)
    job = on_trajectory(model, edit, 1)
    template = register_for(model, edit, "y")  # with the empty prompt
    assert len(job.branches[0].text) == 2 * MULTIPLE
    assert template.num_text == 0
    found = predict(model, reuse(job, template, (True, False, False)))
    assert max(map(apart, predict(model, job), found)) <= close(model)


def test_law_4_kv_is_y_for_prompts_of_two_lengths(model: ZImageModel) -> None:
    edit = make_edit(LONG, guidance=2.0, negative_prompt="sky")
    [kv, y] = run(model, [make_cached(model, edit, kind) for kind in KINDS])
    assert apart(kv, y) <= close(model)


def test_guidance_counts_from_zero(model: ZImageModel) -> None:
    either = [make_edit(guidance=1.5), make_edit(true_guidance=2.5, guidance=9.0)]
    assert torch.equal(*run(model, either[:1]), *run(model, either[1:]))
    assert [len(prepare(make_edit(guidance=scale), model).branches) for scale in (0.0, 0.5)] == [1, 2]


def test_tokens_are_multiples(model: ZImageModel) -> None:
    """The text has as many rows as both miss."""
    assert [num_missing(count) for count in (1, 32, 33)] == [31, 0, 31]
    rows = {
        (prompt, size): len(prepare(make_edit(prompt, size, guidance=0.0), model).branches[0].text)
        for prompt, size in (("", (32, 64)), (LONG, (32, 64)), ("", (32, 48)))
    }
    assert list(rows.values()) == [MULTIPLE, 2 * MULTIPLE, MULTIPLE + 8]


def test_facts(model: ZImageModel) -> None:
    assert (model.is_fill, model.patch, model.own_size, model.max_side) == (False, 8, 1024, 24 * 8)
    assert (model.steps, model.guidance, model.max_text_tokens, model.num_text_tokens) == (50, 5.0, 40, 64)
    assert model.run_lengths == (3,)
    with pytest.raises(EditError, match=r"size is \(32, 208\): this model takes sides up to 192 pixels"):
        prepare(make_edit(size=(32, 208), steps=1), model)


def change_transformer(**changes: object) -> Callable[[Path], None]:
    return lambda folder: change(folder / "transformer" / "config.json", changes)


def change(path: Path, changes: dict[str, object]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def forget(part: Path, name: str) -> None:
    [path] = part.glob("*.safetensors")
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (change_transformer(in_channels=16), "16 channels: 4, those of a latent, are expected"),
        (change_transformer(all_patch_size=[4]), r"patches of \[4\] in \[1\] frames: patches of \[2\] in \[1\]"),
        (change_transformer(siglip_feat_dim=8), "siglip_feat_dim=8 and qk_norm=True: none and true are expected"),
        (lambda folder: (folder / "tokenizer" / "chat_template.jinja").unlink(), "has no chat template"),
        (lambda folder: forget(folder / "transformer", "x_pad_token"), "transformer lack 'x_pad_token'"),
    ],
)
def test_unsupported_options(
    folders: dict[str, Path], tmp_path: Path, changes: Callable[[Path], None], says: str
) -> None:
    folder = shutil.copytree(folders["zimage"], tmp_path / "model")
    changes(folder)
    with pytest.raises(ModelError, match=says):
        load(str(folder), "cpu", weights=frozenset({"vae"}))


def test_the_turbo_has_defaults_of_its_own(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["zimage"], tmp_path / "model")
    change(folder / "scheduler" / "scheduler_config.json", {"shift": 3.0})
    turbo = load(str(folder), "cpu", weights=frozenset({"vae"}))
    assert (turbo.steps, turbo.guidance) == (8, 0.0)
