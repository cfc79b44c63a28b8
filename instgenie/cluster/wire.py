"""Messages between the processes of a cluster: a msgspec struct in the first frame, raw bytes in the others.

Knows no socket, no process and no torch. Every answer carries the id and the attempt of what it answers, so that the
answer to an attempt that was given up is told apart from the one that is awaited.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct

from instgenie.cluster.config import finish_period
from instgenie.cluster.orders import FailureKind, OutputFormat, Tier
from instgenie.cluster.wish import Wish
from instgenie.cost.table import StepCosts
from instgenie.types import PixelMask, Pixels

Frame: TypeAlias = bytes | memoryview


class Message(Struct, frozen=True, tag=True):
    pass


class TensorHead(Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]


class JobHead(Struct, frozen=True):
    """A job but for its tensors, which are the frames that follow."""

    edit: dict[str, Any]  # the fields of the edit, without its pixels
    grid: tuple[int, int]
    scale: float
    schedule_kind: str
    schedule: msgspec.Raw
    num_branches: int
    tensors: tuple[TensorHead, ...]


class TemplateHead(Struct, frozen=True):
    """All it takes to find a template's activations."""

    id: str
    tenant: str
    model: str  # digest of the weights
    size: tuple[int, int]  # (height, width) the model works at
    steps: int
    guidance: float


# to any process


class Stop(Message, frozen=True):
    pass


# to prepare


class Prepare(Message, frozen=True):
    """Frames: picture, mask."""

    id: str
    attempt: int
    wish: Wish
    size: tuple[int, int]  # (height, width) of the picture
    trace: str = ""  # traceparent; empty: none


class PrepareTemplate(Message, frozen=True):
    """Frames: picture."""

    id: str
    attempt: int
    steps: int
    guidance: float
    size: tuple[int, int]


# to denoise


class Denoising(Struct, frozen=True):
    id: str
    attempt: int
    job: JobHead
    template: TemplateHead | None  # whose activations it uses, if they are found
    is_sure: bool  # they have to be found: an earlier attempt used them, or others are told that they are there
    num_partials: int
    trace: str = ""


class Fetch(Message, frozen=True):
    """A job will come that uses the template's activations, if they are found: they may come up meanwhile."""

    id: str  # of the job
    template: TemplateHead


class Denoise(Message, frozen=True):
    """Jobs that join the batch together. Frames: the tensors of all of them, one job after the other."""

    jobs: tuple[Denoising, ...]


class Register(Message, frozen=True):
    """Frames: the tensors of the job; then the picture, if it is to be kept with the activations."""

    id: str  # of the template
    attempt: int
    template: TemplateHead
    job: JobHead
    is_urgent: bool  # a job waits for it, so it does not wait for an idle moment
    picture: tuple[int, int] | None  # (height, width); None: it is not to be kept


class Cancel(Message, frozen=True):
    id: str


class Forget(Message, frozen=True):
    template: TemplateHead


class List(Message, frozen=True):
    """Asks for the templates of a model that outlived whoever registered them."""

    model: str  # digest of the weights


class Recall(Message, frozen=True):
    """Asks for the picture that was kept with a template."""

    template: TemplateHead


# to finish


class Finish(Message, frozen=True):
    """Frames: latents, picture, mask."""

    id: str
    attempt: int
    latents: TensorHead
    grid: tuple[int, int]
    size: tuple[int, int]
    feather: int
    output_format: OutputFormat
    output_compression: int
    partial: int | None  # index of a picture on the way; None = the final one
    trace: str = ""


# from any process


class ModelFacts(Struct, frozen=True):
    name: str
    family: str
    is_fill: bool
    own_size: int
    steps: int
    guidance: float
    embeds_guidance: bool  # whether the guidance of an edit enters the network
    patch: int  # side in pixels of a token
    size_multiple: int  # working sizes are multiples of this
    num_blocks: int
    device: str
    dtype: str


class Ready(Message, frozen=True):
    facts: ModelFacts
    digest: str  # of the model, as far as this process has its weights


class Broken(Message, frozen=True):
    """The process cannot start, and trying again will not help."""

    message: str


class Beat(Message, frozen=True):
    """The loop of a process goes round."""


