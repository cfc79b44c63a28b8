"""The router picks the worker that runs an edit. It is arithmetic over loads: no sockets, no processes, no clock.

Each worker reports what its steps cost, as its planner predicts, and measured steps correct the predictions. The jobs
of a worker take their steps together, so the fixed cost of a step is paid once for all of them. Edits are prepared and
finished one by one, beside the steps; where these side stages take longer than the steps, they set the pace.
"""

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from instgenie.cost.table import DEFAULT_COSTS, Price, StepCosts
from instgenie.scheduling.names import RoutingPolicy
from instgenie.scheduling.pace import Pace
from instgenie.types import TierName

SideStage = Literal["prepare", "finish"]  # stages of an edit that run beside the steps

SIDE_DECAY = 0.8  # the same for side stages; lower, because the first one of a process is slow
MAX_SCANNED = 64  # up to this many workers, a choice looks at each of them
NUM_SAMPLED = 32  # workers drawn where there are more, and holders of the template drawn besides


@dataclass(frozen=True)
class Work:
    """The work of an edit, or of several edits of one size and template that go to one worker."""

    num_steps: int
    num_tokens: int
    num_masked_tokens: int
    template: str | None = None  # id; where its activations are, only masked tokens are computed
    num_edits: int = 1
    must_reuse: bool = False  # True if a worker without the activations registers them before it runs the edits
    own_share: float = 1.0  # without them: share of the steps that are dense, whose activations the others read


class Remaining(NamedTuple):
    """The rest of an edit."""

    num_steps: int
    num_tokens: int  # computed per step
    price: Price  # per step


@dataclass
class WorkerLoad:
    """The work that a worker still has to do. It is kept as sums, so that a choice is cheap."""

    worker: int
    max_batch_size: int
    pace: Pace = field(default_factory=Pace)
    costs: StepCosts = DEFAULT_COSTS
    templates: dict[str, TierName] = field(default_factory=dict)  # the fastest tier of each, by id
    num_edits: int = 0
    num_steps: int = 0  # over all edits
    num_token_steps: int = 0  # over all edits
    compute: float = 0.0  # seconds, over all steps of all edits
    loading: float = 0.0  # seconds, over all steps of all edits
    side_seconds: dict[SideStage, float] = field(default_factory=dict)  # per edit; shared by the workers of a cluster
    turn: int = 0  # turn of the router at which it last chose this worker
    _remaining: dict[str, Remaining] = field(default_factory=dict)  # by edit
    _finishing: set[str] = field(default_factory=set)  # edits that have taken all their steps

    def add(self, edit: str, num_steps: int, num_tokens: int, price: Price) -> None:
        """Add an edit, or correct what remains of it. Tokens and price are per step."""
        self.remove(edit)
        self._remaining[edit] = Remaining(num_steps, num_tokens, price)
        self.num_edits += 1
        self._count(num_steps, num_tokens, price)

    def step(self, edit: str) -> None:
        if (rest := self._remaining.get(edit)) and rest.num_steps:
            self._remaining[edit] = Remaining(rest.num_steps - 1, rest.num_tokens, rest.price)
            self._count(-1, rest.num_tokens, rest.price)

    def hand_over(self, edit: str) -> None:
        """Note that an edit has taken its steps and is being finished."""
        self.remove(edit)
        self._finishing.add(edit)

    def measure_side_stage(self, stage: SideStage, seconds: float) -> None:
        known = self.side_seconds.get(stage, seconds)
        self.side_seconds[stage] = SIDE_DECAY * known + (1 - SIDE_DECAY) * seconds

    @property
    def num_unfinished(self) -> int:
        return self.num_edits + len(self._finishing)

    def only(self, edits: Collection[str]) -> "WorkerLoad":
        """The part of the load that some of its edits are."""
        part = replace(
            self, num_edits=0, num_steps=0, num_token_steps=0, compute=0.0, loading=0.0, _remaining={}, _finishing=set()
        )
        for edit, rest in self._remaining.items():
            if edit in edits:
                part.add(edit, *rest)
        return part

    def alone_seconds(self, edit: str) -> float:
        """Seconds of the remaining steps of an edit if no other shares them."""
        return self._seconds_of(edit, num_sharing=1)

    def shared_seconds(self, edit: str) -> float:
        """Seconds of the worker that they take if the other edits share them."""
        return self._seconds_of(edit, num_sharing=max(min(self.num_edits, self.max_batch_size), 1))

    def _seconds_of(self, edit: str, num_sharing: int) -> float:
        rest = self._remaining.get(edit)
        return self._seconds(rest.num_steps, rest.price, num_sharing) if rest else 0.0

    def _seconds(self, num_steps: int, price: Price, num_sharing: int) -> float:
        compute, load = price.times(num_steps)
        own_steps = num_steps / num_sharing
        return self.pace.seconds(own_steps, self.costs.total_seconds(own_steps, compute, load))

    def remove(self, edit: str) -> None:
        self._finishing.discard(edit)
        if rest := self._remaining.pop(edit, None):
            self.num_edits -= 1
            self._count(-rest.num_steps, rest.num_tokens, rest.price)

    def _count(self, num_steps: int, num_tokens: int, price: Price) -> None:
        self.num_steps += num_steps
        self.num_token_steps += num_steps * num_tokens
        self.compute += num_steps * price.compute
        self.loading += num_steps * price.load
        if not self.num_steps:  # drop accumulated rounding errors
            self.compute = self.loading = 0.0

    @property
    def seconds(self) -> float:
        """Seconds until all of it is done."""
        num_steps = self.num_steps / self.max_batch_size
        return self.pace.seconds(num_steps, self.costs.total_seconds(num_steps, self.compute, self.loading))

    def seconds_of_steps(self, edits: Iterable[str], *, wait: bool) -> float:
        """Seconds until some edits have taken their steps: in a batch of average edits of this worker, or, where one of
        them has to `wait`, with all of the worker's work."""
        longest = max((rest.num_steps for edit in edits if (rest := self._remaining.get(edit))), default=0)
        if not longest:
            return 0.0
        num_steps = max(longest, self.num_steps / self.max_batch_size) if wait else longest
        batch_share = longest * min(self.num_edits, self.max_batch_size) / self.num_steps
        share = 1.0 if wait else min(batch_share, 1.0)
        predicted = self.costs.total_seconds(num_steps, share * self.compute, share * self.loading)
        return self.pace.seconds(num_steps, predicted)

    @property
    def seconds_per_token(self) -> float:
        """Seconds that each computed token adds to a step."""
        none, *_, every = self.costs.gpu
        return self.pace.seconds(0, (every.compute - none.compute) / self.costs.num_tokens)

    def tier_of(self, work: Work) -> TierName | None:
        return self.templates.get(work.template) if work.template else None

    def has_to_register(self, work: Work) -> bool:
        return work.must_reuse and self.tier_of(work) is None

    def tokens_of(self, work: Work) -> int:
        """Tokens that a step of this work computes on this worker."""
        if self.tier_of(work) is not None or work.must_reuse:
            return work.num_masked_tokens
        return round(work.num_masked_tokens + work.own_share * (work.num_tokens - work.num_masked_tokens))

    def price_of(self, work: Work) -> Price:
        """Price of a step of this work on this worker."""
        tier: TierName | None = "host" if self.has_to_register(work) else self.tier_of(work)
        if tier is None:
            return self.costs.own_price(work.num_tokens, work.num_masked_tokens, work.own_share)
        return self.costs.price(work.num_tokens, work.num_masked_tokens, tier)

    def added_seconds(self, work: Work) -> float:
        """Seconds of the worker that this work takes if the other edits share its steps."""
        num_sharing = max(min(self.num_edits, self.max_batch_size), 1)
        return self._seconds(work.num_steps, self.price_of(work), num_sharing)

    def registration_compute(self, work: Work) -> float:
        """Seconds of computing before its edits may start: a dense pass over every step of the template, once for all
        of them; 0 if the worker has the activations or may do without."""
        if not self.has_to_register(work):
            return 0.0
        return work.num_steps * self.costs.price(work.num_tokens / work.num_edits, 0, None).compute

    def fetch_seconds(self, work: Work) -> float:
        """Seconds until its template is in memory; 0 if no tier has it."""
        return self.costs.fetch_seconds(work.num_tokens / work.num_edits, work.num_steps, self.tier_of(work))

    def expect(self, template: str) -> None:
        """Note that a template is being fetched into memory for an edit, where later edits will find it."""
        if self.templates.get(template) in ("disk", "remote"):
            self.templates[template] = "host"


