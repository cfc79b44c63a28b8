"""A simulated cluster with several fronts. Each has its own router and its own view of the workers: of its own jobs it
knows all at once, of the jobs of other fronts what each worker last pushed. The router is the real one.

A front is one process that does one thing at a time: it accepts edits, reads the steps of its jobs, and answers. So a
front that has too much to do delays its edits.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

from msgspec.structs import replace

from instgenie.cost.table import Price, StepCosts
from instgenie.scheduling.backlog import NO_LOAD, LoadSums, SideStage
from instgenie.scheduling.fetches import NodeLink
from instgenie.scheduling.names import RoutingPolicy
from instgenie.scheduling.pace import Pace
from instgenie.scheduling.router import MAX_SCANNED, Router, WorkerLoad
from instgenie.simulate.clock import Clock
from instgenie.simulate.network import LinkShape, Network, NetworkedMemory
from instgenie.simulate.service import Service
from instgenie.simulate.worker import SimulatedJob, SimulatedWorker


@dataclass(frozen=True)
class FrontSeconds:
    """Seconds of a front's process."""

    edit: float = 0.0  # to accept and to answer an edit
    step: float = 0.0  # to read that a batch took a step
    job_step: float = 0.0  # added for each of its jobs in the batch


NO_SECONDS = FrontSeconds()
USUAL_NETWORK = LinkShape()


@dataclass(frozen=True)
class FrontedShape:
    num_workers: int
    num_fronts: int = 1
    staleness: float = 0.1  # seconds between two pushes of a worker's load
    max_batch_size: int = 8
    policy: RoutingPolicy = "mask_aware"
    max_scanned: int = MAX_SCANNED  # workers up to which a router looks at all of them
    max_templates: int = 3  # that fit into a worker's memory
    knows_fetches: bool = True  # False: routers do not count the templates that are on their way to a node
    front: FrontSeconds = NO_SECONDS
    network: LinkShape = USUAL_NETWORK


NOTHING_COMES = NodeLink()


@dataclass
class Pushes:
    """When something is pushed to all fronts: every so many seconds, at moments that differ from one to the other. What
    is pushed is looked up when somebody looks, so that nothing has to happen at the moments between."""

    clock: Clock
    staleness: float  # seconds
    number: int
    _at: float = -1.0

    def is_due(self) -> bool:
        """Return whether there was a push since this was last asked."""
        latest = self.clock.now
        if self.staleness:
            phase = self.staleness * (self.number * 0.618 % 1)
            latest = (latest - phase) // self.staleness * self.staleness + phase
        is_due = latest > self._at or not self.staleness
        self._at = latest
        return is_due


@dataclass
class SharedLink:
    """The link of a node as its fronts know it: each knows what it waits for, and what was pushed about the others."""

    pushes: Pushes
    fetching: dict[tuple[int, int, str], float] = field(default_factory=dict)  # by front, worker and template
    _pushed: dict[int, float] = field(default_factory=dict)  # seconds, by front

    def push(self) -> None:
        if self.pushes.is_due():
            self._pushed = {}
            for (front, _, _), seconds in self.fetching.items():
                self._pushed[front] = self._pushed.get(front, 0.0) + seconds

    def seen_by(self, front: int) -> NodeLink:
        self.push()
        if not (self.fetching or self._pushed):
            return NOTHING_COMES
        own = sum(seconds for (other, _, _), seconds in self.fetching.items() if other == front)
        foreign = sum(seconds for other, seconds in self._pushed.items() if other != front)
        return NodeLink(foreign={0: own + foreign})

    def expect(self, front: int, worker: int, template: str, seconds: float) -> None:
        self.push()
        self.fetching[front, worker, template] = seconds

    def arrived(self, front: int, worker: int, template: str) -> None:
        self.push()
        self.fetching.pop((front, worker, template), None)


