"""Warming up runs each part of a model, with no more weights than the process of the part has."""

from functools import cache
from pathlib import Path

import pytest
import torch
from helpers.names import FAMILIES

from instgenie.engine import warm
from instgenie.engine.loop import Engine
from instgenie.jobs.job import Job
from instgenie.models.family import PartKind
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.types import CacheDtype
from instgenie.workers import denoise, finish, prepare


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step that is taken, whether it reuses activations."""
    seen = []
    advance = Engine.advance

    def record(self: Engine, jobs: list[Job]) -> None:
        seen.append(any(jobs[0].present_plan))
        advance(self, jobs)

    monkeypatch.setattr(Engine, "advance", record)
    return seen


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["model", "fp8", "int4"])
def test_steps_are_warmed_up_with_the_network_alone(
    family: str, dtype: CacheDtype, folders: dict[str, Path], plans: list[bool]
) -> None:
    model = load_part(folders[family], denoise.PARTS)
    warm.warm_up_steps(model, dtype)
    warm.warm_up_loras(model, dtype)
    assert plans == [False, False, True, True]
    if dtype == "model":
        warm.warm_up_loras(model, dtype, weights_bytes=2**30)
        assert plans[4:] == [False, True]


@pytest.mark.parametrize("family", FAMILIES)
def test_both_ends_are_warmed_up_with_their_own_weights(family: str, folders: dict[str, Path]) -> None:
    warm.warm_up_preparing(load_part(folders[family], prepare.PARTS))
    warm.warm_up_finishing(load_part(folders[family], finish.PARTS))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["model", "fp8", "int4"])
def test_every_part_is_warmed_up_on_a_gpu(
    family: str, dtype: CacheDtype, folders: dict[str, Path], plans: list[bool]
) -> None:
    model = load_part(folders[family], denoise.PARTS, "cuda")
    warm.warm_up_steps(model, dtype)
    warm.warm_up_loras(model, dtype, weights_bytes=2**30)
    warm.warm_up_preparing(load_part(folders[family], prepare.PARTS, "cuda"))
    warm.warm_up_finishing(load_part(folders[family], finish.PARTS, "cuda"))
    assert plans == [False, False, True, True, False, True]


def test_a_process_starts_without_room_to_warm_up_but_not_with_a_part_that_cannot_run(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*given: object) -> None:
        raise errors.pop()

    errors = [ValueError("a bug"), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")]
    monkeypatch.setattr(warm, "observe_span", fail)
    warm.warm_up_steps(models["blend"], "model")
    assert [record.message for record in caplog.records] == ["not warmed up, for want of memory"]
    with pytest.raises(ValueError, match="a bug"):
        warm.warm_up_steps(models["blend"], "model")


@cache
def load_part(folder: Path, parts: frozenset[PartKind], device: str = "cpu") -> Model:
    return load(str(folder), device, weights=parts)
