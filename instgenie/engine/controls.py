"""ControlNets of the jobs of a step loop, in the same process. On CUDA they run on streams of their own, beside the
network that needs their residuals."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from instgenie.adapters.controlnets import ControlShape, read_config
from instgenie.engine.control_graphs import ControlGraphs
from instgenie.errors import ControlError
from instgenie.jobs.controls import JobControl
from instgenie.jobs.job import Job, control_scales
from instgenie.machine.device_memory import is_out_of_memory
from instgenie.models.controlnet import (
    Asked,
    ControlledJob,
    ControlNet,
    ControlStep,
    Run,
    add_up,
    compute_parts,
    run_uncaptured,
)
from instgenie.models.families import CONTROLNETS
from instgenie.models.model import Model
from instgenie.types import ControlUse

log = logging.getLogger(__name__)

HIGH = -1  # priority of a stream
DEFAULT_BYTES = 16 * 2**30  # of ControlNets in memory


class StepControls(Protocol):
    """Gives jobs the residuals of their ControlNets."""

    def open(self, job: Job) -> None:
        """Begin to bring the ControlNets of a job near."""
        ...

    def is_open(self, job: Job) -> bool:
        """Return whether the ControlNets of a job are there. Raises a ControlError if one cannot be loaded."""
        ...

    def begin(self, jobs: Sequence[Job]) -> None:
        """Begin to compute the residuals of the jobs' present step, and give each job a promise of its own. Waits for
        nothing if the jobs are open."""
        ...

    def close(self, job: Job) -> None:
        """Let go of what is kept for a job that has ended."""
        ...


class ControlShelf:
    """ControlNets in memory, up to a number of bytes; the least recently used goes first. One that a job still uses
    stays until the job has ended. Threads may share a shelf."""

    def __init__(self, device: torch.device, dtype: torch.dtype, max_bytes: int = DEFAULT_BYTES) -> None:
        self.device, self.dtype, self.max_bytes = device, dtype, max_bytes
        self.num_loads = 0
        self._loads: list[tuple[int, float]] = []  # bytes and seconds
        self._kept: OrderedDict[str, ControlNet] = OrderedDict()  # by version
        self._alive: WeakValueDictionary[str, ControlNet] = WeakValueDictionary()  # these, and those that jobs use
        self._lock = Lock()

    def take(self, use: ControlUse) -> ControlNet:
        """The ControlNet of a use, loaded if need be. Raises a ControlError if it cannot be."""
        with self._lock:
            net = self._alive.get(use.version) or self._load(use)
            self._alive[use.version] = self._kept[use.version] = net
            self._kept.move_to_end(use.version)
            while len(self._kept) > 1 and sum(one.num_bytes for one in self._kept.values()) > self.max_bytes:
                self._kept.popitem(last=False)
        return net

    @property
    def num_bytes(self) -> int:
        return sum(net.num_bytes for net in self._alive.values())

    @property
    def versions(self) -> tuple[str, ...]:
        return tuple(self._kept)

    @property
    def has_loaded(self) -> bool:
        """True if there were loads that nobody has taken note of."""
        return bool(self._loads)

    def take_loads(self) -> tuple[tuple[int, float], ...]:
        """Bytes and seconds of the loads since the last call."""
        loads, self._loads = self._loads, []
        return tuple(loads)

    def _load(self, use: ControlUse) -> ControlNet:
        self.num_loads += 1
        started = time.monotonic()
        try:
            kind = read_config(use.name, Path(use.path))["_class_name"]
            net = CONTROLNETS[kind](Path(use.path), self.device, self.dtype)
            self._loads.append((use.num_bytes or net.num_bytes, time.monotonic() - started))
            return net
        except (ControlError, OSError, ValueError, RuntimeError) as error:
            log.error("ControlNet not loaded", extra={"controlnet": use.name, "reason": str(error)})
            why = "it does not fit into memory" if is_out_of_memory(error) else "its folder is damaged or incomplete"
            raise ControlError(f"the ControlNet {use.name!r} cannot be loaded: {why}") from error


@dataclass(eq=False)
class LocalPromise:
    """Residuals that are computed in this process. On CUDA the stream that needs them waits, the host does not."""

    parts: list[Tensor] = field(default_factory=list)
    done: "torch.cuda.Event | None" = None
    asked: Asked | None = None  # kept from reuse of their memory until then

    def result(self) -> Sequence[Tensor]:
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)
        self.asked = None
        return self.parts


class LocalControls:
    """Jobs are known by their images, which stay the same when a job is copied."""

    def __init__(
        self,
        model: Model,
        shelf: ControlShelf | None = None,
        wake: Callable[[], None] = lambda: None,
        graphs: ControlGraphs | None = None,
    ) -> None:
        """`wake` is called when the ControlNets of a job have come. Without graphs passes run launch by launch."""
        self.model, self.wake = model, wake
        self.run: Run = graphs.run if graphs else run_uncaptured
        self.shelf = shelf or ControlShelf(model.device, model.dtype)
        self._open: WeakKeyDictionary[JobControl, Future[ControlledJob]] = WeakKeyDictionary()
        self._loader: ThreadPoolExecutor | None = None

    @cached_property
    def streams(self) -> "Streams | None":
        return Streams(self.model.device) if self.model.device.type == "cuda" else None

    def open(self, job: Job) -> None:
        if job.controls and job.controls[0] not in self._open:
            self._loader = self._loader or ThreadPoolExecutor(1, "controlnet")
            loading = self._open[job.controls[0]] = self._loader.submit(self._load, job)
            loading.add_done_callback(lambda _: self.wake())

    def is_open(self, job: Job) -> bool:
        loading = self._open[job.controls[0]]
        return loading.done() and loading.result() is not None

    def close(self, job: Job) -> None:
        if job.controls:
            self._open.pop(job.controls[0], None)

    @torch.inference_mode()
    def _load(self, job: Job) -> ControlledJob:
        """What ControlNets read of a job at every step."""
        return open_job(job, [self.shelf.take(control.use) for control in job.controls])

    @torch.inference_mode()
    def begin(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            job.residuals = None
        guided = [job for job in jobs if any(control_scales(job))]
        if not guided:
            return
        asked = [(self._opened(job), step_of(job, self.model)) for job in guided]
        if self.streams:
            self.begin_beside(guided, asked, self.streams)
            return
        for job, parts, (_, step) in zip(guided, compute_parts(asked, self.run), asked, strict=True):
            job.residuals = LocalPromise(add_up(parts, step.rows))

    def begin_beside(self, guided: Sequence[Job], asked: Sequence[Asked], streams: "Streams") -> None:
        """Each ControlNet has a stream, on which its passes and its graphs run; another one adds up what they computed.
        All of them start after what the stream of the steps has to do so far, so what they free is not used before that
        stream is done with it: with residuals, until it has added those of the last step."""
        parts = compute_parts(asked, self.run, streams.beside)
        with streams.adding_up():
            sums = [add_up(own, step.rows) for own, (_, step) in zip(parts, asked, strict=True)]
            done = torch.cuda.Event()
            done.record()
        for job, own, one in zip(guided, sums, asked, strict=True):
            job.residuals = LocalPromise(own, done, one)

    def _opened(self, job: Job) -> ControlledJob:
        """Waits for the ControlNets of a job that nobody has opened."""
        self.open(job)
        return self._open[job.controls[0]].result()


class Streams:
    """The streams of ControlNets beside the current one. torch hands out streams of one priority in turn, and the same
    ones again after some dozens; nothing else here has a high priority, so that no ControlNet shares a stream, and the
    memory that libraries keep for it, with a copy or with the capture of a graph that runs beside it. Residuals are the
    longest way to the end of a step, so ControlNets may go first."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sums = torch.cuda.Stream(device, priority=HIGH)
        self._of: WeakKeyDictionary[ControlNet, torch.cuda.Stream] = WeakKeyDictionary()
        self._running: list[torch.cuda.Stream] = []

    @contextmanager
    def beside(self, net: ControlNet) -> Iterator[None]:
        if net not in self._of:
            self._of[net] = torch.cuda.Stream(self.device, priority=HIGH)
        stream = self._of[net]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        stream.wait_stream(self._sums)  # which may still read what this stream left at the last step
        self._running.append(stream)
        with torch.cuda.stream(stream):
            yield

    @contextmanager
    def adding_up(self) -> Iterator[None]:
        self._sums.wait_stream(torch.cuda.current_stream(self.device))
        for stream in self._running:
            self._sums.wait_stream(stream)
        self._running.clear()
        with torch.cuda.stream(self._sums):
            yield