@dataclass
class SharedLoad(WorkerLoad):
    """The load of a worker that serves several fronts: how much of it belongs to each, and what was last pushed."""

    pushes: Pushes = field(default_factory=lambda: Pushes(Clock(), 0.0, 0))
    node: SharedLink = field(default_factory=lambda: SharedLink(Pushes(Clock(), 0.0, 0)))
    owners: dict[str, int] = field(default_factory=dict)  # the front of each edit
    shares: dict[int, LoadSums] = field(default_factory=dict)  # of each front
    _pushed: tuple[LoadSums, dict[int, LoadSums]] = (NO_LOAD, {})  # of all fronts, and of each

    def add(self, edit: str, num_steps: int, num_tokens: int, price: Price) -> None:
        self._change(edit, lambda: WorkerLoad.add(self, edit, num_steps, num_tokens, price))

    def step(self, edit: str) -> None:
        self._change(edit, lambda: WorkerLoad.step(self, edit))

    def hand_over(self, edit: str) -> None:
        self._change(edit, lambda: WorkerLoad.hand_over(self, edit))

    def remove(self, edit: str) -> None:
        self._change(edit, lambda: WorkerLoad.remove(self, edit))

    def _change(self, edit: str, change: Callable[[], None]) -> None:
        self.push()
        front, before = self.owners[edit], self.sums
        change()
        share = self.shares.get(front, NO_LOAD).plus(self.sums).plus(before, -1)
        if share.num_edits or share.num_finishing:
            self.shares[front] = share
        else:
            self.shares.pop(front, None)

    @property
    def sums(self) -> LoadSums:
        return LoadSums(
            self.num_edits, len(self._finishing), self.num_steps, self.num_token_steps, self.compute, self.loading
        )

    def push(self) -> None:
        """Called before every change and every look."""
        if self.pushes.is_due():
            self._pushed = self.sums, dict(self.shares)

    def seen_by(self, front: int, turn: int) -> WorkerLoad:
        """The load as a front knows it: its own jobs as they are, those of others as they were pushed."""
        self.push()
        pushed, shares = self._pushed
        own = self.shares.get(front, NO_LOAD)
        foreign = pushed.plus(shares[front], -1) if front in shares else pushed
        return WorkerLoad(
            self.worker, self.max_batch_size, self.pace, self.costs, self.node.seen_by(front),
            templates=self.templates,
            num_edits=own.num_edits + own.num_finishing + foreign.num_edits,
            num_steps=own.num_steps + foreign.num_steps,
            compute=own.compute + foreign.compute,
            loading=own.loading + foreign.loading,
            side_seconds=self.side_seconds, turn=turn, foreign=foreign,
        )  # fmt: skip


class View(Sequence[WorkerLoad]):
    """The workers as one front sees them; a worker's load is made when the router looks at it."""

    def __init__(self, front: int, loads: Sequence[SharedLoad]) -> None:
        self.front, self.loads = front, loads
        self.turns: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.loads)

    @overload
    def __getitem__(self, index: int) -> WorkerLoad: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[WorkerLoad]: ...
    def __getitem__(self, index: int | slice) -> WorkerLoad | Sequence[WorkerLoad]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        return self.loads[index].seen_by(self.front, self.turns.get(index, 0))

    def __iter__(self) -> Iterator[WorkerLoad]:
        return (self[index] for index in range(len(self)))


class SimulatedFront:
    def __init__(self, index: int, shape: FrontedShape, loads: Sequence[SharedLoad], clock: Clock) -> None:
        self.index, self.clock, self.seconds = index, clock, shape.front
        self.router = Router(shape.policy, shape.max_scanned, seed=index)
        self.view = View(index, loads)
        self.knows_fetches = shape.knows_fetches
        self.free_at = 0.0
        self.busy = 0.0  # seconds
        self.num_turns = 0

    def work(self, seconds: float) -> float:
        """Do something that takes so long, as soon as it is free. Returns when it is done."""
        self.busy += seconds
        self.free_at = max(self.free_at, self.clock.now) + seconds
        return self.free_at

    def choose(self, job: SimulatedJob, network: Network) -> int:
        holders = list(network.holders.get(job.work.template or "", ()))
        drawn = [self.view[index] for index in self.router.sample(holders)]
        chosen = self.router.choose(job.work, self.view, drawn)
        self.num_turns += 1
        self.view.turns[chosen] = self.num_turns
        load = self.view.loads[chosen]
        if self.knows_fetches and job.work.template and load.tier_of(job.work) == "remote":
            seconds = load.costs.fetch_seconds(job.work.num_tokens, job.work.num_steps, "remote")
            load.node.expect(self.index, chosen, job.work.template, seconds)
        return chosen

    def arrived(self, job: SimulatedJob) -> None:
        """Note that the template of a job is in the memory of its worker."""
        self.view.loads[job.worker].node.arrived(self.index, job.worker, job.work.template or "")


@dataclass
class FrontedWorker(SimulatedWorker):
    """A worker that tells its steps to the fronts of its jobs."""

    tell: Callable[[list[SimulatedJob]], None] = lambda jobs: None

    def stepped(self, _: None) -> None:
        self.tell(self.running)
        super().stepped(_)


