"""The entries of one process: those that wait to be sent, in the order of a policy, and those that it holds. Knows no
message and no state of the process."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from instgenie.cluster.config import Role
from instgenie.cluster.entries import EditEntry, Entry, TemplateEntry
from instgenie.scheduling.policy import Policy
from instgenie.scheduling.router import WorkerLoad
from instgenie.scheduling.terms import Standing


@dataclass(eq=False)
class Holdings:
    worker: int
    role: Role
    device: str
    max_held: int  # edits that the process holds at once
    queue: list[Entry] = field(default_factory=list)  # to be sent, the oldest first
    held: dict[str, Entry] = field(default_factory=dict)  # sent and not yet answered
    leaving: set[str] = field(default_factory=set)  # ids of entries that it was told to drop, and may still work on
    policy: Policy | None = None  # who is sent first; None: the oldest
    load: WorkerLoad | None = None  # of its worker

    @property
    def has_work(self) -> bool:
        return bool(self.queue or self.held or self.leaving)

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