def open_job(job: Job, nets: Sequence[ControlNet]) -> ControlledJob:
    hints = [net.embed(control.hint) for net, control in zip(nets, job.controls, strict=True)]
    pooled = tuple(branch.pooled for branch in job.branches)
    modes = tuple(control.use.mode for control in job.controls)
    return ControlledJob(tuple(nets), tuple(hints), modes, size_of(job, job.controls[0]), texts_of(job), pooled)


def texts_of(job: Job) -> tuple[Tensor, ...]:
    """Per branch, the text as ControlNets read it."""
    return tuple(branch.text if branch.words is None else branch.words for branch in job.branches)


def size_of(job: Job, control: JobControl) -> tuple[int, int]:
    """(height, width) in pixels; of an image that is encoded in tokens, since only their ratio matters there."""
    if control.hint.ndim == 3:
        return int(control.hint.shape[1]), int(control.hint.shape[2])
    return job.grid


def step_of(job: Job, model: Model) -> ControlStep:
    told = float(job.edit.guidance), control_scales(job)
    return ControlStep(model.guided.sample(job), job.timestep, *told, model.guided.rows(job))


def control_shape(model: Model) -> ControlShape:
    """What ControlNets must have in common with a model."""
    return model.guided.shape(model.network.config, model.latent_channels)
