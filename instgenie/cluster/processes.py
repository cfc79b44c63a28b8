"""The workers and their processes as the cluster sees them: their state, the entries they hold, the entries that wait
for them. Knows no message and no socket."""

import hashlib
import time
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from instgenie.cluster.config import NUM_ENCODERS, ClusterConfig, Role
from instgenie.cluster.entries import EditEntry, Entry
from instgenie.cluster.holdings import Holdings
from instgenie.cluster.launch import LaunchedProcess
from instgenie.cluster.status import ControlNetsStatus, ProcessState, ProcessStatus
from instgenie.scheduling.adapter_holdings import AdapterHoldings
from instgenie.scheduling.backlog import SideStage
from instgenie.scheduling.fetches import FetchRates, NodeLink, PeerMap
from instgenie.scheduling.pace import Pace
from instgenie.scheduling.policies import make_policy
from instgenie.scheduling.policy import Policy
from instgenie.scheduling.router import WorkerLoad
from instgenie.types import TierName

NUM_AHEAD = 2  # entries that prepare and finish hold, one in work and one at hand; finish adds one per encoder thread
FIRST_BACK_OFF, LAST_BACK_OFF = 0.1, 30.0  # seconds before a dead process is started again
HEALTHY_SECONDS = 60.0  # a process that was ready for this long restarts after the first back-off
MAX_FAILED_STARTS = 5  # in a row, after which a process that is not ready counts as broken


@dataclass
class Changes:
    """What has changed among the processes of a cluster since somebody last looked. It spares a cluster of thousands of
    workers to look at each of them after every message."""

    states: bool = True  # a process has another state
    processes: dict["Process", None] = field(default_factory=dict)  # queue, room or state of these may be another


@dataclass(eq=False)
class Process(Holdings):
    """One role of one worker, across all its starts."""

    changes: Changes = field(default_factory=Changes)  # shared by the processes of a cluster
    message: str = ""  # why it is down
    num_starts: int = 0
    num_failed_starts: int = 0  # in a row: it ended before it was ready
    num_quick_deaths: int = 0
    loading: tuple[int, int] | None = None  # bytes of weights that its current start has brought, and of how many
    is_loaded: bool = False  # its current start holds the model's weights
    has_begun: bool = False  # its current start was told to take the memory that is left
    has_been_ready: bool = False  # at any of its starts
    ready_at: float | None = None  # None: its current start is not ready yet
    heard_at: float = 0.0
    peer_address: str = ""  # at which its current start serves templates to other workers; empty: it serves none
    launched: LaunchedProcess | None = None
    kept: ControlNetsStatus | None = None  # of a process that runs ControlNets; None: it has told nothing
    control_versions: tuple[str, ...] = ()  # of the ControlNets in its memory
    _state: ProcessState = "starting"

    @property
    def state(self) -> ProcessState:
        return self._state

    @state.setter
    def state(self, state: ProcessState) -> None:
        self._state = state
        self.changes.states = True
        self.touch()

    def touch(self) -> None:
        """Note that it may take entries that it could not take before."""
        self.changes.processes[self] = None

    @property
    def name(self) -> str:
        """Unique to its current start."""
        return f"{self.worker}.{self.role}.{self.num_starts}"

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def is_alive(self) -> bool:
        return self.launched is not None and self.launched.is_alive

    @property
    def is_settled(self) -> bool:
        """True if it has taken the memory for its weights, or could not."""
        return self.is_loaded or self.num_failed_starts > 0

    @property
    def is_broken(self) -> bool:
        """True if it is not expected to come back soon."""
        return self.state == "failed" or (not self.is_ready and self.num_failed_starts >= MAX_FAILED_STARTS)

    @property
    def status(self) -> ProcessStatus:
        pid = self.launched.pid if self.launched is not None and self.is_alive else None
        return ProcessStatus(self.role, pid, self.state, self.num_starts, self.message, self.kept)

    # starts

    def begin(self) -> None:
        """Enter a new start, under a new name."""
        self.num_starts += 1
        self.state, self.message, self.launched = "starting", "", None
        self.loading, self.is_loaded, self.has_begun, self.peer_address = None, False, False, ""
        self.ready_at, self.heard_at = None, time.monotonic()

    def succeed(self) -> None:
        """Note that the current start is ready."""
        self.state, self.ready_at = "ready", time.monotonic()
        self.is_loaded = self.has_been_ready = True
        self.num_failed_starts = 0

    def end(self, message: str) -> None:
        """Note that the current start has ended; a reason that is already known stands."""
        self.num_failed_starts += self.ready_at is None
        self.message = self.message or message
        if self.state != "failed":
            self.state = "down"

    def kill(self) -> None:
        if self.launched is not None:
            self.launched.kill()

    def back_off(self) -> float:
        """Seconds to wait before the next start. However long a start took, it was no healthy life until it was
        ready."""
        if self.ready_at is not None and time.monotonic() - self.ready_at > HEALTHY_SECONDS:
            self.num_quick_deaths = 0
        self.num_quick_deaths += 1
        return min(FIRST_BACK_OFF * 2.0 ** (self.num_quick_deaths - 1), LAST_BACK_OFF)

    # entries

    def put(self, entry: Entry) -> None:
        insort(self.queue, entry, key=lambda entry: entry.number)
        self.touch()

    def take(self) -> Iterator[list[Entry]]:
        """Yield what may be sent now: entries one by one, a group at once, a suspect only to a process that holds
        nothing."""
        while self.is_ready and (head := self.next()):
            together = [head] if head.is_suspect or head.stage != "denoise" else self.companions(head)
            for entry in together:
                self.queue.remove(entry)
            for waiting in self.queue:
                same = waiting.terms.tenant == head.terms.tenant
                waiting.num_overtaken += len(together) if same and waiting.number < head.number else 0
            self.held |= {entry.id: entry for entry in together}
            yield together


