"""The laws of convolutions over tiles, on every UNet: pictures of several sizes in one pass are each alone, and masked
tiles are the dense step where their inputs are those that the other tiles were kept from."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.cached import make_cached
from helpers.edits import BOXES, apart, close, far, make_edit, prepare, run

from instgenie.engine.graphs import Graphs
from instgenie.engine.loop import Engine
from instgenie.engine.own import convolution_specs, reuse_own
from instgenie.engine.register import register, reuse
from instgenie.errors import ModelError
from instgenie.jobs.job import Job
from instgenie.models.model import Model
from instgenie.models.unet.model import UnetModel
from instgenie.models.unet.passes import UnetPasses
from instgenie.models.unet.tiled_batch import TiledBatch
from instgenie.types import CacheDtype, Convolutions, Edit, LoraUse

pytestmark = pytest.mark.usefixtures("exact_convolutions")
SIZES = [(64, 96), (96, 32), (64, 96), (32, 32)]


@pytest.fixture
def sdxl(models: dict[str, Model]) -> UnetModel:
    model = models["sdxl"]
    assert isinstance(model, UnetModel)
    return model


def tiled(model: UnetModel, how: Convolutions, tile: int = 8) -> UnetModel:
    return replace(model.with_convolutions(how), tile=tile)


def masked_at(box: tuple[slice, slice], **fields: object) -> Edit:
    """An edit of which one box of pixels is masked."""
    edit = make_edit(**{"size": SIZES[0], "own_steps": (0,), "true_guidance": 2.5} | fields)  # type: ignore[arg-type]
    mask = np.zeros_like(edit.mask)
    mask[box] = True
    return replace(edit, mask=mask)


def test_law_sizes_in_one_pass_are_each_alone(unet: UnetModel) -> None:
    edits = [make_edit(size=size, share=0.3, seed=seed, steps=2) for seed, size in enumerate(SIZES)]
    jobs = [prepare(replace(edit, true_guidance=2.0 - seed % 2), unet) for seed, edit in enumerate(edits)]
    model = tiled(unet, "tiled", 16 if unet.is_fill else 8)
    assert len(model.passes(jobs)) == 1
    assert len(unet.passes(jobs)) == 3
    together, alone = run(model, jobs), [run(unet, [job])[0] for job in jobs]
    assert max(map(apart, together, alone)) <= close(unet)
    assert apart(run(unet, [replace(jobs[0], latents=1.1 * jobs[0].latents)])[0], alone[0]) > far(unet, 10)


def test_law_sizes_of_cached_jobs_are_each_alone(unet: UnetModel) -> None:
    edits = [make_edit(size=size, share=share, steps=2) for size, share in zip(SIZES[1:], (0.1, 0.6, 0.3), strict=True)]
    jobs = [make_cached(unet, edit, "kv") for edit in edits]
    assert len(tiled(unet, "tiled").passes([*jobs, prepare(edits[0], unet)])) == 2
    together, alone = run(tiled(unet, "tiled"), jobs), [run(unet, [job])[0] for job in jobs]
    assert max(map(apart, together, alone)) <= close(unet)


def first_step(model: UnetModel, edit: Edit) -> tuple[Job, Job]:
    """A job before its first step, and after it: a dense step, which leaves its activations behind."""
    engine = Engine(model)
    engine.join(job := reuse_own(prepare(edit, model)))
    before = replace(job)
    engine.step()
    assert job.kept_step == 0
    return before, job


@torch.no_grad()
@pytest.mark.parametrize(("box", "tile", "max_listed"), [("corner", 8, 0), ("pixel", 16, 10**6)])
def test_law_masked_tiles_with_kept_inputs_are_dense(
    unet: UnetModel, box: str, tile: int, max_listed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles convolve, or multiply what each of their tokens reads."""
    monkeypatch.setattr(UnetPasses, "max_listed", max_listed)
    model = tiled(unet, "reused", tile)
    before, job = first_step(model, masked_at(BOXES[box]))
    assert job.activations is not None
    assert job.activations.has_convolutions
    assert job.own_steps is not None
    later = replace(job.own_steps, steps=(job.num_steps - 1,))  # so that the first step reads
    again = replace(job, step=0, latents=before.latents, own_steps=later, kept_step=0)
    packed = model.pack([again])
    assert isinstance(packed, TiledBatch)
    assert all(packed.reads)
    assert len(packed.levels[0].owners) < packed.levels[0].tile_of.numel()
    for whole, own in zip(unet.predict([before])[0], model.predict([again])[0], strict=True):
        assert apart(whole[job.inside], own[job.inside]) <= close(unet)
    moved = replace(again, latents=again.latents.index_fill(0, job.inside, 0.5))
    changed = [
        apart(a[job.inside], b[job.inside])
        for a, b in zip(
            unet.predict([replace(moved, plan=(), activations=None, own_steps=None)])[0],
            unet.predict([before])[0],
            strict=True,
        )
    ]
    assert min(changed) > far(unet, 10)


