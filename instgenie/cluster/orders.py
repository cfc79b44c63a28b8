"""Orders that clients give to a cluster, and the events they get back. Knows no socket, no process and no torch."""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

from instgenie.cluster.wish import Wish
from instgenie.jobs.quality import DEFAULT, SETTINGS
from instgenie.pictures.digest import masked_share
from instgenie.scheduling.terms import NO_DEADLINE
from instgenie.telemetry.logs import request_id
from instgenie.types import Box, PixelMask, Pixels, ReuseFound, Source, TierName, Whole

OutputFormat = Literal["png", "jpeg", "webp"]
FailureKind = Literal[
    "bad_input", "no_reuse", "out_of_memory", "crashed", "unavailable", "lora_unavailable", "shutting_down", "internal"
]
TemplateState = Literal["queued", "registering", "ready", "failed"]


@dataclass(frozen=True, eq=False)
class Order:
    """One edit as a client asks for it."""

    tenant: str  # name or digest of the client's key: tenants never see each other's templates and caches
    picture: Pixels
    mask: PixelMask
    wish: Wish
    source: Source | None = None  # the picture's file; None: the picture is all there is
    whole: Whole | None = None  # where the picture is a crop: the photograph that the answer shows
    control_images: tuple[Pixels, ...] = ()  # of the picture's size, one per ControlNet of the wish
    references: tuple[Pixels, ...] = ()  # pictures that the model looks at beside the edited one
    sees_picture: bool = False  # the model sees the picture, or a reference, beside what it computes
    output_format: OutputFormat = "png"
    output_compression: int = 100
    num_partials: int = 0  # pictures to send before the final one
    may_store: bool = True  # False: the picture does not become a template
    deadline: float = NO_DEADLINE  # of `time.monotonic`
    priority: int = 0  # lower goes first
    trace: str = ""  # traceparent; empty: not traced
    request_id: str = field(default_factory=request_id.get)  # of the request that is being answered
    key: str = ""  # orders with the same one are the same order, also at other fronts; empty: it is like no other
    home: int | None = None  # the worker that may have begun an order of the same key; None: none has

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the answer."""
        height, width, _ = self.whole.pixels.shape if self.whole else self.picture.shape
        return height, width

    @property
    def can_reuse(self) -> bool:
        """True if a template's activations may be used and would save any computation."""
        return not self.obstacle

    @cached_property
    def obstacle(self) -> str:
        """Why a template's activations are of no use to this edit; empty if they are."""
        wish = self.wish
        if wish.reuse in ("off", "own"):
            return f"the request asks for reuse={wish.reuse}"
        if wish.quality == "exact":
            return "the quality 'exact' computes every token"
        if wish.steps is not None and SETTINGS[wish.quality].dense_steps(wish.steps) >= wish.steps:
            return f"the quality {wish.quality!r} computes {wish.steps} of {wish.steps} steps in full"
        if self.references:
            return "it has a reference picture, and templates are registered without"
        return "the mask covers the whole picture" if self.is_all_masked and not self.sees_picture else ""

    @property
    def is_all_masked(self) -> bool:
        return masked_share(self.mask) == 1

    def own_share(self, num_steps: int) -> float:
        """Share of the steps that compute every token if the edit reads what these leave behind; 1 if it may not. Steps
        that are found on the way are taken to be as many as those of `balanced`."""
        wish = self.wish
        if wish.reuse not in ("auto", "own") or (self.is_all_masked and not self.sees_picture):
            return 1.0
        quality = DEFAULT if SETTINGS[wish.quality].max_change else wish.quality
        return len(SETTINGS[quality].own_steps(num_steps)) / num_steps


@dataclass(frozen=True, eq=False)
class TemplateOrder:
    """A template to register."""

    tenant: str
    size: tuple[int, int]  # (height, width) of the picture
    steps: int
    guidance: float
    digest: str  # of the picture
    picture: Pixels | None  # None: only stored beside the activations
    request_id: str = field(default_factory=request_id.get)

    @property
    def id(self) -> str:
        return template_id(self.tenant, self.steps, self.guidance, self.digest)


def template_id(tenant: str, steps: int, guidance: float, digest: str) -> str:
    """The same for all edits that may share activations of a model; never the same for two tenants."""
    return hashlib.sha256(repr((tenant, steps, float(guidance), digest)).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Queued:
    position: int  # edits of other requests ahead of it
    seconds_left: float | None = field(default=None, compare=False)  # until its request is answered; None: unknown
    predicted_seconds: float = field(default=0.0, compare=False)  # from acceptance to the picture


@dataclass(frozen=True)
class Stepped:
    step: int
    num_steps: int
    seconds_left: float | None = field(default=None, compare=False)  # until its request is answered; None: unknown


@dataclass(frozen=True, eq=False)
class Partial:
    index: int
    picture: bytes  # encoded


@dataclass(frozen=True)
class GuidanceFacts:
    """How the second branch of an edit was computed by the companion of its worker."""

    num_repeats: int = 0  # steps that were repeated because the companion had died
    is_alone: bool = False  # True if the worker went on without it


@dataclass(frozen=True)
class LoraFacts:
    """How the LoRAs of an edit were applied."""

    step: int  # from which on
    tier: str  # where the slowest of them was found: gpu, host, disk or remote
    waited_seconds: float = 0.0  # that the edit stood still for them


@dataclass(frozen=True)
class Facts:
    """Facts about a finished edit, sent to the client with the picture."""

    seed: int
    width: int
    height: int
    num_tokens: int
    num_masked_tokens: int
    num_computed_tokens: int
    cache_tier: TierName | None  # where the template's activations were found; None: every token was computed
    worker: int
    num_attempts: int
    queue_seconds: float
    prepare_seconds: float
    denoise_seconds: float
    dense_seconds: float  # predicted time of the steps if every token were computed
    finish_seconds: float
    finish_thread_seconds: float  # the part of finish_seconds during which the next picture is decoded
    why_dense: str = ""  # why no template's activations were used, as a clause; empty if they were
    reuse: ReuseFound = "none"  # whose activations were read
    crop: Box | None = None  # the part of the picture that was edited; None: all of it
    predicted_seconds: float = 0.0  # from acceptance to the picture, as predicted when it was accepted
    num_preemptions: int = 0  # times that it left a batch for another edit
    in_time: bool | None = None  # whether it met its deadline; None: it had none
    loras: LoraFacts | None = None  # None: it has none
    num_steps: int = 0
    num_control_retries: int = 0  # steps that were repeated because a process of ControlNets had died
    guidance: GuidanceFacts | None = None  # None: all of its branches were computed by its worker


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
    state: TemplateState
    num_steps: int
    num_registered_steps: int
    width: int
    height: int
    tier_bytes: dict[TierName, int]
    message: str = ""  # why it failed
