"""The record of one template: its progress, and the workers that hold its activations."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import get_args

from instgenie.cluster.entries import EditEntry, TemplateEntry
from instgenie.cluster.orders import TemplateOrder, TemplateState, TemplateStatus
from instgenie.types import TierName

SHARED: tuple[TierName, ...] = ("disk", "remote")  # tiers that workers share: those of a host, and all


@dataclass(eq=False)
class TemplateRecord:
    id: str
    order: TemplateOrder
    is_asked_for: bool = False  # by a client; such a template is registered again when it is lost
    state: TemplateState = "queued"
    is_lost: bool = False  # True if it was ready, and is registered again because a worker died
    num_registered_steps: int = 0
    message: str = ""  # why it failed
    holders: dict[int, dict[TierName, int]] = field(default_factory=dict)  # bytes in memory, by worker
    disks: dict[str, int] = field(default_factory=dict)  # bytes on disk, by the host whose workers share it
    shared: dict[TierName, int] = field(default_factory=dict)  # bytes in the tier that all hosts share
    entries: dict[int, TemplateEntry] = field(default_factory=dict)  # registrations in progress, by worker
    parked: list[EditEntry] = field(default_factory=list)  # edits that wait for it
    used_at: float = field(default_factory=time.monotonic)

    @property
    def is_held(self) -> bool:
        return bool(self.holders) or self.is_lasting

    @property
    def is_lasting(self) -> bool:
        """True if it lies in a tier that outlives the workers."""
        return bool(self.disks or self.shared)

    def tier_at(self, worker: int, host: str) -> TierName | None:
        """The fastest tier in which a worker finds it without asking its peers; None if there is none."""
        found = [*self.holders.get(worker, {}), *(["disk"] if host in self.disks else []), *self.shared]
        return next((tier for tier in get_args(TierName) if tier in found), None)

    def keep(self, worker: int, host: str, tier_bytes: Mapping[TierName, int]) -> bool:
        """Record all that one worker sees of it. Return whether others now find it in another tier."""
        self.keep_in_memory(worker, {tier: num for tier, num in tier_bytes.items() if tier not in SHARED})
        return self.keep_below(host, tier_bytes)

    def keep_below(self, host: str, tier_bytes: Mapping[TierName, int]) -> bool:
        """Record what the workers of a host see of it below memory. Return whether that is in other tiers."""
        before = host in self.disks, "remote" in self.shared
        self.disks.pop(host, None)
        if "disk" in tier_bytes:
            self.disks[host] = tier_bytes["disk"]
        self.shared = {"remote": tier_bytes["remote"]} if "remote" in tier_bytes else {}
        return before != (host in self.disks, "remote" in self.shared)

    def keep_in_memory(self, worker: int, tier_bytes: dict[TierName, int]) -> None:
        self.holders.pop(worker, None)
        if tier_bytes:
            self.holders[worker] = tier_bytes

    def fail(self, message: str) -> None:
        self.state, self.message, self.is_lost = "failed", message, False

    def status(self) -> TemplateStatus:
        height, width = self.order.size
        on_disks: list[Mapping[TierName, int]] = [{"disk": num} for num in self.disks.values()]
        return TemplateStatus(
            id=self.id,
            state=self.state,
            num_steps=self.order.steps,
            num_registered_steps=self.num_registered_steps,
            width=width,
            height=height,
            tier_bytes=add_up([*self.holders.values(), *on_disks, self.shared]),
            message=self.message,
        )


def add_up(all_bytes: Iterable[Mapping[TierName, int]]) -> dict[TierName, int]:
    total: Counter[TierName] = Counter()
    for tier_bytes in all_bytes:
        total.update(tier_bytes)
    return dict(total)
