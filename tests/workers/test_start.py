"""The start of a worker's processes: they run their part of the model once before they say that they are ready, and a
denoise process takes memory only when it is told that all have loaded."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.workers import Tape, make_config

from instgenie.cluster import wire
from instgenie.cluster.config import LoraConfig, ProcessConfig
from instgenie.engine import finish as finishing
from instgenie.engine import prepare as preparing
from instgenie.engine.loop import Engine
from instgenie.models.model import Model
from instgenie.workers import budget, denoise, finish, prepare

GIB = 2**30


def play(serve: Callable[..., None], config: ProcessConfig, model: Model, tape: Tape) -> list[str]:
    """Serve until the tape is over; return the names of what was sent, and of what was done in between."""
    serve(config, model, tape)
    return [type(message).__name__ if isinstance(message, wire.Message) else message for message, _ in tape.sent]


def spy(monkeypatch: pytest.MonkeyPatch, tape: Tape, target: Any, name: str) -> None:
    """Note the calls of a function among the messages that are sent."""
    original = getattr(target, name)

    def noted(*args: Any, **options: Any) -> Any:
        tape.sent.append((name, []))
        return original(*args, **options)

    monkeypatch.setattr(target, name, noted)


def test_a_denoise_process_is_warm_before_it_begins_and_before_it_is_ready(
    small: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    tape = Tape()
    tape.rounds.append([(wire.Begin(host_bytes=123), [])])
    spy(monkeypatch, tape, Engine, "advance")
    spy(monkeypatch, tape, denoise, "open_store")
    said = play(denoise.serve, make_config(), small, tape)
    assert said[: said.index("Priced")] == [*["advance"] * 4, "Loaded", "open_store", "Ready"]


def test_a_prepare_process_is_warm_before_it_is_ready(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    tape = Tape()
    spy(monkeypatch, tape, preparing, "encode_pictures")
    said = play(prepare.serve, make_config(), small, tape)
    assert (said[0], said[-1]) == ("encode_pictures", "Ready")


def test_a_finish_process_is_warm_before_it_is_ready(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    tape = Tape()
    spy(monkeypatch, tape, finishing, "to_pixels")
    assert play(finish.serve, make_config(), small, tape) == ["to_pixels", "Ready"]


def test_a_process_that_is_told_to_stop_while_others_load_opens_no_store(
    small: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    tape = Tape()
    spy(monkeypatch, tape, denoise, "open_store")
    assert play(denoise.serve, make_config(), small, tape) == ["Loaded"]


def test_workers_on_one_gpu_share_half_of_what_is_left_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "available_bytes", lambda device: 24.0 * GIB)
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")

    def budget_of(num_sharing: int, device: torch.device, **cache: Any) -> tuple[int | None, int]:
        config = replace(make_config(**cache), num_sharing=num_sharing)
        made = budget.with_budget(config, 5 * GIB, device).cache
        return made.gpu_bytes, made.host_bytes

    assert budget_of(1, gpu) == (12 * GIB, 5 * GIB)
    assert budget_of(2, gpu) == (6 * GIB, 5 * GIB)
    assert budget_of(2, gpu, gpu_bytes=GIB) == (GIB, 5 * GIB)
    assert budget_of(1, gpu, gpu_bytes=0) == (0, 5 * GIB)
    assert budget_of(1, cpu) == (None, 5 * GIB)


def test_weights_with_loras_are_set_aside_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "available_bytes", lambda device: 24.0 * GIB)
    gpu, loras = torch.device("cuda", 0), LoraConfig(folder="/loras", gpu_bytes=GIB, weights_bytes=3 * GIB)
    for given, expected in ((loras, 10 * GIB), (replace(loras, folder=None), 12 * GIB)):
        config = replace(make_config(), loras=given)
        assert budget.with_budget(config, 5 * GIB, gpu).cache.gpu_bytes == expected
