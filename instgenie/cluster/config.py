"""Configuration of a cluster. It is frozen; values left open are resolved once, into a new object."""

import math
from dataclasses import dataclass, field
from typing import Literal

from instgenie.scheduling.names import DEFAULT_SCHEDULING, ONE_PROCESS, Batching, RoutingPolicy, Scheduling
from instgenie.types import CacheDtype, Convolutions, PlanPolicy, Quantization, TextPadding, WeightsDtype

Role = Literal["prepare", "denoise", "finish", "controlnet", "guidance"]

NUM_ENCODERS = 4  # threads of a finish process that encode pictures while the next one is decoded
UNTOLD_HOST_BYTES = 16 * 2**30  # default of `host_bytes` where the amount of available memory is unknown


@dataclass(frozen=True)
class CacheConfig:
    """The tiers that keep activations, and their sizes. Each worker has its own memory; disk and remote are shared."""

    own_bytes: int | None = None  # for what running edits keep for themselves; None: a part of the device's free memory
    gpu_bytes: int | None = None  # None: half of the memory left beside the model; 0 without a CUDA device
    host_bytes: int | None = None  # None: half of the memory that a worker may use on its node
    disk: str | None = None  # folder; None: no disk tier
    disk_bytes: int = 100 * 2**30
    remote: str | None = None  # any fsspec URL; None: no remote tier
    remote_bytes: int = 1000 * 2**30
    peer_bytes_per_second: float = 1e9  # that a worker sends to others which lack a template
    dtype: CacheDtype = "model"
    stride: int = 1  # every so many steps of a template are kept; 0: a quarter of its steps
    text_padding: TextPadding = "computed"
    seconds_to_live: float | None = None  # of unused templates that no client asked for; None: no limit

    @property
    def keeps_text(self) -> bool:
        """True if the rows of texts are kept."""
        return self.text_padding == "reused"

    @property
    def is_lasting(self) -> bool:
        """True if a tier outlives the workers."""
        return self.disk is not None or self.remote is not None


@dataclass(frozen=True)
class ResolvedCache(CacheConfig):
    """A cache configuration with a number of bytes for main memory. A worker sizes its GPU tier once the model is
    loaded."""

    host_bytes: int = field(kw_only=True)
    is_host_open: bool = False  # True: host_bytes may be less, if less memory is left once the model is loaded
    is_host_guessed: bool = False  # True: the nodes' memory was unknown, and a node that tells its memory decides


@dataclass(frozen=True)
class LoraConfig:
    """The LoRAs that edits may name, and the memory for them on each worker."""

    modules: tuple[tuple[str, str], ...] = ()  # names and paths
    folder: str | None = None  # whose files edits may name; None: none
    remote: str | None = None  # any fsspec URL whose files edits may name; None: none
    disk_folder: str = ""  # for copies of remote files
    disk_bytes: int = 20 * 2**30
    gpu_bytes: int = 2 * 2**30
    host_bytes: int = 4 * 2**30
    wait_share: float = 0.3  # of an edit's steps that it takes without its LoRAs while they load; then it waits
    merges: bool = True  # merge LoRAs into the weights while a whole batch shares them
    weights_bytes: int = 0  # for weights with LoRAs merged into them, beside the model's own; 0: none are kept
    wait_steps: int | None = None  # the same as a number of steps, which counts if it is given

    @property
    def is_on(self) -> bool:
        return bool(self.modules or self.folder or self.remote)

    def num_free_steps(self, num_steps: int) -> int:
        """Steps that an edit may take before its LoRAs are there: never all of them."""
        free = math.floor(self.wait_share * num_steps) if self.wait_steps is None else self.wait_steps
        return min(free, num_steps - 1)


@dataclass(frozen=True)
class ControlConfig:
    """The ControlNets that edits may name, and where they run."""

    modules: tuple[tuple[str, str], ...] = ()  # names and paths
    devices: tuple[str, ...] = ()  # one process each, which all workers share; none: workers run them themselves
    max_bytes: int = 16 * 2**30  # of ControlNets in memory, in each process that runs them


@dataclass(frozen=True)
class ClusterConfig:
    model: str = "builtin"
    devices: tuple[str, ...] = ("auto",)  # one worker each
    dtype: str = "auto"
    quantization: Quantization | None = None  # of the network's products
    weights_dtype: WeightsDtype | None = None  # of large weights; None: the dtype
    convolutions: Convolutions = "dense"  # of a UNet
    reuse_changed: float = 0.0  # probability of a wrong guess from which a step is computed; 0: every step is
    max_batch_size: int = 8  # jobs that take a step together on one worker
    max_queue: int = 64  # edits that may wait; further ones are refused
    max_queue_per_tenant: int | None = None  # of these, edits of one tenant; None: as many
    max_templates: int = 1000  # that one tenant may ask for
    picture_bytes: int = 2**30  # for pictures of templates that no client asked for, in the cluster's own memory
    cache: CacheConfig = CacheConfig()
    policy: RoutingPolicy = "mask_aware"  # of the router
    batching: Batching = "continuous"
    scheduling: Scheduling = DEFAULT_SCHEDULING  # who goes first, with continuous batching
    weights: tuple[tuple[str, float], ...] = ()  # of the tenants' shares, where they are not 1
    graphs: bool = True  # capture passes as CUDA graphs, on devices that have them
    plan: PlanPolicy = "cached"  # for edits that reuse activations; with any other, pictures depend on the load
    reuse: bool = True  # register templates; False: every edit computes every token
    auto_register: bool = True  # register pictures that come back; False: only templates that clients ask for
    register_after: int = 2  # edits of a picture within the window, after which it is registered
    register_window: float = 3600.0  # seconds
    worker_timeout: float = 120.0  # seconds of silence after which a process counts as hung
    start_timeout: float = 1800.0  # the same while it loads the model
    hold_bytes: int = 64 * 2**20  # per worker, for the latents of edits with an idempotency key, after their last step
    hold_seconds: float = 600.0  # after which such latents are dropped
    loras: LoraConfig = LoraConfig()
    controls: ControlConfig = ControlConfig()
    guidance_devices: tuple[str, ...] = ()  # per worker, that of its companion, which computes second branches; or none

    @property
    def roles(self) -> tuple[Role, ...]:
        """The processes of a worker."""
        return ("denoise",) if self.batching in ONE_PROCESS else ("prepare", "denoise", "finish")


