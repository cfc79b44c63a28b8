"""Which worker gets an edit. Arithmetic over loads: no sockets, no processes, no clock.

The cost of a step is a line over the tokens it computes. A worker's jobs take their steps together, so the line's
constant is paid once per step, however many jobs share it.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from instgenie.types import TierName

Policy = Literal["mask_aware", "tokens", "requests", "round_robin"]

SECONDS_PER_STEP = 0.01
SECONDS_PER_TOKEN = 1e-5
MEMORY = 0.98  # of a measured step, after one more
NUM_KNOWN = 50  # steps after which a worker is judged by its own pace
MAX_SCANNED = 64  # workers among which a choice looks at every one
NUM_SAMPLED = 32  # of more workers; and as many of those that hold the template


@dataclass(frozen=True)
class Work:
    """What an edit asks of a worker."""

    num_steps: int
    num_tokens: int
    num_masked_tokens: int
    template: str | None = None  # whose activations save the unmasked tokens, where they are


class Pace:
    """Seconds of a step, as a line over its computed tokens: a fit to what was measured, old steps fading out. Two
    made-up steps stand for what is not yet known. Workers of a cluster share a common pace: one that has taken few
    steps is judged by it, else it would look faster, or slower, than those that are known, and get all edits or none.
    """

    def __init__(self, common: "Pace | None" = None) -> None:
        self.common = common
        self._num_measured = -2
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        for num_tokens in (0, 1000):
            self._fit(num_tokens, SECONDS_PER_STEP + SECONDS_PER_TOKEN * num_tokens)

    def measure(self, num_tokens: int, seconds: float) -> None:
        self._fit(num_tokens, seconds)
        if self.common:
            self.common.measure(num_tokens, seconds)

    def _fit(self, num_tokens: int, seconds: float) -> None:
        self._num_measured += 1
        self._weight = MEMORY * self._weight + 1
        self._x = MEMORY * self._x + num_tokens
        self._y = MEMORY * self._y + seconds
        self._xx = MEMORY * self._xx + num_tokens * num_tokens
        self._xy = MEMORY * self._xy + num_tokens * seconds
        spread = self._weight * self._xx - self._x * self._x
        slope = (self._weight * self._xy - self._x * self._y) / spread if spread > 1e-9 * self._xx else 0.0
        mean = self._y / self._weight
        # neither more tokens nor more steps save time: what noise says otherwise is cut off
        self.per_token = min(max(slope, 0.0), mean * self._weight / self._x if self._x else 0.0)
        self.per_step = max(mean - self.per_token * self._x / self._weight, 0.0)

    def seconds(self, num_steps: float, num_token_steps: float) -> float:
        if self.common and self._num_measured < NUM_KNOWN:
            return self.common.seconds(num_steps, num_token_steps)
        return num_steps * self.per_step + num_token_steps * self.per_token


@dataclass
class Load:
    """What a worker still has to do. Sums are kept, so that a choice looks at every worker once."""

    worker: int
    max_batch_size: int
    pace: Pace = field(default_factory=Pace)
    templates: dict[str, TierName] = field(default_factory=dict)  # the highest tier it has each in
    num_edits: int = 0
    num_steps: int = 0  # over all edits
    num_token_steps: int = 0  # over all edits
    _left: dict[str, tuple[int, int]] = field(default_factory=dict)  # of each edit: steps, tokens of a step

    def add(self, edit: str, num_steps: int, num_tokens: int) -> None:
        """Or what is left of it now, if it is there already."""
        self.remove(edit)
        self._left[edit] = num_steps, num_tokens
        self.num_edits += 1
        self.num_steps += num_steps
        self.num_token_steps += num_steps * num_tokens

    def step(self, edit: str) -> None:
        num_steps, num_tokens = self._left.get(edit, (0, 0))
        if num_steps:
            self._left[edit] = num_steps - 1, num_tokens
            self.num_steps -= 1
            self.num_token_steps -= num_tokens

    def remove(self, edit: str) -> None:
        if edit in self._left:
            num_steps, num_tokens = self._left.pop(edit)
            self.num_edits -= 1
            self.num_steps -= num_steps
            self.num_token_steps -= num_steps * num_tokens

    @property
    def seconds(self) -> float:
        """Until all of it is done."""
        return self.pace.seconds(self.num_steps / self.max_batch_size, self.num_token_steps)

    def tokens_of(self, work: Work) -> int:
        """That a step of it computes here."""
        return work.num_masked_tokens if work.template in self.templates else work.num_tokens


def predicted_finish(work: Work, load: Load) -> float:
    """Seconds until the edit would be done: what is there already and the edit itself, sharing the steps."""
    num_steps = max(work.num_steps, (load.num_steps + work.num_steps) / load.max_batch_size)
    return load.pace.seconds(num_steps, load.num_token_steps + work.num_steps * load.tokens_of(work))


def fewest_tokens(work: Work, load: Load) -> float:
    return load.num_token_steps + work.num_steps * work.num_tokens


def fewest_requests(work: Work, load: Load) -> float:
    return load.num_edits


COSTS: Mapping[str, Callable[[Work, Load], float]] = {
    "mask_aware": predicted_finish,
    "tokens": fewest_tokens,
    "requests": fewest_requests,
}


class Router:
    """Up to `MAX_SCANNED` workers are all looked at. Of more, a sample is: so many drawn at random and so many of those
    that hold the template. The best of a few is nearly the best of all, and a choice takes as long among twenty
    thousand workers as among a few dozen."""

    def __init__(self, policy: Policy = "mask_aware") -> None:
        self.policy = policy
        self._turn = 0
        self._random = random.Random(0)

    def choose(self, work: Work, loads: Sequence[Load], holders: Sequence[Load] = ()) -> int:
        """The worker of the cheapest load; of equals, the one that has waited longest for its turn. Holders are those
        of the loads that have the template's activations in memory, as far as they are known."""
        self._turn += 1
        if self.policy == "round_robin":
            return loads[self._turn % len(loads)].worker
        cost = COSTS[self.policy]
        return min(self._candidates(loads, holders), key=lambda load: cost(work, load)).worker

    def _candidates(self, loads: Sequence[Load], holders: Sequence[Load]) -> Iterable[Load]:
        if len(loads) <= MAX_SCANNED:
            first = self._turn % len(loads)
            return [*loads[first:], *loads[:first]]
        return [*self._sample(loads), *self._sample(holders)]

    def _sample(self, loads: Sequence[Load]) -> list[Load]:
        if len(loads) <= NUM_SAMPLED:
            return list(loads)
        draw, num_loads = self._random.random, len(loads)
        return [loads[int(draw() * num_loads)] for _ in range(NUM_SAMPLED)]
