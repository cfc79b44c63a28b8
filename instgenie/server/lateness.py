"""Deadlines of requests, and what becomes of edits that are predicted to miss theirs. Knows orders and predictions.

A deadline is an aim: edits are scheduled by it, and finished if they miss it. A client that has no use for a late
picture says `on_late=reject`: it is told at once if the edit is predicted to be late, and the edit is given up at its
deadline if the prediction was wrong. With `on_late=degrade` an edit that would be late is made cheaper.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from starlette.requests import Request

from instgenie.cluster.orders import Order
from instgenie.cluster.wish import Wish
from instgenie.jobs.quality import Quality
from instgenie.jobs.strength import visible_strength
from instgenie.scheduling.terms import NO_DEADLINE
from instgenie.server.bodies.fields import ImageFields
from instgenie.server.errors import hopeless
from instgenie.server.service import HttpService
from instgenie.types import Notes

STEP_SHARES = (3 / 4, 1 / 2, 1 / 3)  # of the steps asked for, tried in turn by an edit that would be late
MIN_STEPS = 4  # fewer make no picture worth having
LOWER: dict[Quality, tuple[Quality, ...]] = {
    "exact": ("balanced", "fast"),
    "balanced": ("fast",),
    "adaptive": ("fast",),
    "fast": (),
}


def with_deadline(
    service: HttpService, request: Request, orders: Sequence[Order], fields: ImageFields, notes: Notes
) -> list[Order]:
    """Return the orders with their deadline and priority. Edits that would be late are refused or made cheaper, if the
    request asks for that."""
    start, config = float(request.scope["start"]), service.config
    deadline = NO_DEADLINE
    if fields.deadline_ms is not None:
        deadline = start + fields.deadline_ms / 1000
    elif config.default_deadline is not None:
        deadline = start + config.default_deadline
    elif config.slo_scale is not None:
        deadline = start + config.slo_scale * service.cluster.predict(orders, is_alone=True)
    given = [replace(order, deadline=deadline, priority=fields.priority) for order in orders]
    if deadline == NO_DEADLINE or fields.on_late == "run":
        return given
    left, predicted = deadline - time.monotonic(), service.cluster.predict(given)
    if predicted <= left:
        return given
    if fields.on_late == "reject":
        raise hopeless(predicted, left, deadline - start)
    return degraded(service, given, left, notes)


def degraded(service: HttpService, orders: Sequence[Order], left: float, notes: Notes) -> list[Order]:
    """Return the orders with the best settings that are predicted to be in time, or else the cheapest."""
    first, before = orders[0].wish, service.cluster.predict(orders)
    steps = service.model_facts.steps if first.steps is None else first.steps
    chosen, predicted = list(orders), before
    for wish in cheaper(first, steps):
        made = [replace(order, wish=replace(wish, seed=order.wish.seed)) for order in orders]
        seconds = service.cluster.predict(made)
        if seconds < predicted:
            chosen, predicted = made, seconds
        if predicted <= left:
            break
    wish = chosen[0].wish
    if chosen[0] is orders[0]:
        notes.append(f"The edit is predicted to be late, and no cheaper settings would help ({before:.1f} s).")
        return chosen
    notes.append(
        f"The edit would have been late ({before:.1f} s predicted, {left:.1f} s left), so it was made with the quality "
        f"{wish.quality!r} and {wish.steps or steps} of {steps} steps ({predicted:.1f} s predicted)."
    )
    return chosen


def cheaper(wish: Wish, steps: int) -> Iterator[Wish]:
    """Yield cheaper settings, the best first: fewer dense steps, then fewer steps."""
    for quality in LOWER[wish.quality]:
        wish = replace(wish, quality=quality)
        yield wish
    for share in STEP_SHARES:
        if (fewer := max(round(share * steps), MIN_STEPS)) < steps:
            strength = wish.strength if wish.strength == 1 else visible_strength(wish.strength, fewer)
            yield replace(wish, steps=fewer, strength=strength)
