"""Which deadlines can be met together. Arithmetic over claims: no clock, no batch, no queue."""

import heapq
from collections.abc import Iterable, Sequence

from instgenie.scheduling.terms import NO_DEADLINE, Standing


def hopeless(claims: Sequence[Standing], chosen: Iterable[int], now: float, busy: float = 0.0) -> set[int]:
    """Return those of the chosen claims that are given up, so that as many of the others as possible meet their
    deadlines. `busy` are seconds of other work that goes before them.

    Jobs are taken in the order of their deadlines, which meets all of them if any order does. Where one would be late,
    the claim with the most work so far is given up (Moore and Hodgson): no other choice leaves more time to the rest.
    """
    given_up: set[int] = set()
    taken: list[tuple[float, int]] = []  # the most work in front
    end = now + busy
    for index in sorted(chosen, key=lambda one: (claims[one].terms.deadline, claims[one].terms.number)):
        claim = claims[index]
        if claim.terms.deadline == NO_DEADLINE:
            break
        if now + claim.seconds > claim.terms.deadline:
            given_up.add(index)
            continue
        heapq.heappush(taken, (-claim.work, index))
        end += claim.work
        while taken and end > claim.terms.deadline:
            work, largest = heapq.heappop(taken)
            end += work
            given_up.add(largest)
    return given_up


def num_in_time(claims: Sequence[Standing], order: Iterable[int], now: float) -> int:
    """Return how many deadlines are met by claims that go one after the other."""
    end, num_met = now, 0
    for index in order:
        claim = claims[index]
        end += claim.work
        num_met += max(end, now + claim.seconds) <= claim.terms.deadline != NO_DEADLINE
    return num_met