class Failed(Message, frozen=True):
    id: str
    attempt: int
    kind: FailureKind
    message: str
    param: str | None = None


# from prepare


class Prepared(Message, frozen=True):
    """Frames: the tensors of the job."""

    id: str
    attempt: int
    job: JobHead
    num_tokens: int
    num_masked_tokens: int
    num_steps: int
    seconds: float


# from denoise


class Priced(Message, frozen=True):
    """What steps cost on this worker."""

    costs: StepCosts


class JobStep(Struct, frozen=True):
    id: str
    attempt: int
    step: int  # how many it has taken


class Joined(Message, frozen=True):
    jobs: tuple[JobStep, ...]
    plans: tuple[tuple[bool, ...], ...]  # one for each job


class Stepped(Message, frozen=True):
    """One step of a batch."""

    seconds: float
    predicted_seconds: float  # by the costs that were told
    num_interruptions: int  # of the step loop, since it started
    jobs: tuple[JobStep, ...]


class Glimpsed(Message, frozen=True):
    """Frames: latents that foresee where a job is going."""

    id: str
    attempt: int
    index: int
    latents: TensorHead


class Denoised(Message, frozen=True):
    """Frames: latents."""

    id: str
    attempt: int
    latents: TensorHead
    num_computed_tokens: int
    seconds: float


class Registered(Message, frozen=True):
    """Steps of a template that are registered so far."""

    id: str
    attempt: int
    num_registered_steps: int
    num_steps: int
    tier_bytes: dict[Tier, int]  # in memory


class Found(Message, frozen=True):
    """Where a job's activations were; None: it is computed in full."""

    id: str
    attempt: int
    tier: Tier | None


class Missing(Message, frozen=True):
    """The activations a job has to use are not there."""

    id: str
    attempt: int
    template: str


class Kept(Message, frozen=True):
    """What has become of a template, and what the tiers hold altogether."""

    template: str | None
    template_bytes: dict[Tier, int]
    tier_bytes: dict[Tier, int]


class Forgotten(Message, frozen=True):
    template: str


class Listing(Struct, frozen=True):
    """A template that is on disk or further down."""

    template: TemplateHead
    picture: tuple[int, int]  # (height, width)
    num_registered_steps: int
    tier_bytes: dict[Tier, int]


class Listed(Message, frozen=True):
    model: str
    templates: tuple[Listing, ...]


class Recalled(Message, frozen=True):
    """Frames: the picture, if it was found."""

    template: str
    size: tuple[int, int] | None  # (height, width); None: it was not


# from finish


class Painted(Message, frozen=True):
    """Frames: the encoded picture."""

    id: str
    attempt: int
    partial: int | None
    seconds: float  # in which nothing else was decoded
    thread_seconds: float = 0.0  # then, of one of the threads that encode

    @property
    def period(self) -> float:
        """Seconds from one picture to the next, where there are many."""
        return finish_period(self.seconds, self.thread_seconds)


AnyMessage: TypeAlias = (
    Stop | Prepare | PrepareTemplate | Denoise | Fetch | Register | Cancel | Forget | List | Recall | Finish | Ready
    | Broken | Beat | Failed | Prepared | Joined | Stepped | Glimpsed | Denoised | Registered | Found | Missing | Kept
    | Forgotten | Listed | Recalled | Painted | Priced
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(head: Frame) -> AnyMessage:
    message: AnyMessage = _decoder.decode(head)
    return message


def picture_frames(*arrays: Pixels | PixelMask) -> list[Frame]:
    return [np.ascontiguousarray(array).data.cast("B") for array in arrays]


def read_picture(frame: Frame, size: tuple[int, int]) -> Pixels:
    return np.frombuffer(frame, np.uint8).reshape(*size, 3)


def read_mask(frame: Frame, size: tuple[int, int]) -> PixelMask:
    return np.frombuffer(frame, np.bool_).reshape(size)


def split_frames(frames: Sequence[Frame], jobs: Sequence[Denoising]) -> list[Sequence[Frame]]:
    """The frames of each job."""
    parts, start = [], 0
    for ready in jobs:
        end = start + len(ready.job.tensors)
        parts.append(frames[start:end])
        start = end
    return parts
