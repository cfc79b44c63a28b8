"""Messages from the cluster to its processes."""

from typing import TypeAlias

from msgspec import Struct

from instgenie.cluster.orders import OutputFormat
from instgenie.cluster.wire.heads import JobHead, Message, TemplateHead, TensorHead
from instgenie.cluster.wish import Wish
from instgenie.scheduling.backlog import LoadSums
from instgenie.scheduling.terms import NO_DEADLINE
from instgenie.types import LoraUse

# to any process


class Stop(Message, frozen=True):
    """Write what is worth keeping, then exit."""


class Begin(Message, frozen=True):
    """All processes on the device have loaded: take the memory that is left, and get ready."""

    host_bytes: int  # main memory for activations


class Cancel(Message, frozen=True):
    """Drop a job, or a registration: one that waits at once, one that runs at its next step. `Dropped` answers it."""

    id: str


class Assigned(Message, frozen=True):
    """What a front has given to the worker, told to its denoise process, which passes it on to the other fronts. It is
    also the front's sign of life. Only fronts that share their workers send it."""

    load: LoadSums


# to prepare


class Prepare(Message, frozen=True):
    """Turn an edit into a job. Frames: picture, mask, references, control images."""

    id: str
    attempt: int
    wish: Wish
    size: tuple[int, int]  # (height, width) of the picture
    trace: str = ""  # traceparent; empty: not traced
    request_id: str = ""  # for logs; empty: no request asked for it
    references: tuple[tuple[int, int], ...] = ()  # (height, width) of each


class PrepareTemplate(Message, frozen=True):
    """Turn a template's picture into a job that registers it. Frames: picture."""

    id: str
    attempt: int
    steps: int
    guidance: float
    size: tuple[int, int]  # (height, width) of the picture
    is_urgent: bool = False  # True if an edit is waiting for it: it then waits for its turn like an edit
    request_id: str = ""


# to denoise


class Denoising(Struct, frozen=True):
    """One job of a `Denoise` message."""

    id: str
    attempt: int
    job: JobHead
    template: TemplateHead | None  # use its activations if they are found; None: there are none to use
    must_reuse: bool  # the job may not run without them: an earlier attempt used them, or they are known to exist
    num_partials: int
    may_own: bool = False  # without them, the job reads what its own dense steps leave behind
    fails_dense: bool = False  # if the activations fit nowhere, the job fails instead of computing every token
    trace: str = ""
    request_id: str = ""
    peers: tuple[str, ...] = ()  # addresses of workers that have the template in memory
    key: str = ""  # idempotency key: jobs with the same one are the same job; empty: none
    seconds_left: float = NO_DEADLINE  # until its last step should be taken, when the message is sent
    priority: int = 0  # lower goes first
    tenant: str = ""
    number: int = 0  # older edits have lower numbers, as far as the clocks of fronts agree
    num_overtaken: int = 0  # younger edits of its tenant that were sent before it


class Denoise(Message, frozen=True):
    """Jobs that join the batch together. Frames: the tensors of all jobs, one job after the other."""

    jobs: tuple[Denoising, ...]


class Fetch(Message, frozen=True):
    """Announces a job that will use the template's activations if they are found, so that loading can start now."""

    id: str  # of the job
    template: TemplateHead
    peers: tuple[str, ...] = ()  # addresses of workers that have the template in memory


class FetchLoras(Message, frozen=True):
    """Announces a job that will use these LoRAs, so that loading can start while it is prepared."""

    loras: tuple[LoraUse, ...]


class Register(Message, frozen=True):
    """Compute and store a template's activations. Frames: the tensors of the job, then the picture to keep, if any."""

    id: str  # of the template
    attempt: int
    template: TemplateHead
    job: JobHead
    is_urgent: bool  # True if an edit is waiting for it: it then runs between steps instead of in an idle moment
    picture: tuple[int, int] | None  # (height, width) of the picture to store beside the activations; None: none
    request_id: str = ""
    is_asked_for: bool = False  # by a client; such a template does not expire
    size: tuple[int, int] = (0, 0)  # (height, width) of the picture, for other fronts


class Forget(Message, frozen=True):
    """Delete a template's activations from every tier."""

    template: TemplateHead


class Keep(Message, frozen=True):
    """A client asked for a template that was registered before: it does not expire any more."""

    template: TemplateHead


class CountEdit(Message, frozen=True):
    """Tells that a request edited a picture without a template, and asks whether enough requests did so, whichever
    front they came to. `EditCounted` answers it. Only fronts that share their workers send it."""

    template: str
    request: str


class List(Message, frozen=True):
    """Asks which templates of a model lie in the tiers that outlive a worker."""

    model: str  # digest of the weights


class Recall(Message, frozen=True):
    """Asks for the picture that was stored beside a template's activations."""

    template: TemplateHead


# to finish


class Deposit(Message, frozen=True):
    """Keep a request or an answer for a while, for whichever front collects it. Frames: any."""

    name: str


class Collect(Message, frozen=True):
    """Asks for what was deposited."""

    name: str


class Finish(Message, frozen=True):
    """Decode, composite and encode a picture. Frames: latents, picture, mask. The picture has the pixels of its file,
    if these are not those that the model sees. If a crop was edited, the picture is whole, and the mask the crop's."""

    id: str
    attempt: int
    latents: TensorHead
    grid: tuple[int, int]
    size: tuple[int, int]  # (height, width) of the picture
    feather: int
    output_format: OutputFormat
    output_compression: int
    partial: int | None  # index of a partial picture; None: the final one
    trace: str = ""
    request_id: str = ""
    num_channels: int = 3  # of the picture
    is_own: bool = False  # True if the picture has the pixels of its file
    profile: bytes = b""  # ICC profile of the file
    exif: bytes = b""
    crop: tuple[int, int, int, int] | None = None  # its first row, the row after its last, and its columns alike
    seed: int = 0  # of the edit


Command: TypeAlias = (
    Stop
    | Begin
    | Assigned
    | Prepare
    | PrepareTemplate
    | Denoise
    | Fetch
    | FetchLoras
    | Register
    | Cancel
    | Forget
    | Keep
    | CountEdit
    | List
    | Recall
    | Finish
    | Deposit
    | Collect
)