@dataclass(eq=False)
class Worker:
    """One device and the processes that share it."""

    index: int
    device: str
    processes: dict[Role, Process]
    load: WorkerLoad
    policy: Policy = field(default_factory=lambda: make_policy("fcfs"))
    node: str = ""  # its name; empty: this machine, or none yet
    host: str = ""  # the machine whose disk it sees; empty: this one
    edits: dict[str, EditEntry] = field(default_factory=dict)  # those that belong to it, by id
    digests: dict[Role, str] = field(default_factory=dict)  # of the weights that each process has loaded
    tier_bytes: dict[TierName, int] = field(default_factory=dict)
    lora_bytes: dict[str, int] = field(default_factory=dict)  # of LoRAs in its memory, by tier
    num_fronts: int = 0  # that share it, this one among them; 0: it serves no other
    is_stale: bool = False  # True if it has been silent for so long that its load is not known
    is_waiting: bool = False  # no node has room for it
    has_lost_node: bool = False  # its processes ended with their node; they start again when another has room
    is_draining: bool = False  # it gets no more edits; once it has no work, its device is given up
    host_bytes: int | None = None  # main memory for activations; None: not yet measured
    num_steps: int = 0
    num_interruptions: int = 0
    num_joined: int = 0  # jobs that began to take steps, of all fronts, since its denoise process started
    last_step_seconds: float = 0.0
    steps_per_second: float = 0.0
    _stepped_at: float = 0.0

    @property
    def denoiser(self) -> Process:
        return self.processes["denoise"]

    @property
    def state(self) -> ProcessState:
        states = [process.state for process in self.processes.values()]
        worst: tuple[ProcessState, ...] = ("failed", "down", "starting")
        return next((state for state in worst if state in states), "ready")

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def is_away(self) -> bool:
        """True if nobody knows when it will be ready: what waits for it goes to others."""
        return self.is_draining or self.has_lost_node

    def drain(self, is_draining: bool = True) -> None:
        """Give it no more edits, or give it edits again. What it has is worked on to its end."""
        self.denoiser.changes.states |= is_draining != self.is_draining
        self.is_draining = is_draining

    @property
    def takes_edits(self) -> bool:
        return self.is_ready and not (self.is_draining or self.is_stale)

    @property
    def has_work(self) -> bool:
        return bool(self.edits) or any(process.has_work for process in self.processes.values())

    @property
    def is_broken(self) -> bool:
        return any(process.is_broken for process in self.processes.values())

    @property
    def identity(self) -> str | None:
        """Digest of the weights that enter the activations: those that prepare jobs and those that take their steps.
        None until both processes have reported theirs. Other weights under the same name have another identity."""
        roles = [role for role in ("prepare", "denoise") if role in self.processes]
        if not self.digests.keys() >= set(roles):
            return None
        return hashlib.sha256(" ".join(self.digests[role] for role in roles).encode()).hexdigest()

    def step(self, seconds: float, predicted: float, between: float = 0.0) -> None:
        """Record one measured step, and the time since the step before."""
        now = time.monotonic()
        rate = 1 / max(now - self._stepped_at, 1e-6)
        is_first = now - self._stepped_at > 10 * max(seconds, 0.1)  # after a pause there is no rate yet
        self.steps_per_second = 1 / max(seconds, 1e-6) if is_first else 0.9 * self.steps_per_second + 0.1 * rate
        self._stepped_at = now
        self.last_step_seconds = seconds
        self.num_steps += 1
        self.load.pace.measure(predicted, seconds + between)


