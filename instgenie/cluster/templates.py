"""What the cluster knows of templates: who asked for them, how far they are, which workers hold their activations."""

import hashlib
from dataclasses import dataclass, field
from typing import Literal

from instgenie.cluster.entries import Entry, Registering
from instgenie.cluster.orders import TemplateStatus, Tier


@dataclass(eq=False)
class Template:
    id: str
    registering: Registering
    is_asked_for: bool = False  # by a client, and so registered again when it is lost
    state: Literal["queued", "registering", "ready", "failed"] = "queued"
    num_registered_steps: int = 0
    message: str = ""
    holders: dict[int, int] = field(default_factory=dict)  # bytes on each worker
    entries: dict[int, Entry] = field(default_factory=dict)  # where it is being registered
    parked: list[Entry] = field(default_factory=list)  # edits that wait for it

    def status(self, tier: Tier) -> TemplateStatus:
        height, width, _ = self.registering.picture.shape
        num_bytes = sum(self.holders.values())
        return TemplateStatus(
            id=self.id,
            state=self.state,
            num_steps=self.registering.steps,
            num_registered_steps=self.num_registered_steps,
            width=width,
            height=height,
            tier_bytes={tier: num_bytes} if num_bytes else {},
            message=self.message,
        )


def template_id(model: str, registering: Registering) -> str:
    """The same for all that may share activations; never for two tenants."""
    picture = registering.picture
    facts = (registering.tenant, model, registering.steps, registering.guidance, picture.shape)
    hashed = hashlib.sha256(repr(facts).encode())
    hashed.update(picture.tobytes())
    return hashed.hexdigest()[:32]
