"""Messages from the processes to the cluster. Each answer carries the id and the attempt of the work it answers."""

from typing import TypeAlias

from msgspec import Struct

from instgenie.adapters.controlnets import ControlShape
from instgenie.adapters.layers import LayerTable
from instgenie.cluster.config import finish_period
from instgenie.cluster.orders import FailureKind, GuidanceFacts, LoraFacts
from instgenie.cluster.wire.heads import JobHead, Message, ModelFacts, TemplateHead, TensorHead
from instgenie.cost.table import StepCosts
from instgenie.scheduling.backlog import LoadSums
from instgenie.types import ReuseFound, TierName

# from any process


class Loading(Message, frozen=True):
    """The process brings weights to its device."""

    done_bytes: int  # so far
    total_bytes: int


class Loaded(Message, frozen=True):
    """The process has loaded its parts of the model and has run them once. It takes no further memory until `Begin`."""


class Ready(Message, frozen=True):
    """The process takes work."""

    facts: ModelFacts
    digest: str  # of the weights this process has loaded
    peer_address: str = ""  # at which a denoise process serves templates to its peers; empty: it serves none
    layers: LayerTable | None = None  # that LoRAs may patch; told by the denoise process
    controls: ControlShape | None = None  # of ControlNets that fit; told by the denoise process


class Serving(Message, frozen=True):
    """A process of ControlNets takes questions."""


class ControlNetsKept(Message, frozen=True):
    """The ControlNets that a process has in memory."""

    versions: tuple[str, ...]
    num_bytes: int
    num_loads: int  # since it started
    loads: tuple[tuple[int, float], ...] = ()  # bytes and seconds of those since the last message


class Broken(Message, frozen=True):
    """The process cannot start, and starting it again will not help."""

    message: str


class Beat(Message, frozen=True):
    """Sign of life: the loop of the process is turning."""


class Foreign(Message, frozen=True):
    """What other fronts have given to the worker; also a sign of life. Sent by denoise processes that fronts share."""

    load: LoadSums
    num_fronts: int  # that the process serves, the receiver among them


class JobFailed(Message, frozen=True):
    id: str
    attempt: int
    kind: FailureKind
    message: str
    param: str | None = None


class Dropped(Message, frozen=True):
    """Answer to `Cancel`: the process no longer works on the job, or never began."""

    id: str


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
    """The predicted cost of steps on this worker."""

    costs: StepCosts


class JobStep(Struct, frozen=True):
    id: str
    attempt: int
    step: int  # steps taken so far


class Joined(Message, frozen=True):
    """Jobs joined the running batch."""

    jobs: tuple[JobStep, ...]
    plans: tuple[tuple[bool, ...], ...]  # one per job


class Preempted(Message, frozen=True):
    """Jobs left the batch between two steps and wait again; they go on where they were."""

    jobs: tuple[JobStep, ...]
    by: str  # id of the job that joins instead


class BatchStepped(Message, frozen=True):
    """A batch took one step."""

    seconds: float
    predicted_seconds: float  # by the costs in `Priced`
    num_interruptions: int  # of the step loop, since the process started
    jobs: tuple[JobStep, ...]
    num_others: int = 0  # jobs of other fronts in the batch
    num_joined: int = 0  # jobs that have joined a batch, of all fronts, since the process started
    between_seconds: float = 0.0  # from the last step to this one, if jobs were running all the time


class Glimpsed(Message, frozen=True):
    """Latents for a partial picture. Frames: latents that predict the job's result."""

    id: str
    attempt: int
    index: int
    latents: TensorHead


class Denoised(Message, frozen=True):
    """A job has taken all its steps. Frames: latents."""

    id: str
    attempt: int
    latents: TensorHead
    num_computed_tokens: int
    seconds: float
    reuse: ReuseFound = "none"  # whose activations it has read
    loras: LoraFacts | None = None  # None: it has none
    num_control_retries: int = 0  # steps that were repeated because a process of ControlNets had died
    guidance: GuidanceFacts | None = None  # None: all of its branches were computed by its worker


class Registered(Message, frozen=True):
    """Progress of a registration."""

    id: str
    attempt: int
    num_registered_steps: int
    num_steps: int
    tier_bytes: dict[TierName, int]  # in memory


class TierFound(Message, frozen=True):
    """The tier in which a job's activations were found; None: the job does without a template."""

    id: str
    attempt: int
    tier: TierName | None
    why_none: str = ""  # a clause for the client


class Missing(Message, frozen=True):
    """The activations that a job has to use are not there; the job was not run."""

    id: str
    attempt: int
    template: str


class Kept(Message, frozen=True):
    """Bytes that the tiers hold of one template, and altogether."""

    template: str | None
    template_bytes: dict[TierName, int]
    tier_bytes: dict[TierName, int]


class LorasKept(Message, frozen=True):
    """The LoRAs that a worker has in memory, and what it took to load the last ones."""

    versions: tuple[str, ...]  # near its steps
    num_bytes: dict[str, int]  # by tier
    loads: tuple[tuple[str, int, float], ...] = ()  # the tier, the bytes and the seconds of each load since last told


class Fetched(Message, frozen=True):
    """A template was brought into memory from a tier below it, or from a peer."""

    tier: TierName
    num_bytes: int
    seconds: float


class Forgotten(Message, frozen=True):
    """A template's activations are deleted, except from the tiers that could not be asked."""

    template: str
    left: tuple[TierName, ...] = ()


class Listing(Struct, frozen=True):
    """A template that a worker finds in its tiers."""

    template: TemplateHead
    picture: tuple[int, int]  # (height, width)
    num_registered_steps: int
    tier_bytes: dict[TierName, int]
    is_asked_for: bool = False  # by a client of any front; not known of templates in lasting tiers


class Announced(Message, frozen=True):
    """Templates that other fronts had registered on this worker; `Kept` tells where they are."""

    templates: tuple[Listing, ...]


class EditCounted(Message, frozen=True):
    """Answer to `CountEdit`."""

    template: str
    has_come_back: bool  # True if the picture is worth a registration


class Listed(Message, frozen=True):
    """Answer to `List`."""

    model: str
    templates: tuple[Listing, ...]
    forgotten: tuple[TemplateHead, ...] = ()  # templates that are still to be deleted from tiers


class Recalled(Message, frozen=True):
    """Answer to `Recall`. Frames: the picture, if it was found."""

    template: str
    size: tuple[int, int] | None  # (height, width); None: not found


# from finish


class Collected(Message, frozen=True):
    """Answer to `Collect`. Frames: what was deposited, if it is still there."""

    name: str
    is_found: bool


class Painted(Message, frozen=True):
    """Frames: the encoded picture."""

    id: str
    attempt: int
    partial: int | None
    seconds: float  # of decoding, during which no other picture is decoded
    thread_seconds: float = 0.0  # of encoding in a thread, while the next picture is decoded

    @property
    def period(self) -> float:
        """Seconds from one picture to the next when many are finished in a row."""
        return finish_period(self.seconds, self.thread_seconds)


Report: TypeAlias = (
    Loading | Loaded | Ready | Broken | Beat | Foreign | JobFailed | Dropped | Prepared | Priced | Joined | Preempted
    | LorasKept | Serving | ControlNetsKept
    | BatchStepped | Glimpsed | Denoised | Registered | TierFound | Missing | Kept | Fetched | Forgotten | Announced
    | EditCounted | Listed | Recalled | Painted | Collected
)  # fmt: skip
