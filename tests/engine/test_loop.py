"""The step loop: failures, and on a GPU that nothing waits for the device, so that launches run ahead of it."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from helpers.cuda import waiting_is_an_error
from helpers.edits import make_edit, prepare
from helpers.names import FAMILIES

from instgenie.bench.ours import move_to_host
from instgenie.cache.host import HostTier
from instgenie.engine.loop import Engine
from instgenie.engine.register import register, reuse
from instgenie.jobs.activations import CacheDtype
from instgenie.jobs.job import Job
from instgenie.models.loading.load import load
from instgenie.models.model import Model


class FaultyEngine(Engine):
    """Batches with a poisoned job fail, and so do batches of more than `limit` jobs, for want of memory."""

    limit = 8
    tried: list[list[int]]

    def advance(self, jobs: Sequence[Job]) -> None:
        self.tried.append([job.edit.seed for job in jobs])
        if any(job.edit.prompt == "poison" for job in jobs):
            raise ValueError("poison")
        if len(jobs) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        super().advance(jobs)


def make_engine(model: Model, prompts: Sequence[str], steps: int = 2) -> FaultyEngine:
    engine = FaultyEngine(model, max_jobs=8)
    engine.tried = []
    for seed, prompt in enumerate(prompts):
        engine.join(prepare(make_edit(steps=steps, seed=seed, prompt=prompt), model))
    return engine


def seeds(jobs: Sequence[Job]) -> list[int]:
    return [job.edit.seed for job in jobs]


def test_an_error_is_raised_unless_failures_are_isolated(models: dict[str, Model]) -> None:
    engine = make_engine(models["blend"], ["a cat", "poison"])
    with pytest.raises(ValueError, match="poison"):
        engine.step()
    assert engine.tried == [[0, 1]]
    assert [job.step for job in engine.jobs] == [0, 0]


def test_only_the_job_that_fails_alone_fails(models: dict[str, Model]) -> None:
    engine = make_engine(models["blend"], ["a cat", "a dog", "poison", "a fox"])
    first = engine.step(isolate_failures=True)
    assert engine.tried == [[0, 1, 2, 3], [0, 1], [2, 3], [2], [3]]
    assert (seeds(first.jobs), first.finished, seeds(list(first.failed))) == ([0, 1, 2, 3], [], [2])
    assert engine.max_jobs == 8
    last = engine.step(isolate_failures=True)
    assert (seeds(last.finished), last.failed, engine.jobs) == ([0, 1, 3], {}, [])


def test_a_batch_that_does_not_fit_is_halved_until_the_engine_is_empty(models: dict[str, Model]) -> None:
    engine = make_engine(models["blend"], ["a cat"] * 4, steps=1)
    engine.limit = 2
    result = engine.step(isolate_failures=True)
    assert (seeds(result.finished), result.failed) == ([0, 1, 2, 3], {})
    assert engine.max_jobs == 8
    engine = make_engine(models["blend"], ["a cat"] * 4)
    engine.limit = 2
    assert engine.step(isolate_failures=True).failed == {}
    assert engine.max_jobs == 2
    assert seeds(engine.step(isolate_failures=True).finished) == [0, 1]
    assert seeds(engine.step(isolate_failures=True).finished) == [2, 3]
    assert engine.max_jobs == 8
    assert engine.tried == [[0, 1, 2, 3], [0, 1], [2, 3], [0, 1], [2, 3]]


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["gpu", "host"])
@pytest.mark.parametrize("cache_dtype", ["model", "fp8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_do_not_wait_for_the_device(
    family: str, cache_dtype: CacheDtype, tier: str, folders: dict[str, Path]
) -> None:
    model = load(str(folders[family]), "cuda")
    edits = [make_edit(steps=3), make_edit(steps=3, share=0.2, seed=1, true_guidance=2.0)]
    template = edits[0].picture, model, edits[0].size, 3, edits[0].guidance
    activations = register(*template, cache_dtype=cache_dtype)
    host = HostTier(2**30)
    if tier == "host":
        activations = move_to_host(activations, host, model)
    engine = Engine(model)
    for edit in edits:
        engine.join(reuse(prepare(edit, model), activations))
    engine.step()  # finds out where masked tokens are
    with waiting_is_an_error():
        engine.step()
