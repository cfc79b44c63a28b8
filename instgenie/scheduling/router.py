"""The router picks the worker that runs an edit. It is arithmetic over loads: no sockets, no processes, no clock.

Each worker reports what its steps cost, as its planner predicts, and measured steps correct the predictions. The jobs
of a worker take their steps together, so the fixed cost of a step is paid once for all of them. Edits are prepared and
finished one by one, beside the steps; where these side stages take longer than the steps, they set the pace.
"""

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from instgenie.cost.table import Guided, Price
from instgenie.scheduling.adapter_holdings import AdapterHoldings, SizedAdapter
from instgenie.scheduling.backlog import NO_LOAD, Backlog
from instgenie.scheduling.fetches import FetchRates, NodeLink, PeerMap
from instgenie.scheduling.names import RoutingPolicy
from instgenie.types import TierName

T = TypeVar("T")

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
    own_share: float = 1.0  # without them: share of the steps that are dense, whose activations the others read
    loras: tuple[SizedAdapter, ...] = ()  # that it asks for
    num_free_steps: int = 0  # that it takes while they load
    controls: tuple[SizedAdapter, ...] = ()  # ControlNets that it asks for; it waits until they are there
    guided: tuple[Guided, ...] = ()  # how many of its steps each of them guides


@dataclass
class WorkerLoad(Backlog):
    """What a worker still has to do, and what more work would cost there."""

    templates: dict[str, TierName] = field(default_factory=dict)  # the fastest tier of each, by id; peers do not count
    peers: PeerMap = field(default_factory=PeerMap)  # templates in other workers' memory
    fetch_rates: FetchRates = field(default_factory=FetchRates)
    loras: AdapterHoldings = field(default_factory=AdapterHoldings)
    controls: AdapterHoldings = field(default_factory=AdapterHoldings)  # in the worker, or in processes that all share

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
        if self.tier_of(work) is not None or work.must_reuse:
            return work.num_masked_tokens
        return round(work.num_masked_tokens + work.own_share * (work.num_tokens - work.num_masked_tokens))

    def price_of(self, work: Work) -> Price:
        """Price of a step of this work on this worker."""
        return self.price_in("host" if self.has_to_register(work) else self.tier_of(work), work)

    def price_in(self, tier: TierName | None, work: Work) -> Price:
        """Price of a step of this work if its template is found in a tier; None: if it does without."""
        if tier is None:
            price = self.costs.own_price(work.num_tokens, work.num_masked_tokens, work.own_share)
        else:
            price = self.costs.price(work.num_tokens, work.num_masked_tokens, tier)
        return self.costs.guided(price, work.num_tokens, work.guided) if work.guided else price

    def added_seconds(self, work: Work) -> float:
        """Seconds of the worker that this work takes if the other edits share its steps."""
        return self.part_seconds(work.num_steps, self.price_of(work), self.num_sharing)

    @property
    def idle(self) -> "WorkerLoad":
        """The worker without any work, to which nothing is on its way."""
        return replace(
            self, num_edits=0, num_steps=0, num_token_steps=0, compute=0.0, loading=0.0, foreign=NO_LOAD,
            link=NodeLink(), _remaining={}, _finishing=set(),
        )  # fmt: skip

    def only(self, edits: Collection[str]) -> "WorkerLoad":
        """The part of the load that some of its edits are, beside the work of other fronts, whose order is not known
        here."""
        part = replace(self.idle, link=self.link)
        part.share(self.foreign)
        for edit, rest in self._remaining.items():
            if edit in edits:
                part.add(edit, *rest)
        return part

    def registration_compute(self, work: Work) -> float:
        """Seconds of computing before its edits may start: a dense pass over every kept step of the template, once
        for all of them; 0 if the worker has the activations or may do without."""
        return self.register_compute(work) if self.has_to_register(work) else 0.0

    def register_compute(self, work: Work) -> float:
        """Seconds of computing that the registration of its template takes."""
        num_kept = self.costs.num_kept(work.num_steps)
        return num_kept * self.costs.price(work.num_tokens / work.num_edits, 0, None).compute

    def _registration(self, work: Work) -> float:
        """Seconds to register its template on a worker that does nothing else."""
        compute, num_kept = self.register_compute(work), self.costs.num_kept(work.num_steps)
        return self.pace.seconds(num_kept, self.costs.total_seconds(num_kept, compute, 0.0))

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

    def lora_wait(self, work: Work, price: Price, seconds: float) -> float:
        """Seconds that an edit stands still for LoRAs which take so long to load: it takes its free steps meanwhile."""
        return max(seconds - self.part_seconds(work.num_free_steps, price, 1), 0.0) if seconds else 0.0

    def expect(self, work: Work) -> None:
        """Note that the template of an edit is being fetched into memory, where later edits will find it."""
        tier = self.tier_of(work)
        self.loras.expect(work.loras)
        self.controls.expect(work.controls)
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
    price = load.price_in("host" if has_to_register else tier, work)
    num_steps = max(work.num_steps, (load.num_steps + work.num_edits * work.num_steps) / load.max_batch_size)
    registering = load.register_compute(work) if has_to_register else 0.0
    compute = load.compute + work.num_steps * price.compute + registering
    loading = load.loading + work.num_steps * price.load
    predicted = load.costs.total_seconds(num_steps, compute, loading)
    fetching = load.fetch_from(tier, work)
    adapting = load.loras.load_seconds(work.loras) if work.loras else 0.0
    controls = load.controls.load_seconds(work.controls) if work.controls else 0.0
    steps = fetching + load.pace.seconds(num_steps, predicted) + controls + load.lora_wait(work, price, adapting)
    side = (load.num_unfinished + work.num_edits) * max(load.side_seconds.values(), default=0.0)
    return max(steps, side) + TIE * (fetching + registering + adapting)


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
