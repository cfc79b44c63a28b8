"""The workers and their processes as the cluster sees them: their state, the entries they hold, the entries that wait
for them. Knows no message and no socket."""

import hashlib
import time
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from instgenie.cluster.config import NUM_ENCODERS, ClusterConfig, Role
from instgenie.cluster.entries import EditEntry, Entry, TemplateEntry
from instgenie.cluster.launch import LaunchedProcess
from instgenie.cluster.status import ProcessState, ProcessStatus
from instgenie.scheduling.pace import Pace
from instgenie.scheduling.policies import make_policy
from instgenie.scheduling.policy import Policy
from instgenie.scheduling.router import SideStage, WorkerLoad
from instgenie.scheduling.terms import Standing
from instgenie.types import TierName

NUM_AHEAD = 2  # entries that prepare and finish hold, one in work and one at hand; finish adds one per encoder thread
FIRST_BACK_OFF, LAST_BACK_OFF = 0.1, 30.0  # seconds before a dead process is started again
HEALTHY_SECONDS = 60.0  # a process that was ready for this long restarts after the first back-off
MAX_FAILED_STARTS = 5  # in a row, after which a process that is not ready counts as broken


@dataclass(eq=False)
class Process:
    """One role of one worker, across all its starts."""

    worker: int
    role: Role
    device: str
    max_held: int  # edits that it holds at once
    state: ProcessState = "starting"
    message: str = ""  # why it is down
    num_starts: int = 0
    num_failed_starts: int = 0  # in a row: it ended before it was ready
    num_quick_deaths: int = 0
    is_loaded: bool = False  # its current start holds the model's weights
    has_begun: bool = False  # its current start was told to take the memory that is left
    has_been_ready: bool = False  # at any of its starts
    ready_at: float | None = None  # None: its current start is not ready yet
    heard_at: float = 0.0
    launched: LaunchedProcess | None = None
    queue: list[Entry] = field(default_factory=list)  # to be sent, the oldest first
    held: dict[str, Entry] = field(default_factory=dict)  # sent and not yet answered
    leaving: set[str] = field(default_factory=set)  # ids of entries that it was told to drop, and may still work on
    policy: Policy | None = None  # who is sent first; None: the oldest
    load: WorkerLoad | None = None  # of its worker

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
        return ProcessStatus(self.role, pid, self.state, self.num_starts, self.message)

    # starts

    def begin(self) -> None:
        """Enter a new start, under a new name."""
        self.num_starts += 1
        self.state, self.message, self.launched = "starting", "", None
        self.is_loaded = self.has_begun = False
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

    def remove(self, entry: Entry) -> None:
        self.held.pop(entry.id, None)
        if entry in self.queue:
            self.queue.remove(entry)

    def abandon(self, entry: Entry) -> bool:
        """Remove an entry that was cancelled. Return whether the process has to be told to drop it; until it has, the
        entry takes its room."""
        is_held = entry.id in self.held
        if is_held:
            self.leaving.add(entry.id)
        self.remove(entry)
        return is_held

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

    def next(self) -> Entry | None:
        """The entry to send next: the first one, as the policy orders them. Long edits that find no room let others go
        first, and all edits that find none let prepared templates go first."""
        is_full = False
        for entry in self.ordered():
            may_go = not is_full or (isinstance(entry, TemplateEntry) and entry.stage == "denoise")
            if may_go and self.has_room(entry):
                return entry
            if entry.is_suspect:
                break
            is_full |= not (isinstance(entry, EditEntry) and entry.is_long)
        return None

    def ordered(self) -> list[Entry]:
        """The queue, those that go first in front."""
        policy = self.policy
        if policy is None or len(self.queue) < 2:
            return self.queue
        entries = [*self.queue, *self.held.values()]
        policy.meet(entry.terms.tenant for entry in entries if isinstance(entry, EditEntry))
        ranks = policy.ranks([self.claim_of(entry) for entry in entries], time.monotonic())
        return [self.queue[index] for index in sorted(range(len(self.queue)), key=ranks.__getitem__)]

    def claim_of(self, entry: Entry) -> Standing:
        seconds, work = (self.load.alone_seconds(entry.id), self.load.shared_seconds(entry.id)) if self.load else (0, 0)
        return Standing(entry.terms, seconds, entry.num_overtaken, work)

    def is_urgent(self, entry: EditEntry, held: Sequence[EditEntry]) -> bool:
        """True if an edit goes before many of those that the step loop holds, so that it finds room beyond the usual:
        else none of them could make room for it in the batch."""
        if self.policy is None or self.role != "denoise":
            return False
        rank, *others = self.policy.ranks([self.claim_of(one) for one in (entry, *held)], time.monotonic())
        return sum(other > rank for other in others) >= self.max_held // 2

    def has_room(self, entry: Entry) -> bool:
        """True if an entry may be sent. Templates need no room. Long edits get at most half of it."""
        if entry.is_suspect or any(held.is_suspect for held in self.held.values()):
            return not (self.held or self.leaving)
        if not isinstance(entry, EditEntry):
            return True
        edits = [held for held in self.held.values() if isinstance(held, EditEntry)]
        num_long, max_long = sum(held.is_long for held in edits), max(self.max_held // 2, 1)
        if entry.is_long and num_long >= max_long:
            return len(edits) < self.max_held and self.is_urgent(entry, edits)
        num_beyond = max(num_long - max_long, 0)  # a group may have gone beyond the half
        room = self.max_held - (len(edits) + len(self.leaving) - num_beyond)
        return room > 0 or (room > -self.max_held // 2 and self.is_urgent(entry, edits))

    def companions(self, head: Entry) -> list[Entry]:
        """The queued entries that are sent together with the first one, which is among them."""
        if not isinstance(head, EditEntry):
            return [head]
        return [
            entry for entry in self.queue if entry in head.group and entry.stage == head.stage and not entry.is_suspect
        ]

    def holding(self, id: str, attempt: int) -> Entry | None:
        """The entry it works on, unless that attempt was abandoned."""
        entry = self.held.get(id)
        return entry if entry and entry.attempt == attempt else None

    def take_back(self, id: str, attempt: int) -> Entry | None:
        """The entry it has answered, which it no longer holds; None if that attempt was abandoned."""
        if entry := self.holding(id, attempt):
            del self.held[id]
        return entry

    def empty(self) -> tuple[list[Entry], list[Entry]]:
        """Remove all entries, and return those it held and those in its queue."""
        held, queue = list(self.held.values()), self.queue
        self.held, self.queue, self.leaving = {}, [], set()
        return held, queue


@dataclass(eq=False)
class Worker:
    """One device and the processes that share it."""

    index: int
    device: str
    processes: dict[Role, Process]
    load: WorkerLoad
    policy: Policy = field(default_factory=lambda: make_policy("fcfs"))
    digests: dict[Role, str] = field(default_factory=dict)  # of the weights that each process has loaded
    tier_bytes: dict[TierName, int] = field(default_factory=dict)
    host_bytes: int | None = None  # main memory for activations; None: not yet measured
    num_steps: int = 0
    num_interruptions: int = 0
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


def make_workers(config: ClusterConfig) -> list[Worker]:
    common = Pace()
    side_seconds: dict[SideStage, float] = {}
    max_held: dict[Role, int] = {
        "prepare": NUM_AHEAD,
        "denoise": 2 * config.max_batch_size,
        "finish": NUM_AHEAD + NUM_ENCODERS,
    }
    workers = []
    for index, device in enumerate(config.devices):
        load = WorkerLoad(index, config.max_batch_size, pace=Pace(common), side_seconds=side_seconds)
        policy = make_policy(config.scheduling, config.batching, load.pace, dict(config.weights))
        processes = {
            role: Process(index, role, device, max_held[role], policy=policy, load=load) for role in config.roles
        }
        workers.append(Worker(index=index, device=device, processes=processes, load=load, policy=policy))
    return workers
