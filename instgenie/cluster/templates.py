"""What the cluster knows of templates: who asked for them, how far they are, which workers hold their activations."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from instgenie.cluster.entries import Entry, Registering
from instgenie.cluster.orders import TemplateStatus, Tier

SHARED: tuple[Tier, ...] = ("disk", "remote")  # by all workers


@dataclass(eq=False)
class Template:
    id: str
    registering: Registering
    is_asked_for: bool = False  # by a client, and so registered again when it is lost
    state: Literal["queued", "registering", "ready", "failed"] = "queued"
    num_registered_steps: int = 0
    message: str = ""
    holders: dict[int, dict[Tier, int]] = field(default_factory=dict)  # bytes in the memory of each worker
    shared: dict[Tier, int] = field(default_factory=dict)  # bytes where every worker finds them
    entries: dict[int, Entry] = field(default_factory=dict)  # where it is being registered
    parked: list[Entry] = field(default_factory=list)  # edits that wait for it

    @property
    def is_held(self) -> bool:
        return bool(self.holders or self.shared)

    def tier_at(self, worker: int) -> Tier | None:
        """The highest in which a worker has it; None if it has to register it."""
        found = self.holders.get(worker, {}) | self.shared
        return next((tier for tier in get_args(Tier) if tier in found), None)

    def keep(self, worker: int, tier_bytes: Mapping[Tier, int]) -> None:
        """All there is of it, as far as this worker sees."""
        self.shared = {tier: tier_bytes[tier] for tier in SHARED if tier in tier_bytes}
        self.keep_in_memory(worker, {tier: num for tier, num in tier_bytes.items() if tier not in SHARED})

    def keep_in_memory(self, worker: int, tier_bytes: dict[Tier, int]) -> None:
        self.holders.pop(worker, None)
        if tier_bytes:
            self.holders[worker] = tier_bytes

    def status(self) -> TemplateStatus:
        height, width = self.registering.size
        return TemplateStatus(
            id=self.id,
            state=self.state,
            num_steps=self.registering.steps,
            num_registered_steps=self.num_registered_steps,
            width=width,
            height=height,
            tier_bytes=add_up([*self.holders.values(), self.shared]),
            message=self.message,
        )


def add_up(all_bytes: Iterable[Mapping[Tier, int]]) -> dict[Tier, int]:
    total: Counter[Tier] = Counter()
    for tier_bytes in all_bytes:
        total.update(tier_bytes)
    return dict(total)


def template_id(registering: Registering) -> str:
    """The same for all that may share activations of a model; never for two tenants."""
    assert registering.picture is not None
    facts = (registering.tenant, registering.steps, registering.guidance, registering.picture.shape)
    hashed = hashlib.sha256(repr(facts).encode())
    hashed.update(registering.picture.tobytes())
    return hashed.hexdigest()[:32]
