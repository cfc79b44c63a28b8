"""The laws with activations that are loaded during a step, with planned jobs and with packed rows."""

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
import torch
from helpers.cached import KINDS, feasible, on_trajectory, predict, register_for
from helpers.edits import apart, close, in_float32, make_edit, prepare, run, widened
from helpers.names import FAMILIES
from torch import Tensor

from instgenie.bench.ours import move_to_host
from instgenie.cache.host import HostTier
from instgenie.cost.latency import Latency
from instgenie.cost.network import Demand
from instgenie.cost.plan import Plan
from instgenie.cost.planner import POLICIES, plan_batch
from instgenie.engine.demand import make_demands
from instgenie.engine.loading.lanes import RowChoice
from instgenie.engine.loading.loader import Loader
from instgenie.engine.loading.route import make_route, places_of_plan
from instgenie.engine.loop import Engine
from instgenie.engine.planning import Planning
from instgenie.engine.register import register, reuse
from instgenie.jobs.activations import Activations, CacheDtype, Kind
from instgenie.jobs.job import Job
from instgenie.jobs.rows import StepRows
from instgenie.models.model import Model
from instgenie.types import PlanPolicy

QUANTISED = 0.03  # relative error: up to 1/16 per value in e4m3, less in a result of many values
CACHE_DTYPES: tuple[CacheDtype, ...] = ("model", "fp8")


def off(found: Tensor, truth: Tensor) -> float:
    """The relative error."""
    return float((found - truth).norm() / truth.norm())


def rounding(model: Model, job: Job, dense: list[Tensor]) -> float:
    """The relative error of the model's own numbers: how far its predictions are from those in float32."""
    if model.dtype == torch.float32:
        return 0.0
    return max(map(off, dense, predict(in_float32(model), widened(job))))


def run_with(model: Model, jobs: list[Job], loader: Loader, planning: Planning | None = None) -> list[Tensor]:
    own = [replace(job) for job in jobs]
    engine = Engine(model, planning=planning, loader=loader)
    for job in own:
        engine.join(job)
    while engine.jobs:
        engine.step()
    return [job.latents for job in own]


@pytest.fixture(scope="session")
def host() -> HostTier:
    return HostTier(2**33)


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_law_5_loaded_is_at_hand(model: Model, kind: Kind, cache_dtype: CacheDtype, host: HostTier) -> None:
    """Results are bit-identical for every size of the ring. The batch has jobs that share a template, jobs at other
    steps of it, and jobs with other templates."""
    edits = [
        make_edit(steps=3, true_guidance=2.0),
        make_edit(steps=3, share=0.1, seed=1),
        make_edit(steps=3, share=0.2, seed=2, strength=0.7),
        make_edit(steps=2, size=(64, 32), picture_seed=1, dense_steps=1),
    ]
    shared = register_for(model, edits[0], kind, cache_dtype=cache_dtype)
    near = [shared, shared, shared, register_for(model, edits[3], kind, cache_dtype=cache_dtype)]
    prepared = [prepare(edit, model) for edit in edits]
    far_away = [move_to_host(one, host, model) for one in near]
    plans = [None, *feasible(kind, near[0].run_lengths)[1:2], None, feasible(kind, near[0].run_lengths)[-1]]

    def make_jobs(found: list[Activations]) -> list[Job]:
        return [reuse(job, one, plan) for job, one, plan in zip(prepared, found, plans, strict=True)]

    expected = run(model, make_jobs(near))
    on_cuda = model.device.type == "cuda"
    rings: tuple[int | None, ...] = (1, 2, 3, None) if on_cuda else (1, 2, None)
    rows: tuple[RowChoice, ...] = ("auto", "whole", "needed") if on_cuda else ("auto",)
    for max_buffers, which in itertools.product(rings, rows):
        loader = Loader(model, max_buffers, which)
        for _ in range(1 if max_buffers == 2 else 2):  # the second time with the buffers and routes of the first
            found = run_with(model, make_jobs(far_away), loader)
            assert all(map(torch.equal, found, expected))


class PlanRecorder(Loader):
    """Records the plan of every step."""

    def __init__(self, model: Model, max_buffers: int | None = None) -> None:
        super().__init__(model, max_buffers)
        self.plans: list[Plan] = []

    def loading(self, jobs: Sequence[Job]) -> AbstractContextManager[StepRows]:
        self.plans.append(jobs[0].plan)
        return super().loading(jobs)


def slow_latency(model: Model, jobs: Sequence[Job]) -> Latency:
    """A latency at which loading the first block takes longer than computing it cached, and less than computing it
    dense."""
    latency = Latency("slow", "any", block=0, flop=1e-9, flop_outside=0, load=0, byte=1)
    cost = latency.block_costs(model.describe(), away_from_here(model, jobs))[0]
    return replace(latency, byte=(cost.cached + cost.dense) / 2 / cost.load)


