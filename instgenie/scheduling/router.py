"""Which worker gets an edit. Arithmetic over loads: no sockets, no processes, no clock.

Each worker says what its steps cost, by the planner. Measured steps correct what was predicted. A worker's jobs take
their steps together, so the constant of a step is paid once, however many jobs share it. Edits are prepared and
finished one by one, beside the steps; where that takes longer, it is what an edit waits for.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from instgenie.cost.table import USUAL, Price, StepCosts
from instgenie.types import TierName

Chore = Literal["prepare", "finish"]
Policy = Literal["mask_aware", "tokens", "requests", "round_robin"]

MADE_UP = 0.1  # seconds of a step that nobody measured
MEMORY = 0.98  # of a measured step, after one more
CHORE_MEMORY = 0.8  # of a measured chore: the first of a process takes longer than all others
NUM_KNOWN = 50  # steps after which a worker is judged by its own pace
MAX_SCANNED = 64  # workers among which a choice looks at every one
NUM_SAMPLED = 32  # of more workers; and as many of those that hold the template


@dataclass(frozen=True)
class Work:
    """What an edit asks of a worker; or several edits of one size and template, that go together."""

    num_steps: int
    num_tokens: int
    num_masked_tokens: int
    template: str | None = None  # whose activations save the unmasked tokens, where they are
    num_edits: int = 1


class Pace:
    """Seconds of a step, as a line over those that were predicted: a fit to what was measured, old steps fading out.
    Two made-up steps, as predicted, stand for what is not yet known. Workers of a cluster share a common pace: one that
    has taken few steps is judged by it, else it would look faster, or slower, than those that are known, and get all
    edits or none.
    """

    def __init__(self, common: "Pace | None" = None) -> None:
        self.common = common
        self._num_measured = -2
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        for seconds in (0.0, MADE_UP):
            self._fit(seconds, seconds)

    def measure(self, predicted: float, seconds: float) -> None:
        self._fit(predicted, seconds)
        if self.common:
            self.common.measure(predicted, seconds)

    def _fit(self, predicted: float, seconds: float) -> None:
        self._num_measured += 1
        self._weight = MEMORY * self._weight + 1
        self._x = MEMORY * self._x + predicted
        self._y = MEMORY * self._y + seconds
        self._xx = MEMORY * self._xx + predicted * predicted
        self._xy = MEMORY * self._xy + predicted * seconds
        spread = self._weight * self._xx - self._x * self._x
        slope = (self._weight * self._xy - self._x * self._y) / spread if spread > 1e-9 * self._xx else 0.0
        mean = self._y / self._weight
        # neither more work nor more steps save time: what noise says otherwise is cut off
        self.per_second = min(max(slope, 0.0), mean * self._weight / self._x if self._x else 0.0)
        self.per_step = max(mean - self.per_second * self._x / self._weight, 0.0)

    def seconds(self, num_steps: float, predicted: float) -> float:
        """Of so many steps, which were predicted to take so long together."""
        if self.common and self._num_measured < NUM_KNOWN:
            return self.common.seconds(num_steps, predicted)
        return num_steps * self.per_step + predicted * self.per_second


class Left(NamedTuple):
    """Of an edit."""

    num_steps: int
    num_tokens: int  # that a step computes
    price: Price  # of a step


@dataclass
class Load:
    """What a worker still has to do. Sums are kept, so that a choice looks at every worker once."""

    worker: int
    max_batch_size: int
    pace: Pace = field(default_factory=Pace)
    costs: StepCosts = USUAL
    templates: dict[str, TierName] = field(default_factory=dict)  # the highest tier it has each in
    num_edits: int = 0
    num_steps: int = 0  # over all edits
    num_token_steps: int = 0  # over all edits
    compute: float = 0.0  # seconds, over all steps of all edits
    loading: float = 0.0  # likewise
    chores: dict[Chore, float] = field(default_factory=dict)  # seconds of one edit; workers of a cluster share them
    turn: int = 0  # of the router, when it chose this worker last
    _left: dict[str, Left] = field(default_factory=dict)  # of each edit
    _finishing: set[str] = field(default_factory=set)  # edits that have taken all their steps

    def add(self, edit: str, num_steps: int, num_tokens: int, price: Price) -> None:
        """Or what is left of it now, if it is there already. Tokens and price are of one step."""
        self.remove(edit)
        self._left[edit] = Left(num_steps, num_tokens, price)
        self.num_edits += 1
        self._count(num_steps, num_tokens, price)

    def step(self, edit: str) -> None:
        if (left := self._left.get(edit)) and left.num_steps:
            self._left[edit] = Left(left.num_steps - 1, left.num_tokens, left.price)
            self._count(-1, left.num_tokens, left.price)

    def hand_over(self, edit: str) -> None:
        """It has taken its steps, and is to be finished."""
        self.remove(edit)
        self._finishing.add(edit)

    def measure_chore(self, chore: Chore, seconds: float) -> None:
        self.chores[chore] = CHORE_MEMORY * self.chores.get(chore, seconds) + (1 - CHORE_MEMORY) * seconds

    @property
    def num_unfinished(self) -> int:
        return self.num_edits + len(self._finishing)

    def remove(self, edit: str) -> None:
        self._finishing.discard(edit)
        if left := self._left.pop(edit, None):
            self.num_edits -= 1
            self._count(-left.num_steps, left.num_tokens, left.price)

    def _count(self, num_steps: int, num_tokens: int, price: Price) -> None:
        self.num_steps += num_steps
        self.num_token_steps += num_steps * num_tokens
        self.compute += num_steps * price.compute
        self.loading += num_steps * price.load
        if not self.num_steps:  # nothing is left of what rounding made
            self.compute = self.loading = 0.0

    @property
    def seconds(self) -> float:
        """Until all of it is done."""
        num_steps = self.num_steps / self.max_batch_size
        return self.pace.seconds(num_steps, self.costs.total(num_steps, self.compute, self.loading))

    @property
    def seconds_per_token(self) -> float:
        """That a step takes longer for each token it computes."""
        none, *_, every = self.costs.gpu
        return self.pace.seconds(0, (every.compute - none.compute) / self.costs.num_tokens)

    def tier_of(self, work: Work) -> TierName | None:
        return self.templates.get(work.template) if work.template else None

    def tokens_of(self, work: Work) -> int:
        """That a step of it computes here."""
        return work.num_tokens if self.tier_of(work) is None else work.num_masked_tokens

    def price_of(self, work: Work) -> Price:
        """Of a step of it here."""
        return self.costs.price(work.num_tokens, work.num_masked_tokens, self.tier_of(work))

    def fetch_seconds(self, work: Work) -> float:
        """Until its template is in memory, if it is anywhere."""
        return self.costs.fetch_seconds(work.num_tokens / work.num_edits, work.num_steps, self.tier_of(work))

    def expect(self, template: str) -> None:
        """It is on its way into memory for an edit: those behind find it there."""
        if self.templates.get(template) in ("disk", "remote"):
            self.templates[template] = "host"


def predicted_finish(work: Work, load: Load) -> float:
    """Seconds until the edit would be done: what is there already and the edit itself, sharing the steps; or one by one
    through what takes longer."""
    price = load.price_of(work)
    num_steps = max(work.num_steps, (load.num_steps + work.num_edits * work.num_steps) / load.max_batch_size)
    compute, loading = load.compute + work.num_steps * price.compute, load.loading + work.num_steps * price.load
    steps = load.fetch_seconds(work) + load.pace.seconds(num_steps, load.costs.total(num_steps, compute, loading))
    chores = (load.num_unfinished + work.num_edits) * max(load.chores.values(), default=0.0)
    return max(steps, chores)


def fewest_tokens(work: Work, load: Load) -> float:
    return load.num_token_steps + work.num_steps * work.num_tokens


def fewest_requests(work: Work, load: Load) -> float:
    return load.num_unfinished


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
        """The worker of the cheapest load; of equals, the one that was chosen least recently: its edits are nearest to
        their end. Holders are those of the loads that have the template's activations in memory, as far as they are
        known."""
        self._turn += 1
        if self.policy == "round_robin":
            return loads[self._turn % len(loads)].worker
        cost = COSTS[self.policy]
        chosen = min(self._candidates(loads, holders), key=lambda load: (cost(work, load), load.turn))
        chosen.turn = self._turn
        return chosen.worker

    def _candidates(self, loads: Sequence[Load], holders: Sequence[Load]) -> Iterable[Load]:
        return loads if len(loads) <= MAX_SCANNED else [*self._sample(loads), *self._sample(holders)]

    def _sample(self, loads: Sequence[Load]) -> list[Load]:
        if len(loads) <= NUM_SAMPLED:
            return list(loads)
        draw, num_loads = self._random.random, len(loads)
        return [loads[int(draw() * num_loads)] for _ in range(NUM_SAMPLED)]
