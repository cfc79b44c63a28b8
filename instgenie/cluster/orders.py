"""What the HTTP process asks of a cluster and what it hears back. Knows no socket, no process and no torch."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from instgenie.cluster.wish import Wish
from instgenie.types import PixelMask, Pixels

OutputFormat = Literal["png", "jpeg", "webp"]
Tier = Literal["gpu", "host", "disk", "remote"]
FailureKind = Literal["bad_input", "out_of_memory", "crashed", "internal"]


@dataclass(frozen=True, eq=False)
class Order:
    """One edit as a client asks for it."""

    tenant: str  # digest of the client's key: templates and caches of one are invisible to another
    picture: Pixels
    mask: PixelMask
    wish: Wish
    output_format: OutputFormat = "png"
    output_compression: int = 100
    num_partials: int = 0  # pictures to show on the way
    trace: str = ""  # traceparent; empty: none


@dataclass(frozen=True)
class Queued:
    position: int  # edits that go first


@dataclass(frozen=True)
class Stepped:
    step: int
    num_steps: int


@dataclass(frozen=True, eq=False)
class Partial:
    index: int
    picture: bytes  # encoded


@dataclass(frozen=True)
class Facts:
    """What a client learns about its edit beside the picture."""

    seed: int
    width: int
    height: int
    num_tokens: int
    num_masked_tokens: int
    num_computed_tokens: int
    cache_tier: Tier | None  # where the template's activations were found
    worker: int
    num_attempts: int
    queue_seconds: float
    prepare_seconds: float
    denoise_seconds: float
    dense_seconds: float  # predicted: what the steps would have taken with every token computed
    finish_seconds: float
    finish_thread_seconds: float  # of them, those of a thread, in which the next is being finished


@dataclass(frozen=True, eq=False)
class Finished:
    picture: bytes  # encoded
    facts: Facts


@dataclass(frozen=True)
class Failed:
    kind: FailureKind
    message: str
    param: str | None = None


Event: TypeAlias = Queued | Stepped | Partial | Finished | Failed


@dataclass(frozen=True)
class TemplateStatus:
    id: str
    state: Literal["queued", "registering", "ready", "failed"]
    num_steps: int
    num_registered_steps: int
    width: int
    height: int
    tier_bytes: dict[Tier, int]
    message: str = ""  # of a failure
