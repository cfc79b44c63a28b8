"""Registrations that wait for their turn. A worker does one at a time, and begins one when no edit waits to be prepared
there, or when enough edits went before it. Tenants take turns. A registration that an edit waits for does not wait
itself."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import count

from instgenie.cluster.entries import EditEntry, TemplateEntry
from instgenie.cluster.placement import Placement
from instgenie.cluster.processes import Process, Worker

MAX_PASSED = 32  # edits that are prepared on a worker before a registration that waits there goes first


class Registrations:
    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self._waiting: defaultdict[int, list[TemplateEntry]] = defaultdict(list)  # by worker
        self._num_passed: Counter[int] = Counter()  # edits that went before the registrations of a worker
        self._turns = count(1)
        self._last_turns: dict[str, int] = {}  # of each tenant

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, entry: TemplateEntry) -> None:
        """Queue a registration; an urgent one goes to its worker like an edit."""
        if entry.is_urgent:
            self.placement.process_of(entry).put(entry)
        else:
            self._waiting[entry.worker].append(entry)

    def hurry(self, entry: TemplateEntry) -> None:
        """Let a registration go at once, if it still waits."""
        if self.remove(entry):
            self.placement.process_of(entry).put(entry)

    def remove(self, entry: TemplateEntry) -> bool:
        """Take a registration out of the queue; return whether it was there."""
        waiting = self._waiting[entry.worker]
        is_waiting = entry in waiting
        if is_waiting:
            waiting.remove(entry)
        if not waiting:
            del self._waiting[entry.worker]  # so that only workers are looked at for which something waits
        return is_waiting

    def take_all(self, worker: int) -> Sequence[TemplateEntry]:
        """Remove and return the registrations that wait for a worker."""
        return self._waiting.pop(worker, [])

    def passed(self, worker: int) -> None:
        """Note that an edit was sent to be prepared."""
        self._num_passed[worker] += bool(self._waiting.get(worker))

    def release(self) -> None:
        """Send on what may begin."""
        for index, waiting in sorted(self._waiting.items()):
            worker = self.placement.workers[index]
            if waiting and not is_registering(worker) and self._is_turn(worker):
                entry = min(waiting, key=lambda entry: (self._last_turns.get(entry.order.tenant, 0), entry.number))
                self.remove(entry)
                self._last_turns[entry.order.tenant] = next(self._turns)
                self._num_passed[index] = 0
                self.placement.process_of(entry).put(entry)

    def _is_turn(self, worker: Worker) -> bool:
        preparer = worker.processes.get("prepare", worker.denoiser)
        has_edits = any(isinstance(entry, EditEntry) and entry.stage == "prepare" for entry in preparer.queue)
        return preparer.is_ready and (not has_edits or self._num_passed[worker.index] >= MAX_PASSED)


def is_registering(worker: Worker) -> bool:
    """True if a process of the worker has a registration that no edit waits for."""
    return any(
        isinstance(entry, TemplateEntry) and not entry.is_urgent
        for process in worker.processes.values()
        for entry in entries_of(process)
    )


def entries_of(process: Process) -> Sequence[object]:
    return [*process.held.values(), *process.queue]
