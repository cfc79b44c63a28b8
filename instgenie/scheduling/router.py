"""The router picks the worker that runs an edit. It is arithmetic over loads: no sockets, no processes, no clock.

Each worker reports what its steps cost, as its planner predicts, and measured steps correct the predictions. The jobs
of a worker take their steps together, so the fixed cost of a step is paid once for all of them. Edits are prepared and
finished one by one, beside the steps; where these side stages take longer than the steps, they set the pace.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

from instgenie.cost.table import DEFAULT_COSTS, Price, StepCosts
from instgenie.scheduling.fetches import FetchRates, NodeLink, PeerMap
from instgenie.scheduling.names import RoutingPolicy
from instgenie.types import TierName

T = TypeVar("T")
SideStage = Literal["prepare", "finish"]  # stages of an edit that run beside the steps

PRIOR_SECONDS = 0.1  # length of the invented step that the fit starts with
DECAY = 0.98  # weight of a measured step after one more
SIDE_DECAY = 0.8  # the same for side stages; lower, because the first one of a process is slow
NUM_KNOWN = 50  # steps after which a worker is judged by its own pace
TIE = 1e-7  # weight of what is moved or registered: it decides between workers that would finish at the same time
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


class Pace:
    """Measured seconds of a step as a linear function of the predicted seconds. It is a least-squares fit in which old
    steps fade out and which starts from two invented steps that took as long as predicted.

    The workers of a cluster share a common pace. A worker that has taken few steps is judged by it; otherwise the
    worker would look faster or slower than the others and get all edits or none.
    """

    def __init__(self, common: "Pace | None" = None) -> None:
        self.common = common
        self._num_measured = -2
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        for seconds in (0.0, PRIOR_SECONDS):
            self._fit(seconds, seconds)

    @property
    def is_measured(self) -> bool:
        return self._num_measured > 0 or (self.common is not None and self.common.is_measured)

    def measure(self, predicted: float, seconds: float) -> None:
        self._fit(predicted, seconds)
        if self.common:
            self.common.measure(predicted, seconds)

    def _fit(self, predicted: float, seconds: float) -> None:
        self._num_measured += 1
        self._weight = DECAY * self._weight + 1
        self._x = DECAY * self._x + predicted
        self._y = DECAY * self._y + seconds
        self._xx = DECAY * self._xx + predicted * predicted
        self._xy = DECAY * self._xy + predicted * seconds
        spread = self._weight * self._xx - self._x * self._x
        slope = (self._weight * self._xy - self._x * self._y) / spread if spread > 1e-9 * self._xx else 0.0
        mean = self._y / self._weight
        # neither more work nor more steps save time, whatever noise in the measurements says
        self.per_second = min(max(slope, 0.0), mean * self._weight / self._x if self._x else 0.0)
        self.per_step = max(mean - self.per_second * self._x / self._weight, 0.0)

    def seconds(self, num_steps: float, predicted: float) -> float:
        """Expected seconds of `num_steps` steps that were predicted to take `predicted` seconds together."""
        if self.common and self._num_measured < NUM_KNOWN:
            return self.common.seconds(num_steps, predicted)
        return num_steps * self.per_step + predicted * self.per_second


class Remaining(NamedTuple):
    """The rest of an edit."""

    num_steps: int
    num_tokens: int  # computed per step
    price: Price  # per step


class LoadSums(NamedTuple):
    """The work that one front, or several, have given to a worker: what others need to know of it."""

    num_edits: int = 0
    num_finishing: int = 0
    num_steps: int = 0
    num_token_steps: int = 0
    compute: float = 0.0  # seconds, over all steps
    loading: float = 0.0  # seconds, over all steps
    fetching: float = 0.0  # seconds, of templates that are on their way to the worker

    def plus(self, other: "LoadSums", sign: int = 1) -> "LoadSums":
        return LoadSums(
            self.num_edits + sign * other.num_edits,
            self.num_finishing + sign * other.num_finishing,
            self.num_steps + sign * other.num_steps,
            self.num_token_steps + sign * other.num_token_steps,
            self.compute + sign * other.compute,
            self.loading + sign * other.loading,
            self.fetching + sign * other.fetching,
        )


NO_LOAD = LoadSums()


@dataclass
class WorkerLoad:
    """The work that a worker still has to do. It is kept as sums, so that a choice is cheap. The work that other fronts
    have given to the worker is part of the sums."""

    worker: int
    max_batch_size: int
    pace: Pace = field(default_factory=Pace)
    costs: StepCosts = DEFAULT_COSTS
    templates: dict[str, TierName] = field(default_factory=dict)  # the fastest tier of each, by id; peers do not count
    link: NodeLink = field(default_factory=NodeLink)  # shared by the workers of a node
    peers: PeerMap = field(default_factory=PeerMap)  # templates in other workers' memory
    fetch_rates: FetchRates = field(default_factory=FetchRates)
    num_edits: int = 0
    num_steps: int = 0  # over all edits
    num_token_steps: int = 0  # over all edits
    compute: float = 0.0  # seconds, over all steps of all edits
    loading: float = 0.0  # seconds, over all steps of all edits
    side_seconds: dict[SideStage, float] = field(default_factory=dict)  # per edit; shared by the workers of a cluster
    turn: int = 0  # turn of the router at which it last chose this worker
    _remaining: dict[str, Remaining] = field(default_factory=dict)  # by edit
    _finishing: set[str] = field(default_factory=set)  # edits that have taken all their steps
    foreign: LoadSums = NO_LOAD  # of other fronts, as the worker last told it

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
        return self.num_edits + len(self._finishing) + self.foreign.num_finishing

    @property
    def own(self) -> LoadSums:
        """The work that this front has given to the worker."""
        rests = self._remaining.values()
        return LoadSums(
            num_edits=len(rests),
            num_finishing=len(self._finishing),
            num_steps=sum(rest.num_steps for rest in rests),
            num_token_steps=sum(rest.num_steps * rest.num_tokens for rest in rests),
            compute=sum(rest.num_steps * rest.price.compute for rest in rests),
            loading=sum(rest.num_steps * rest.price.load for rest in rests),
            fetching=self.link.seconds_of(self.worker),
        )

    def share(self, foreign: LoadSums) -> None:
        """Replace what other fronts have given to the worker."""
        change = foreign.plus(self.foreign, -1)
        self.foreign = foreign
        self.link.foreign[self.worker] = foreign.fetching
        self.num_edits += change.num_edits
        self.num_steps += change.num_steps
        self.num_token_steps += change.num_token_steps
        self.compute += change.compute
        self.loading += change.loading
        self._drop_rounding()

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
        self._drop_rounding()

    def _drop_rounding(self) -> None:
        """Drop accumulated rounding errors."""
        if not self.num_steps:
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
        """The fastest tier in which the worker finds the template; None if it has to register it. A peer is asked
        before a remote tier, but not if registering is quicker than copying."""
        if not work.template:
            return None
        tier = self.templates.get(work.template)
        if tier not in (None, "remote") or not self.peers.serves(work.template, self.worker):
            return tier
        return "peer" if tier or self.fetch_from("peer", work) <= self._registration(work) else None

    def has_to_register(self, work: Work) -> bool:
        return work.must_reuse and self.tier_of(work) is None

    def tokens_of(self, work: Work) -> int:
        """Tokens that a step of this work computes on this worker."""
        is_dense = self.tier_of(work) is None and not work.must_reuse
        return work.num_tokens if is_dense else work.num_masked_tokens

    def price_of(self, work: Work) -> Price:
        """Price of a step of this work on this worker."""
        tier: TierName | None = "host" if self.has_to_register(work) else self.tier_of(work)
        return self.costs.price(work.num_tokens, work.num_masked_tokens, tier)

    def registration_compute(self, work: Work) -> float:
        """Seconds of computing before its edits may start: a dense pass over every step of the template, once for all
        of them; 0 if the worker has the activations or may do without."""
        return self.register_compute(work) if self.has_to_register(work) else 0.0

    def register_compute(self, work: Work) -> float:
        """Seconds of computing that the registration of its template takes."""
        return work.num_steps * self.costs.price(work.num_tokens / work.num_edits, 0, None).compute

    def _registration(self, work: Work) -> float:
        """Seconds to register its template on a worker that does nothing else."""
        compute = self.register_compute(work)
        return self.pace.seconds(work.num_steps, self.costs.total_seconds(work.num_steps, compute, 0.0))

    def fetch_seconds(self, work: Work) -> float:
        """Seconds until its template is in memory; 0 if no tier has it."""
        return self.fetch_from(self.tier_of(work), work)

    def fetch_from(self, tier: TierName | None, work: Work) -> float:
        """Seconds until its template has come from a tier into memory, behind those that are on their way."""
        seconds = self._transfer_seconds(work, tier)
        return seconds + self.link.seconds if seconds else 0.0

    def _transfer_seconds(self, work: Work, tier: TierName | None) -> float:
        """Seconds that its template takes from a tier into memory."""
        if tier is None or tier not in self.costs.fetch:
            return 0.0
        fixed, per_byte = self.costs.fetch[tier]
        num_bytes = self.costs.template_bytes(work.num_tokens / work.num_edits, work.num_steps)
        return fixed + self.fetch_rates.per_byte(tier, per_byte) * num_bytes

    def expect(self, work: Work) -> None:
        """Note that the template of an edit is being fetched into memory, where later edits will find it."""
        tier = self.tier_of(work)
        if work.template and tier not in ("gpu", "host", None):
            self.link.fetching[self.worker, work.template] = self._transfer_seconds(work, tier)
            self.templates[work.template] = "host"

    def arrived(self, template: str | None) -> None:
        """Note that a template is in memory, or does not come."""
        if template:
            self.link.fetching.pop((self.worker, template), None)


def predicted_finish(work: Work, load: WorkerLoad) -> float:
    """Seconds until the edit would be done: the time for all steps, shared with the worker's other edits, or the time
    in the slower side stage, which takes edits one by one, whichever is longer."""
    tier = load.tier_of(work)
    has_to_register = work.must_reuse and tier is None
    price = load.costs.price(work.num_tokens, work.num_masked_tokens, "host" if has_to_register else tier)
    num_steps = max(work.num_steps, (load.num_steps + work.num_edits * work.num_steps) / load.max_batch_size)
    registering = load.register_compute(work) if has_to_register else 0.0
    compute = load.compute + work.num_steps * price.compute + registering
    loading = load.loading + work.num_steps * price.load
    predicted = load.costs.total_seconds(num_steps, compute, loading)
    fetching = load.fetch_from(tier, work)
    steps = fetching + load.pace.seconds(num_steps, predicted)
    side = (load.num_unfinished + work.num_edits) * max(load.side_seconds.values(), default=0.0)
    return max(steps, side) + TIE * (fetching + registering)


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
    """Chooses among all workers, up to `max_scanned` of them. Where there are more, it chooses among a random sample
    of them and a random sample of those that hold the template. The best of a few dozen is nearly the best of all, and
    the choice takes no longer among twenty thousand workers than among a hundred."""

    def __init__(
        self, policy: RoutingPolicy = "mask_aware", max_scanned: int = MAX_SCANNED, seed: int | None = 0
    ) -> None:
        self.policy = policy
        self.max_scanned = max_scanned
        self._turn = 0
        self._random = random.Random(seed)

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
        return loads if len(loads) <= self.max_scanned else [*self.sample(loads), *self.sample(holders)]

    def sample(self, all: Sequence[T]) -> Sequence[T]:
        """Draw a few at random, with repetition; all of them if they are few."""
        if len(all) <= NUM_SAMPLED:
            return all
        draw, num = self._random.random, len(all)
        return [all[int(draw() * num)] for _ in range(NUM_SAMPLED)]