def are_broken(workers: Iterable[Worker]) -> bool:
    """True if no worker is expected to be ready soon. Those that wait for a node do not count, unless all do: then the
    next node may help."""
    placed = [worker for worker in workers if not worker.is_waiting]
    return bool(placed) and all(worker.is_broken for worker in placed)


def place(workers: Sequence[Worker], nodes: Mapping[int, str]) -> None:
    """Note on which nodes workers are; those that are not named have none. The workers of a node share its link."""
    links = {worker.node: worker.load.link for worker in workers if worker.node}
    for worker in workers:
        worker.is_waiting = worker.index not in nodes
        if worker.node != nodes.get(worker.index, ""):
            worker.node = nodes.get(worker.index, "")
            worker.load.link.drop(worker.index)
            worker.load.link = links.setdefault(worker.node, NodeLink()) if worker.node else NodeLink()


def make_services(config: ClusterConfig) -> list[Process]:
    """The processes that hold no entries: those of ControlNets, which all workers share, and companions of workers."""
    devices: dict[Role, tuple[str, ...]] = {"controlnet": config.controls.devices, "guidance": config.guidance_devices}
    return [Process(number, role, device, 0) for role, some in devices.items() for number, device in enumerate(some)]


def make_workers(config: ClusterConfig) -> list[Worker]:
    common, common_rates, peers = Pace(), FetchRates(), PeerMap()
    side_seconds: dict[SideStage, float] = {}
    changes, link, shared = Changes(), NodeLink(), AdapterHoldings()
    max_held: dict[Role, int] = {  # of the processes of a worker
        "prepare": NUM_AHEAD,
        "denoise": 2 * config.max_batch_size,
        "finish": NUM_AHEAD + NUM_ENCODERS,
    }
    workers = []
    for index, device in enumerate(config.devices):
        load = WorkerLoad(
            index,
            config.max_batch_size,
            pace=Pace(common),
            peers=peers,
            fetch_rates=FetchRates(common_rates),
            side_seconds=side_seconds,
            link=link,
            controls=shared if config.controls.devices else AdapterHoldings(),
        )
        policy = make_policy(config.scheduling, config.batching, load.pace, dict(config.weights))
        processes = {
            role: Process(index, role, device, max_held[role], policy=policy, load=load, changes=changes)
            for role in config.roles
        }
        workers.append(Worker(index=index, device=device, processes=processes, load=load, policy=policy))
    return workers
