"""Warming up runs each part of a model, with no more weights than the process of the part has."""

from pathlib import Path

import pytest
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
@pytest.mark.parametrize("dtype", ["model", "fp8"])
def test_steps_are_warmed_up_with_the_network_alone(
    family: str, dtype: CacheDtype, folders: dict[str, Path], plans: list[bool]
) -> None:
    warm.warm_up_steps(load_part(folders[family], denoise.PARTS), dtype)
    assert plans == [False, False, True, True]


@pytest.mark.parametrize("family", FAMILIES)
def test_both_ends_are_warmed_up_with_their_own_weights(family: str, folders: dict[str, Path]) -> None:
    warm.warm_up_preparing(load_part(folders[family], prepare.PARTS))
    warm.warm_up_finishing(load_part(folders[family], finish.PARTS))


def load_part(folder: Path, parts: frozenset[PartKind]) -> Model:
    return load(str(folder), "cpu", weights=parts)
