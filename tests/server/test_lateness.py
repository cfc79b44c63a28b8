"""What becomes of edits that are predicted to miss their deadline."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from instgenie.cluster.orders import Order
from instgenie.cluster.wish import Wish
from instgenie.jobs.sampler import num_skipped
from instgenie.scheduling.terms import NO_DEADLINE
from instgenie.server.bodies.fields import EditFields
from instgenie.server.errors import ApiError
from instgenie.server.lateness import cheaper, with_deadline
from instgenie.types import Notes

SECONDS = {"exact": 1.0, "balanced": 0.5, "fast": 0.25}  # per step


class Forecast:
    """Predicts by quality and steps alone."""

    def predict(self, orders: list[Order], is_alone: bool = False) -> float:
        wish = orders[0].wish
        return SECONDS[wish.quality] * (wish.steps or 20)


def ordered(notes: Notes, default: float | None = None, scale: float | None = None, **fields: Any) -> list[Order]:
    asked = EditFields(prompt="a cat", n=2, quality="exact", **fields)
    order = Order("me", np.zeros((8, 8, 3), np.uint8), np.ones((8, 8), np.bool_), asked.edit_settings(3))
    orders = [order, order]
    config = SimpleNamespace(default_deadline=default, slo_scale=scale)
    service: Any = SimpleNamespace(config=config, cluster=Forecast(), model_facts=SimpleNamespace(steps=20))
    request: Any = SimpleNamespace(scope={"start": time.monotonic()})
    return with_deadline(service, request, orders, asked, notes)


def seconds_left(orders: list[Order]) -> int:
    return round(orders[0].deadline - time.monotonic())


def test_a_request_gives_its_deadline_or_the_server_does() -> None:
    assert ordered([])[0].deadline == NO_DEADLINE
    assert seconds_left(ordered([], deadline_ms=30_000)) == 30
    assert seconds_left(ordered([], default=50.0)) == 50
    assert seconds_left(ordered([], default=50.0, deadline_ms=30_000)) == 30
    assert seconds_left(ordered([], scale=5.0)) == 100
    assert ordered([], priority=-3)[1].priority == -3


def test_a_hopeless_edit_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        ApiError, match=r"predicted to take 20000 ms, but \d+ ms of its deadline of 9000 ms are left"
    ) as late:
        ordered([], deadline_ms=9000, on_late="reject")
    assert (late.value.status, late.value.code) == (408, "deadline_unreachable")
    assert ordered([], deadline_ms=21_000, on_late="reject")


@pytest.mark.parametrize(
    ("deadline", "quality", "steps"),
    [(21, "exact", None), (11, "balanced", None), (6, "fast", None), (4, "fast", 15), (3, "fast", 10), (1, "fast", 7)],
)
def test_an_edit_that_would_be_late_gets_the_best_settings_that_are_not(
    deadline: int, quality: str, steps: int | None
) -> None:
    notes: Notes = []
    wishes: list[Wish] = [order.wish for order in ordered(notes, deadline_ms=1000 * deadline, on_late="degrade")]
    assert [(wish.quality, wish.steps) for wish in wishes] == [(quality, steps)] * 2
    assert len(notes) == (quality != "exact")
    if notes:
        assert f"made with the quality '{quality}' and {steps or 20} of 20 steps" in notes[0]


def test_fewer_steps_still_start_from_the_picture() -> None:
    """A strength that leaves out no step starts from noise."""
    wishes = cheaper(Wish("a cat", 0, strength=0.86), 5), cheaper(Wish("a cat", 0), 5)
    started, from_noise = (list(found)[-1] for found in wishes)
    assert started.steps == from_noise.steps == 4
    assert num_skipped(4, started.strength) == 1
    assert from_noise.strength == 1
    assert list(cheaper(Wish("a cat", 0, strength=0.004), 5))[-1].strength == 0.004
