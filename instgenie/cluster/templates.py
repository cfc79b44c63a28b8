"""The record of one template: its progress, and the workers that hold its activations."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import get_args

from instgenie.cluster.entries import EditEntry, TemplateEntry
from instgenie.cluster.orders import TemplateOrder, TemplateState, TemplateStatus
from instgenie.types import TierName

SHARED: tuple[TierName, ...] = ("disk", "remote")  # tiers that all workers share


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
    shared: dict[TierName, int] = field(default_factory=dict)  # bytes in the shared tiers
    entries: dict[int, TemplateEntry] = field(default_factory=dict)  # registrations in progress, by worker
    parked: list[EditEntry] = field(default_factory=list)  # edits that wait for it
    used_at: float = field(default_factory=time.monotonic)

    @property
    def is_held(self) -> bool:
        return bool(self.holders or self.shared)

    def tier_at(self, worker: int) -> TierName | None:
        """The fastest tier in which a worker finds it without asking its peers; None if there is none."""
        found = self.holders.get(worker, {}) | self.shared
        return next((tier for tier in get_args(TierName) if tier in found), None)

    def keep(self, worker: int, tier_bytes: Mapping[TierName, int]) -> bool:
        """Record all that one worker sees of it. Return whether others now find it in another tier."""
        before = self.shared.keys()
        self.shared = {tier: tier_bytes[tier] for tier in SHARED if tier in tier_bytes}
        self.keep_in_memory(worker, {tier: num for tier, num in tier_bytes.items() if tier not in SHARED})
        return self.shared.keys() != before

    def keep_in_memory(self, worker: int, tier_bytes: dict[TierName, int]) -> None:
        self.holders.pop(worker, None)
        if tier_bytes:
            self.holders[worker] = tier_bytes

    def fail(self, message: str) -> None:
        self.state, self.message, self.is_lost = "failed", message, False

    def status(self) -> TemplateStatus:
        height, width = self.order.size
        return TemplateStatus(
            id=self.id,
            state=self.state,
            num_steps=self.order.steps,
            num_registered_steps=self.num_registered_steps,
            width=width,
            height=height,
            tier_bytes=add_up([*self.holders.values(), self.shared]),
            message=self.message,
        )


def add_up(all_bytes: Iterable[Mapping[TierName, int]]) -> dict[TierName, int]:
    total: Counter[TierName] = Counter()
    for tier_bytes in all_bytes:
        total.update(tier_bytes)
    return dict(total)