def predicted_finish(work: Work, load: WorkerLoad) -> float:
    """Seconds until the edit would be done: the time for all steps, shared with the worker's other edits, or the time
    in the slower side stage, which takes edits one by one, whichever is longer."""
    price = load.price_of(work)
    num_steps = max(work.num_steps, (load.num_steps + work.num_edits * work.num_steps) / load.max_batch_size)
    compute = load.compute + work.num_steps * price.compute + load.registration_compute(work)
    loading = load.loading + work.num_steps * price.load
    predicted = load.costs.total_seconds(num_steps, compute, loading)
    steps = load.fetch_seconds(work) + load.pace.seconds(num_steps, predicted)
    side = (load.num_unfinished + work.num_edits) * max(load.side_seconds.values(), default=0.0)
    return max(steps, side)


def fewest_tokens(work: Work, load: WorkerLoad) -> float:
    return load.num_token_steps + work.num_steps * work.num_tokens


def fewest_requests(work: Work, load: WorkerLoad) -> float:
    return load.num_unfinished


COSTS: Mapping[RoutingPolicy, Callable[[Work, WorkerLoad], float]] = {
    "mask_aware": predicted_finish,
    "tokens": fewest_tokens,
    "requests": fewest_requests,
}


class Router:
    """Chooses among all workers, up to `MAX_SCANNED` of them. Where there are more, it chooses among a random sample
    of them and a random sample of those that hold the template. The best of a few dozen is nearly the best of all, and
    the choice takes no longer among twenty thousand workers than among a hundred."""

    def __init__(self, policy: RoutingPolicy = "mask_aware") -> None:
        self.policy = policy
        self._turn = 0
        self._random = random.Random(0)

    def choose(self, work: Work, loads: Sequence[WorkerLoad], holders: Sequence[WorkerLoad] = ()) -> int:
        """Return the worker with the cheapest load. Among equals it is the one that was chosen least recently, because
        its edits are nearest to their end. `holders` are the loads of workers known to have the template's activations
        in memory."""
        self._turn += 1
        if self.policy == "round_robin":
            return loads[self._turn % len(loads)].worker
        cost = COSTS[self.policy]
        chosen = min(self._candidates(loads, holders), key=lambda load: (cost(work, load), load.turn))
        chosen.turn = self._turn
        return chosen.worker

    def _candidates(self, loads: Sequence[WorkerLoad], holders: Sequence[WorkerLoad]) -> Iterable[WorkerLoad]:
        return loads if len(loads) <= MAX_SCANNED else [*self._sample(loads), *self._sample(holders)]

    def _sample(self, loads: Sequence[WorkerLoad]) -> list[WorkerLoad]:
        if len(loads) <= NUM_SAMPLED:
            return list(loads)
        draw, num_loads = self._random.random, len(loads)
        return [loads[int(draw() * num_loads)] for _ in range(NUM_SAMPLED)]