@torch.no_grad()
def test_law_the_step_that_keeps_is_dense(unet: UnetModel) -> None:
    edit = masked_at(BOXES["edge"], steps=2, own_steps=(0, 1))
    assert apart(run(tiled(unet, "reused"), [reuse_own(prepare(edit, unet))])[0], run(unet, [edit])[0]) <= close(unet)
    _, job = first_step(tiled(unet, "reused"), replace(edit, own_steps=(0,)))
    assert apart(job.latents, step_once(unet, edit).latents) <= close(unet)


def step_once(model: UnetModel, edit: Edit) -> Job:
    engine = Engine(model)
    engine.join(job := prepare(edit, model))
    engine.step()
    return job


def mixed_jobs(model: UnetModel) -> list[Job]:
    edits = [
        masked_at(BOXES["corner"], steps=3, size=(48, 64), true_guidance=1.0),
        masked_at(BOXES["edge"], steps=2, seed=2, prompt="a blue dog on grass"),
        masked_at(BOXES["pixel"], steps=3, size=(32, 64), true_guidance=1.0, picture_seed=1),
    ]
    return [reuse_own(prepare(edit, model)) for edit in edits]


def test_law_masked_tiles_batched_are_alone(unet: UnetModel) -> None:
    """Whatever the sizes, steps and masks of the others; also those without own reuse."""
    model = tiled(unet, "reused")
    jobs = [*mixed_jobs(model), prepare(make_edit(steps=1, seed=4), unet)]
    together, alone = run(model, jobs), [run(model, [job])[0] for job in jobs]
    assert max(map(apart, together, alone)) <= close(unet)
    assert apart(together[0], run(unet, jobs[:1])[0]) > 0  # dense convolutions see more


def test_law_captured_tiles_are_uncaptured(sdxl: UnetModel) -> None:
    model = tiled(sdxl, "reused")
    graphs = Graphs(model, max_readers=99)
    engine = Engine(model, graphs=graphs)
    jobs = [replace(job) for job in mixed_jobs(model)[::2]]
    expected = run(model, jobs)
    for job in jobs:
        engine.join(job)
    while engine.jobs:
        engine.step()
    assert max(map(apart, expected, [job.latents for job in jobs])) <= close(sdxl)
    assert graphs.captured


@pytest.mark.parametrize("how", ["tiled", "reused"])
def test_law_sizes_whose_rows_are_loaded_are_each_alone(unet: UnetModel, how: Convolutions) -> None:
    """In one pass, unless their rows have several formats."""
    model = tiled(unet, how)
    edits = [make_edit(size=size, share=0.1, steps=2, true_guidance=2.0) for size in (SIZES[0], SIZES[1], (48, 80))]
    formats: list[CacheDtype] = ["fp8", "fp8", "int4"]
    jobs = [
        reuse(prepare(edit, model), register(edit.picture, model, edit.size, edit.steps, cache_dtype=dtype))
        for edit, dtype in zip(edits, formats, strict=True)
    ]
    assert [len(one) for one in model.passes(jobs)] == [2, 1]
    assert max(map(apart, run(model, jobs), [run(model, [job])[0] for job in jobs])) <= close(unet)


def test_masks_of_about_one_size_are_one_pass(sdxl: UnetModel) -> None:
    model = tiled(sdxl, "reused", tile=4)
    edits = [masked_at((slice(0, 16), slice(start, start + 16)), size=(64, 64)) for start in (0, 32)]
    readers = [replace(first_step(model, edit)[1]) for edit in edits]
    first, second = (model.pack([job], pads=True) for job in readers)
    assert first.signature == second.signature
    assert first.names == second.names


def test_what_has_dense_convolutions(sdxl: UnetModel, models: dict[str, Model]) -> None:
    network = tiled(sdxl, "reused").describe()
    job = prepare(masked_at(BOXES["edge"]), sdxl)
    assert len(convolution_specs(job, network, sdxl.dtype)) == len(network.convolutions) > 0
    assert not convolution_specs(job, sdxl.describe(), sdxl.dtype)
    with_lora = replace(job, edit=replace(job.edit, loras=(LoraUse("style"),)))
    assert not convolution_specs(with_lora, network, sdxl.dtype)
    with pytest.raises(ModelError, match="has no convolutions that could be reused"):
        models["fill"].with_convolutions("reused")