def away_from_here(model: Model, jobs: Sequence[Job]) -> list[Demand]:
    """Demands as if the activations were on another device; on a CPU, main memory needs no loading."""
    return [replace(demand, in_gpu=frozenset()) for demand in make_demands(jobs, model.describe())]


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_law_5_with_every_policy(model: Model, kind: Kind, policy: PlanPolicy, host: HostTier) -> None:
    """A planned batch computes what jobs with that plan compute, from any tier, batched or alone."""
    edits = [make_edit(steps=2), make_edit(steps=2, share=0.1, seed=1, true_guidance=2.0)]
    near = register_for(model, edits[0], kind)
    away = move_to_host(near, host, model)
    prepared = [prepare(edit, model) for edit in edits]
    jobs = [reuse(job, away) for job in prepared]
    latency = slow_latency(model, jobs)
    loader = PlanRecorder(model, 1 if policy == "naive" else None)
    together = run_with(model, jobs, loader, Planning(model, latency, policy))
    jobs = [reuse(job, near) for job in prepared]
    for plan in loader.plans:
        Engine(model).advance([give(job, plan) for job in jobs])
    assert all(torch.equal(latents, job.latents) for latents, job in zip(together, jobs, strict=True))
    planned = plan_batch(model.describe(), away_from_here(model, jobs), latency, policy=policy).plan
    together = run_with(model, [reuse(job, away, planned) for job in prepared], Loader(model, 2))
    alone = [run(model, [reuse(job, near, planned)])[0] for job in prepared]
    assert max(map(apart, together, alone)) <= close(model)


def give(job: Job, plan: Plan) -> Job:
    job.plan = plan
    return job


def test_policies_differ(models: dict[str, Model]) -> None:
    model = models["builtin"]
    edit = make_edit(steps=1, share=0.1)
    job = reuse(prepare(edit, model), register_for(model, edit, "y"))
    latency, demands = slow_latency(model, [job]), away_from_here(model, [job])
    plans = {policy: plan_batch(model.describe(), demands, latency, policy=policy).plan for policy in POLICIES}
    assert plans["cached"] == plans["naive"] == (True,) * sum(model.run_lengths)
    assert not any(plans["dense"])
    assert any(plans["exact"])
    assert not all(plans["exact"])
    assert plans["exact"] != plans["greedy"]


def test_what_jobs_share_is_loaded_once(models: dict[str, Model]) -> None:
    model = models["fill"]
    edit = make_edit(steps=2)
    given = edit.picture, model, edit.size, edit.steps, edit.guidance
    first, second = (reuse(prepare(edit, model), register(*given)) for _ in range(2))
    one, other = make_demands([first, second], model.describe())
    assert (one.in_gpu, other.in_gpu) == (frozenset(range(4)), frozenset(range(4)))
    packed = register_for(model, edit, "kv", cache_dtype="fp8")
    route = make_route([[reuse(first, packed), reuse(second, packed), replace(reuse(first, packed), step=1), first]])
    assert [len(shared.jobs) for shared in route.shared] == [2, 1]
    assert [[part.place for part in stop] for stop in route.stops] == [[0, 0], [1, 1], [2, 2], [3, 3]]


def test_places_that_a_plan_reads() -> None:
    cached, dense = True, False
    assert places_of_plan((dense, cached, cached, dense, dense), (5,), False) == (1, 2, 3)
    assert places_of_plan((cached,) * 5, (2, 3), True) == (0, 1, 2, 3, 4, 5, 6)
    assert places_of_plan((cached, dense, dense, cached, cached), (2, 3), True) == (0, 1, 4, 5, 6)
    assert places_of_plan((dense,) * 5, (2, 3), True) == ()


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_law_3_within_quantisation(model: Model, kind: Kind) -> None:
    edit = make_edit(prompt="", seed=3, guidance=2.0, true_guidance=2.5)
    activations = register_for(model, edit, kind, cache_dtype="fp8")
    for step in (0, 2):
        job = on_trajectory(model, edit, step)
        dense = predict(model, job)
        bound = QUANTISED + rounding(model, job, dense)
        for plan in feasible(kind, activations.run_lengths):
            cached = predict(model, reuse(job, activations, plan))
            for expected, found in zip(dense, cached, strict=True):
                assert off(found, expected) < bound


def test_law_4_within_quantisation(model: Model) -> None:
    edit = make_edit(prompt="a blue dog on grass", steps=5)
    exact, kv, y = run(
        model,
        [
            reuse(prepare(edit, model), register_for(model, edit, kind, cache_dtype=cache_dtype))
            for kind, cache_dtype in (("kv", "model"), ("kv", "fp8"), ("y", "fp8"))
        ],
    )
    assert 0 < off(kv, exact) < QUANTISED
    assert 0 < off(y, exact) < QUANTISED
