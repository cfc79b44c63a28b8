"""The work that a worker still has to do, as sums over its edits: the edits of this front, and what other fronts have
given to the worker. Knows prices and paces; knows no template."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from instgenie.cost.table import DEFAULT_COSTS, Price, StepCosts
from instgenie.scheduling.fetches import NodeLink
from instgenie.scheduling.margin import Margin
from instgenie.scheduling.pace import Pace

SideStage = Literal["prepare", "finish"]  # stages of an edit that run beside the steps

SIDE_DECAY = 0.8  # weight of a measured side stage after one more; low, because the first one of a process is slow


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
class Backlog:
    """Sums, so that a choice between workers is cheap."""

    worker: int
    max_batch_size: int
    pace: Pace = field(default_factory=Pace)
    costs: StepCosts = DEFAULT_COSTS
    link: NodeLink = field(default_factory=NodeLink)  # shared by the workers of a node
    num_edits: int = 0
    num_steps: int = 0  # over all edits
    num_token_steps: int = 0  # over all edits
    compute: float = 0.0  # seconds, over all steps of all edits
    loading: float = 0.0  # seconds, over all steps of all edits
    side_seconds: dict[SideStage, float] = field(default_factory=dict)  # per edit; shared by the workers of a cluster
    margin: Margin = field(default_factory=Margin)
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

    def alone_seconds(self, edit: str) -> float:
        """Seconds of the remaining steps of an edit if no other shares them."""
        return self._seconds_of(edit, num_sharing=1)

    def shared_seconds(self, edit: str) -> float:
        """Seconds of the worker that they take if the other edits share them."""
        return self._seconds_of(edit, self.num_sharing)

    @property
    def num_sharing(self) -> int:
        """Edits that share a step, one more or less."""
        return max(min(self.num_edits, self.max_batch_size), 1)

    def _seconds_of(self, edit: str, num_sharing: int) -> float:
        rest = self._remaining.get(edit)
        return self.part_seconds(rest.num_steps, rest.price, num_sharing) if rest else 0.0

    def part_seconds(self, num_steps: int, price: Price, num_sharing: int) -> float:
        """Seconds of steps at a price that each of so many edits pays a part of."""
        compute, load, _ = price.times(num_steps)
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
