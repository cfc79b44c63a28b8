"""The laws of convolutions that read a registered template, on every UNet: masked tiles are the dense step where inputs
are those of the registration, tiles that are all active are dense convolutions, and neither the batch nor the tier nor
a capture changes more than rounding."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.cached import KINDS, on_trajectory, predict
from helpers.edits import BOXES, apart, close, far, make_edit, run
from torch import Tensor

from instgenie.bench.ours import move_to_host
from instgenie.cache.disk import DiskTier
from instgenie.cache.host import HostTier
from instgenie.cache.store import Store
from instgenie.engine.graphs import Graphs
from instgenie.engine.loading.loader import Loader
from instgenie.engine.loading.route import make_route
from instgenie.engine.loop import Engine
from instgenie.engine.own import reuse_own
from instgenie.engine.prepare import prepare
from instgenie.engine.register import make_activations, make_key, places_of_tiles, register, register_in, reuse
from instgenie.jobs.activations import Activations, Kind, parse_key
from instgenie.jobs.job import Job, reads_convolutions
from instgenie.models.model import Model
from instgenie.models.unet.model import UnetModel
from instgenie.models.unet.tiled_batch import TiledBatch
from instgenie.types import CacheDtype, Edit, LoraUse

pytestmark = pytest.mark.usefixtures("exact_convolutions")
SIZE = (48, 80)  # 12 by 20 tokens: no multiple of a tile
QUANTISED: dict[CacheDtype, float] = {"fp8": 0.03, "int4": 0.1}  # relative errors


@pytest.fixture
def sd(models: dict[str, Model]) -> UnetModel:
    model = models["sd"]
    assert isinstance(model, UnetModel)
    return model


@cache
def reused(model: UnetModel, tile: int = 8) -> UnetModel:
    return replace(model.with_convolutions("reused"), tile=tile)


def masked_at(box: str, **fields: Any) -> Edit:
    edit = make_edit(**{"size": SIZE, "steps": 3, "true_guidance": 2.5} | fields)
    mask = np.zeros_like(edit.mask)
    mask[BOXES[box]] = True
    return replace(edit, mask=mask)


@cache
def template(
    model: UnetModel, size: tuple[int, int] = SIZE, kind: Kind = "kv", dtype: CacheDtype = "model", steps: int = 3
) -> Activations:
    edit = make_edit(size=size, steps=steps)
    return register(edit.picture, model, size, steps, edit.guidance, kind, cache_dtype=dtype)


def off(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


@torch.no_grad()
@pytest.mark.parametrize(
    ("box", "tile", "kind", "dtype"),
    [
        ("corner", 8, "kv", "model"),
        ("pixel", 16, "kv", "model"),
        ("edge", 8, "y", "model"),
        ("edge", 4, "kv", "fp8"),
        ("corner", 8, "kv", "int4"),
    ],
)
def test_law_3_inputs_of_the_registration_are_dense(
    unet: UnetModel, box: str, tile: int, kind: Kind, dtype: CacheDtype
) -> None:
    model = reused(unet, tile)
    edit = masked_at(box, prompt="", guidance=2.0)
    kept = template(model, kind=kind, dtype=dtype)
    assert kept.has_convolutions
    for step in (0, 2):
        job = on_trajectory(unet, edit, step)
        reading = reuse(job, kept)
        packed = model.pack([reading])
        assert isinstance(packed, TiledBatch)
        assert all(packed.reads)
        assert len(packed.levels[0].owners) < packed.levels[0].tile_of.numel()
        for dense, found in zip(predict(unet, job), predict(model, reading), strict=True):
            if dtype == "model":
                assert apart(found, dense) <= close(unet)
            else:
                assert 0 < off(found, dense) < QUANTISED[dtype] + close(unet)


def test_law_tiles_that_are_all_active_are_dense_convolutions(unet: UnetModel) -> None:
    """A masked pixel in every tile: transformers compute few tokens, convolutions see everything."""
    model = reused(unet)
    edit = make_edit(size=SIZE, steps=3)
    mask = np.zeros_like(edit.mask)
    mask[2::16, 2::16] = True
    job = prepare(replace(edit, mask=mask), unet)
    assert len(job.inside) < len(job.masked) // 8
    kept = template(model)
    without = replace(kept, rows=kept.rows[: kept.num_places], ranks=())
    found, dense = run(model, [reuse(job, kept)])[0], run(unet, [reuse(job, without)])[0]
    assert apart(found, dense) <= close(unet)
    few = reuse(prepare(masked_at("corner"), unet), kept)
    assert apart(run(model, [few])[0], run(unet, [replace(few, activations=without)])[0]) > far(unet, 1)


def test_rows_of_transformers_are_those_of_whole_pictures(unet: UnetModel) -> None:
    """A registration over tiles keeps what one over whole pictures does."""
    kept, plain = template(reused(unet)), template(unet)
    for found, expected in zip(kept.rows, plain.rows, strict=False):
        assert off(found.float(), expected.float()) < (1e-4 if unet.dtype == torch.float32 else 0.03)
    assert len(kept.rows) > len(plain.rows) == kept.num_places
    assert kept.key == replace(plain.key, tile=8)


def mixed_jobs(model: UnetModel, unet: UnetModel, dtype: CacheDtype = "model") -> list[Job]:
    """Jobs that read templates, one at another step and one with dense steps, one that reads its own activations, one
    with a template that keeps nothing for convolutions, and a dense one."""
    kept = template(model, dtype=dtype)
    own = masked_at("pixel", own_steps=(0,), picture_seed=1, true_guidance=1.0)
    return [
        reuse(prepare(masked_at("corner"), model), kept),
        reuse(prepare(masked_at("edge", strength=0.7, seed=2, prompt="a blue dog on grass"), model), kept),
        reuse(prepare(masked_at("pixel", dense_steps=1, true_guidance=1.0), model), kept),
        reuse_own(prepare(own, model)),
        reuse(prepare(masked_at("edge", seed=5), model), template(unet, dtype=dtype)),
        prepare(make_edit(steps=2, seed=4), model),
    ]


def test_law_2_batched_is_alone(unet: UnetModel) -> None:
    model = reused(unet)
    jobs = mixed_jobs(model, unet)
    together, alone = run(model, jobs), [run(model, [job])[0] for job in jobs]
    assert max(map(apart, together, alone)) <= close(unet)
    assert apart(together[4], run(unet, jobs[4:5])[0]) <= close(unet)  # dense convolutions without rows for them


def run_with(model: UnetModel, jobs: list[Job], **parts: Any) -> list[Tensor]:
    own = [replace(job) for job in jobs]
    engine = Engine(model, **parts)
    for job in own:
        engine.join(job)
    while engine.jobs:
        engine.step()
    return [job.latents for job in own]


@pytest.mark.parametrize("dtype", ["model", "fp8", "int4"])
def test_law_5_loaded_is_at_hand(unet: UnetModel, dtype: CacheDtype) -> None:
    model, host = reused(unet), HostTier(2**33)
    near = template(model, dtype=dtype)
    away = move_to_host(near, host, model)
    prepared = [prepare(masked_at(box, seed=seed), model) for seed, box in enumerate(BOXES)]
    expected = run(model, [reuse(job, near) for job in prepared])
    for max_buffers in (1, None):
        found = run_with(model, [reuse(job, away) for job in prepared], loader=Loader(model, max_buffers))
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", ["model", "fp8"])
def test_law_captured_is_uncaptured(unet: UnetModel, dtype: CacheDtype) -> None:
    model, host = reused(unet), HostTier(2**33)
    jobs = mixed_jobs(model, unet, dtype)[:3]
    graphs = Graphs(model, max_readers=99)
    away = move_to_host(template(model, dtype=dtype), host, model)
    far_away = [replace(job, activations=away.last(job.num_steps)) for job in jobs]
    expected = run(model, jobs)
    for given in (jobs, far_away):
        assert max(map(apart, run_with(model, given, graphs=graphs), expected)) <= close(unet)
    assert graphs.captured


@pytest.mark.parametrize("kind", KINDS)
def test_a_route_has_the_order_of_the_pass(sd: UnetModel, kind: Kind) -> None:
    model = reused(sd)
    job = reuse(prepare(masked_at("edge"), model), template(model, kind=kind, dtype="fp8"))
    seen: list[int] = []

    class Watching(Loader):
        def move(self, stop: int) -> None:
            seen.append(self.route.stops[stop][0].place)
            super().move(stop)

    run_with(model, [job], loader=Watching(model))
    assert job.activations is not None
    ranks = [job.activations.rank(place) for place in seen]
    assert ranks == [*range(len(job.activations.rows))] * job.num_steps
    if model.device.type == "cpu":
        assert [stop[0].place for stop in make_route([[job]]).stops] == seen[: len(ranks) // job.num_steps]


def test_templates_go_through_all_tiers(sd: UnetModel, tmp_path: Path) -> None:
    model, edit = reused(sd), masked_at("corner")
    disk = Store(disk=DiskTier(tmp_path, 2**30))
    register_in(disk, edit.picture, model, edit.size, edit.steps, edit.guidance, cache_dtype="int4")
    disk.settle()
    key = make_key(edit, model, "kv", "int4")
    found = Store(disk=DiskTier(tmp_path, 2**30), host=HostTier(2**30)).get(key, model.device)
    assert found is not None
    kept = make_activations(key, found.span, model)
    near = template(model, dtype="int4")
    assert all(map(torch.equal, kept.rows, (rows.cpu() for rows in near.rows)))
    dtypes = {place: rows.dtype for place, rows in enumerate(kept.rows)}
    assert {place for place, dtype in dtypes.items() if dtype == torch.float32} == places_of_tiles(model)


def test_keys_of_templates_with_rows_for_convolutions(sd: UnetModel) -> None:
    edit = masked_at("corner")
    plain, tiled, wide = (make_key(edit, model, "kv") for model in (sd, reused(sd), reused(sd, 16)))
    assert (plain.tile, tiled.tile, wide.tile) == (0, 8, 16)
    assert len({key.name for key in (plain, tiled, wide)}) == 3
    assert "tile" not in plain.text
    assert parse_key(tiled.text) == tiled


def test_adapters_have_dense_convolutions(sd: UnetModel) -> None:
    model = reused(sd)
    job = reuse(prepare(masked_at("corner"), model), template(model))
    assert reads_convolutions(job)
    assert not reads_convolutions(replace(job, plan=(False, *job.plan[1:])))
    adapted = replace(job, edit=replace(job.edit, loras=(LoraUse("style"),)))
    assert not reads_convolutions(adapted)
    without = replace(job, activations=template(sd).last(job.num_steps))
    assert apart(run(model, [adapted])[0], run(sd, [without])[0]) <= close(sd)