@dataclass(frozen=True)
class ResolvedConfig(ClusterConfig):
    """The configuration that a cluster runs with."""

    cache: ResolvedCache = field(kw_only=True)


@dataclass(frozen=True)
class ProcessConfig:
    """Configuration of one start of one process; it travels as JSON on the command line."""

    name: str  # unique to this start of the process
    endpoint: str  # address of the cluster
    model: str
    device: str
    dtype: str
    max_batch_size: int
    batching: Batching
    cache: ResolvedCache
    quantization: Quantization | None = None
    weights_dtype: WeightsDtype | None = None
    convolutions: Convolutions = "dense"
    reuse_changed: float = 0.0
    plan: PlanPolicy = "cached"
    graphs: bool = True
    scheduling: Scheduling = DEFAULT_SCHEDULING
    weights: tuple[tuple[str, float], ...] = ()
    num_workers: int = 1  # of the cluster
    num_sharing: int = 1  # workers on the same device, this one among them
    peer_address: str = ""  # ZeroMQ address, maybe with a wildcard port, to serve templates to peers; empty: none
    hold_bytes: int = 0  # for latents of jobs with an idempotency key
    hold_seconds: float = 0.0
    register_after: int = 2  # edits of a picture, at all fronts, after which it is registered
    register_window: float = 3600.0  # seconds
    front_timeout: float = math.inf  # seconds of silence after which a front counts as gone
    parent: int | None = None  # pid of the parent that the process does not outlive; None: no parent is checked
    front: str = ""  # id of the front at the endpoint, where a process may serve several
    loras: LoraConfig = LoraConfig()
    controls: ControlConfig = ControlConfig()
    control_addresses: tuple[str, ...] = ()  # of the processes of ControlNets
    control_places: tuple[str, ...] = ()  # the device of each, as the cluster names it; empty: that of this process
    control_address: str = ""  # that this process binds, if it is one of these
    guidance_address: str = ""  # of the worker's companion, which binds it; empty: there is none
    has_control: bool = False  # True: orders of the starter arrive on standard input (`cluster/control.py`)


def resolve(config: ClusterConfig, worker_bytes: float) -> ResolvedConfig:
    """Fill in what was left open. A worker may use `worker_bytes` of main memory on its node; infinity: unknown."""
    host_bytes = config.cache.host_bytes
    if host_bytes is None:
        host_bytes = int(worker_bytes / 2) if math.isfinite(worker_bytes) else UNTOLD_HOST_BYTES
    is_open = config.cache.host_bytes is None
    is_guessed = is_open and math.isinf(worker_bytes)
    told = {"host_bytes": host_bytes, "is_host_open": is_open, "is_host_guessed": is_guessed}
    cache = ResolvedCache(**vars(config.cache) | told)
    return ResolvedConfig(**vars(config) | {"cache": cache})


def process_config(
    config: ResolvedConfig,
    name: str,
    device: str,
    endpoint: str,
    num_sharing: int | None = None,
    service: int | None = None,
    worker: int | None = None,
) -> ProcessConfig:
    """The configuration of a start of a process. `num_sharing` workers are on its device; None: all on a device of its
    name. `service` is the number of a process of ControlNets, `worker` that of the worker that another belongs to."""
    addresses = tuple(f"{endpoint}-controls-{number}" for number in range(len(config.controls.devices)))
    return ProcessConfig(
        name=name,
        endpoint=endpoint,
        model=config.model,
        device=device,
        dtype=config.dtype,
        max_batch_size=config.max_batch_size,
        batching=config.batching,
        cache=config.cache,
        quantization=config.quantization,
        weights_dtype=config.weights_dtype,
        convolutions=config.convolutions,
        reuse_changed=config.reuse_changed,
        plan=config.plan,
        graphs=config.graphs,
        scheduling=config.scheduling,
        weights=config.weights,
        num_workers=len(config.devices),
        num_sharing=config.devices.count(device) if num_sharing is None else num_sharing,
        hold_bytes=config.hold_bytes,
        hold_seconds=config.hold_seconds,
        register_after=config.register_after,
        register_window=config.register_window,
        front_timeout=config.worker_timeout,
        loras=config.loras,
        controls=config.controls,
        control_addresses=addresses,
        control_places=tuple("" if place == device else place for place in config.controls.devices),
        control_address="" if service is None else addresses[service],
        guidance_address="" if worker is None or not config.guidance_devices else f"{endpoint}-guidance-{worker}",
    )


def finish_period(seconds: float, thread_seconds: float) -> float:
    """Seconds per picture when many are finished in a row: one at a time is decoded, several threads encode."""
    return max(seconds, thread_seconds / NUM_ENCODERS)
