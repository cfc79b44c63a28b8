"""The processes of the workers, as the cluster sees them: started, watched, killed, started again. Knows what each one
holds; what a message means is not its matter."""

import asyncio
import hashlib
import os
import signal
import sys
import time
from bisect import insort
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from instgenie.cluster.config import NUM_ENCODERS, ClusterConfig, ProcessConfig, Role
from instgenie.cluster.entries import Entry
from instgenie.cluster.orders import Order, Tier
from instgenie.cluster.status import ProcessState, ProcessStatus
from instgenie.scheduling.router import Chore, Load, Pace

NUM_AHEAD = 2  # entries that prepare and finish hold: one in work, one at hand; of finish its threads hold some more
FIRST_BACK_OFF, LAST_BACK_OFF = 0.1, 30.0  # seconds before a process that died is started again
HEALTHY_SECONDS = 60.0  # a process that lived so long starts again at the first back-off
PACKAGE_ROOT = Path(__file__).parent.parent.parent


@dataclass(eq=False)
class Process:
    """One role of one worker, over all its starts."""

    worker: int
    role: Role
    device: str
    config: ClusterConfig
    state: ProcessState = "starting"
    message: str = ""
    num_starts: int = 0
    num_quick_deaths: int = 0
    started_at: float = 0.0
    heard_at: float = 0.0
    child: asyncio.subprocess.Process | None = None
    queue: list[Entry] = field(default_factory=list)  # to be sent, the oldest first
    held: dict[str, Entry] = field(default_factory=dict)  # sent and not answered

    @property
    def name(self) -> str:
        return f"{self.worker}.{self.role}.{self.num_starts}"

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def is_alive(self) -> bool:
        return self.child is not None and self.child.returncode is None

    @property
    def max_held(self) -> int:
        most: dict[Role, int] = {
            "prepare": NUM_AHEAD,
            "denoise": 2 * self.config.max_batch_size,
            "finish": NUM_AHEAD + NUM_ENCODERS,
        }
        return most[self.role]

    async def start(self, endpoint: str) -> None:
        self.num_starts += 1
        self.state, self.message = "starting", ""
        config = ProcessConfig(
            name=self.name,
            role=self.role,
            parent=os.getpid(),
            endpoint=endpoint,
            model=self.config.model,
            device=self.device,
            dtype=self.config.dtype,
            max_batch_size=self.config.max_batch_size,
            batching=self.config.batching,
            graphs=self.config.graphs,
            cache=self.config.cache,
            plan=self.config.plan,
        )
        self.started_at = self.heard_at = time.monotonic()
        self.child = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", f"instgenie.workers.{self.role}", msgspec.json.encode(config).decode()),
            stdin=asyncio.subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": python_path()},
        )

    async def ended(self) -> int:
        assert self.child is not None
        return await self.child.wait()

    def kill(self) -> None:
        if self.child is not None and self.is_alive:
            with suppress(ProcessLookupError):
                self.child.send_signal(signal.SIGKILL)

    def back_off(self) -> float:
        """Seconds to wait before the next start."""
        if time.monotonic() - self.started_at > HEALTHY_SECONDS:
            self.num_quick_deaths = 0
        self.num_quick_deaths += 1
        return min(FIRST_BACK_OFF * 2.0 ** (self.num_quick_deaths - 1), LAST_BACK_OFF)

    def put(self, entry: Entry) -> None:
        insort(self.queue, entry, key=lambda entry: entry.number)

    def remove(self, entry: Entry) -> None:
        self.held.pop(entry.id, None)
        if entry in self.queue:
            self.queue.remove(entry)

    def take(self) -> Iterator[list[Entry]]:
        """What may be sent now: entries one by one, a group at once, a suspect only to a process that holds nothing."""
        while self.is_ready and self.queue and self.has_room():
            head = self.queue[0]
            together = [head] if head.is_suspect or head.stage != "denoise" else self.companions(head)
            for entry in together:
                self.queue.remove(entry)
            self.held |= {entry.id: entry for entry in together}
            yield together

    def has_room(self) -> bool:
        if self.queue[0].is_suspect or any(entry.is_suspect for entry in self.held.values()):
            return not self.held
        num_edits = sum(isinstance(entry.order, Order) for entry in self.held.values())
        return num_edits < self.max_held or not isinstance(self.queue[0].order, Order)

    def companions(self, head: Entry) -> list[Entry]:
        return [
            entry
            for entry in self.queue
            if entry.group is head.group and entry.stage == head.stage and not entry.is_suspect
        ]

    def empty(self) -> tuple[list[Entry], list[Entry]]:
        """What it held and what it was to get; it has neither any more."""
        held, queue = list(self.held.values()), self.queue
        self.held, self.queue = {}, []
        return held, queue

    @property
    def status(self) -> ProcessStatus:
        pid = self.child.pid if self.child is not None and self.is_alive else None
        return ProcessStatus(self.role, pid, self.state, self.num_starts, self.message)


@dataclass(eq=False)
class Worker:
    """One device and the processes that share it."""

    index: int
    device: str
    processes: dict[Role, Process]
    load: Load
    digests: dict[Role, str] = field(default_factory=dict)  # of the model, as far as each process has it
    tier_bytes: dict[Tier, int] = field(default_factory=dict)
    num_steps: int = 0
    num_interruptions: int = 0
    last_step_seconds: float = 0.0
    steps_per_second: float = 0.0
    _stepped_at: float = 0.0

    @property
    def state(self) -> ProcessState:
        states = [process.state for process in self.processes.values()]
        worst: tuple[ProcessState, ...] = ("failed", "down", "starting")
        return next((state for state in worst if state in states), "ready")

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def identity(self) -> str | None:
        """Of the model: what prepares jobs and what takes their steps both enter the activations. None until both have
        said which weights they have. Weights of another checkpoint under the same name have another identity."""
        roles = [role for role in ("prepare", "denoise") if role in self.processes]
        if not self.digests.keys() >= set(roles):
            return None
        return hashlib.sha256(" ".join(self.digests[role] for role in roles).encode()).hexdigest()

    def step(self, seconds: float, predicted: float) -> None:
        now = time.monotonic()
        rate = 1 / max(now - self._stepped_at, 1e-6)
        is_first = now - self._stepped_at > 10 * max(seconds, 0.1)  # after a pause there is no rate yet
        self.steps_per_second = 1 / max(seconds, 1e-6) if is_first else 0.9 * self.steps_per_second + 0.1 * rate
        self._stepped_at = now
        self.last_step_seconds = seconds
        self.num_steps += 1
        self.load.pace.measure(predicted, seconds)


def make_workers(config: ClusterConfig) -> list[Worker]:
    common = Pace()
    chores: dict[Chore, float] = {}
    return [
        Worker(
            index=index,
            device=device,
            processes={role: Process(index, role, device, config) for role in config.roles},
            load=Load(index, config.max_batch_size, pace=Pace(common), chores=chores),
        )
        for index, device in enumerate(config.devices)
    ]


def python_path() -> str:
    """The processes import this very package, wherever it was found."""
    paths = [str(PACKAGE_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.pathsep.join(dict.fromkeys(paths))