@dataclass(frozen=True)
class BusyShares:
    """How busy the parts of a cluster were: shares of their capacity between the first arrival and the last."""

    fronts: float  # mean
    worst_sender: float  # of the nodes
    worst_receiver: float
    store: float
    hits: float  # share of the edits whose template was in the worker's memory, or on its way there
    num_bytes: float  # per edit, over the network


def simulate_fronts(shape: FrontedShape, service: Service, jobs: Sequence[SimulatedJob]) -> BusyShares:
    """Run the jobs, which must be in the order of arrival; they get their times. All templates are in the object store
    from the start, and each is in the memory of one worker, as long as there is room. Job n comes to front n modulo
    the number of fronts, as a load balancer deals them."""
    clock = Clock()
    costs, template_bytes = fetch_costs(service, shape, jobs[0])
    network = Network(shape.network, shape.num_workers, template_bytes)
    memories = [NetworkedMemory(index, shape.max_templates, network) for index in range(shape.num_workers)]
    templates = dict.fromkeys(job.work.template for job in jobs if job.work.template)
    for template, memory in zip(templates, memories * shape.max_templates, strict=False):
        memory.keep(template)
    common, side_seconds = Pace(), dict[SideStage, float]({"prepare": service.side.prepare})
    links = [SharedLink(Pushes(clock, shape.staleness, node)) for node in range(len(network.receivers))]
    loads = [
        SharedLoad(
            index, shape.max_batch_size, Pace(common), costs, templates=memory, side_seconds=side_seconds,  # type: ignore[arg-type]
            pushes=Pushes(clock, shape.staleness, index), node=links[index // shape.network.workers_per_node],
        )
        for index, memory in enumerate(memories)
    ]  # fmt: skip
    fronts = [SimulatedFront(index, shape, loads, clock) for index in range(shape.num_fronts)]

    def tell(running: list[SimulatedJob]) -> None:
        told: dict[int, int] = {}
        for job in running:
            told[job.front] = told.get(job.front, 0) + 1
        for front, num_jobs in told.items():
            fronts[front].work(shape.front.step + num_jobs * shape.front.job_step)

    def answer(job: SimulatedJob) -> None:
        job.finished = max(job.finished, fronts[job.front].work(shape.front.edit / 2))

    workers = [
        FrontedWorker(load, service, clock, answer, memory=memory, tell=tell)
        for load, memory in zip(loads, memories, strict=True)
    ]

    def route(job: SimulatedJob) -> None:
        front = fronts[job.front]
        worker = workers[front.choose(job, network)]
        loads[worker.load.worker].owners[job.id] = job.front
        worker.accept(job)
        clock.at(job.fetched_at, front.arrived, job)

    def arrive(job: SimulatedJob) -> None:
        clock.at(fronts[job.front].work(shape.front.edit / 2), route, job)
        await_next()

    arriving: Iterator[tuple[int, SimulatedJob]] = enumerate(iter(jobs))

    def await_next() -> None:
        if following := next(arriving, None):
            number, job = following
            job.front = number % shape.num_fronts
            clock.at(job.arrived, arrive, job)

    await_next()
    clock.run()
    return outcome_of(jobs, fronts, memories, network)


def fetch_costs(service: Service, shape: FrontedShape, job: SimulatedJob) -> tuple[StepCosts, float]:
    """What the router is told, with the price of a fetch over free links; and the bytes of a template."""
    costs = service.costs(job.work.num_tokens)
    num_bytes = costs.template_bytes(job.work.num_tokens, job.work.num_steps)
    fetch = (shape.network.store_seconds, 1 / min(shape.network.node_rate, shape.network.store_rate))
    return replace(costs, fetch={"remote": fetch}), num_bytes


def outcome_of(
    jobs: Sequence[SimulatedJob],
    fronts: Iterable[SimulatedFront],
    memories: Sequence[NetworkedMemory],
    network: Network,
) -> BusyShares:
    seconds = jobs[-1].arrived - jobs[0].arrived or 1.0
    busy = [front.busy / seconds for front in fronts]
    return BusyShares(
        fronts=sum(busy) / len(busy),
        worst_sender=max(link.use(seconds) for link in network.senders),
        worst_receiver=max(link.use(seconds) for link in network.receivers),
        store=network.store.use(seconds),
        hits=sum(memory.num_hits for memory in memories) / len(jobs),
        num_bytes=sum(link.num_bytes for link in network.receivers) / len(jobs),
    )
