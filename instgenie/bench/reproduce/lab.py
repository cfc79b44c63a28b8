"""The state shared by the parts of the report: the model, the scale of the measurements, and their results so far."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from instgenie.bench.machine import Machine, describe_machine
from instgenie.bench.reproduce.serving import Run
from instgenie.bench.samples import PROMPT
from instgenie.cost.network import NetworkShape
from instgenie.cost.pricing import JobShape
from instgenie.engine.calibrate import Calibration, calibrate
from instgenie.engine.prepare import prepare
from instgenie.engine.register import register
from instgenie.jobs.activations import Activations
from instgenie.jobs.job import Job
from instgenie.jobs.quality import with_quality
from instgenie.models.model import Model
from instgenie.pictures.samples import MIDDLE, mask_around, sample_picture
from instgenie.types import Edit


@dataclass(frozen=True)
class Scale:
    """The amount of work in every measurement."""

    steps: int  # per edit whose latency is measured
    engine_steps: int  # per batch whose throughput is measured
    mask_ratios: tuple[float, ...]
    batches: tuple[int, ...]
    serve_steps: int  # per edit sent to real clusters
    serve_edits: int  # sent to each cluster, per worker
    num_burst: int  # edits sent at once, to measure the rate a cluster sustains
    load: float  # share of that rate at which clusters are compared
    num_templates: int  # different pictures that are edited
    checked: tuple[int, ...]  # worker counts of the real clusters that the simulator is compared with
    calibration_seconds: float
    edits_per_worker: int  # simulated
    min_edits: int  # simulated
    num_pictures: int  # edited and judged
    compiled: bool  # True if compiled diffusers is among the systems
    serve_seconds: float = 22.0  # time in which edits are sent; a slow machine gets fewer of them
    all_practise: bool = False  # every cluster warms up on other edits first, so that CUDA graphs are captured
    gpu_bytes: int | None = None  # for activations in GPU memory; None: the cluster's default
    repeats: int = 2
    workers: tuple[int, ...] = (8, 64, 1024, 20_000)  # simulated
    loads: tuple[float, ...] = (0.5, 0.8, 0.95)  # simulated, as shares of the workers' capacity


SCALES = {
    "cpu": Scale(
        steps=12,
        engine_steps=3,
        mask_ratios=(0.05, 0.11, 0.2, 0.35, 1.0),
        batches=(1, 2, 4),
        serve_steps=10,
        serve_edits=20,
        num_burst=8,
        load=0.7,
        num_templates=3,
        checked=(1, 2),
        calibration_seconds=10.0,
        edits_per_worker=1,
        min_edits=2000,
        num_pictures=3,
        compiled=False,
    ),
    "cuda": Scale(
        steps=12,
        engine_steps=4,
        mask_ratios=(0.05, 0.11, 0.2, 0.35, 0.6, 1.0),
        batches=(1, 2, 4, 8),
        serve_steps=8,
        serve_edits=80,
        num_burst=16,
        serve_seconds=20.0,
        all_practise=True,
        load=0.8,
        num_templates=2,
        checked=(1,),
        calibration_seconds=20.0,
        edits_per_worker=3,
        min_edits=3000,
        num_pictures=4,
        compiled=True,
        gpu_bytes=60 * 2**30,
    ),
}


@dataclass(eq=False)
class Lab:
    name: str
    model: Model
    scale: Scale
    tell: Callable[[str], None] = field(default=lambda _: None)  # reports what is being done
    runs: dict[str, Run] = field(default_factory=dict)  # of real clusters, by a name for their settings
    adapter_trace: Path | None = None  # requests whose LoRAs are measured, too

    @property
    def device(self) -> str:
        return str(self.model.device)

    @property
    def size(self) -> tuple[int, int]:
        return self.model.own_size, self.model.own_size

    @property
    def num_tokens(self) -> int:
        return (self.model.own_size // self.model.patch) ** 2

    @property
    def machine(self) -> Machine:
        return {"model": self.name} | describe_machine(self.model)

    @cached_property
    def network(self) -> NetworkShape:
        return self.model.describe()

    @cached_property
    def activations(self) -> Activations:
        """The activations of the sample picture."""
        self.tell("registering the sample picture")
        return register(sample_picture(self.size), self.model, self.size, self.scale.steps)

    @cached_property
    def calibration(self) -> Calibration:
        """The latency model of this device with this model, measured while nothing else runs."""
        self.tell("calibrating")
        return calibrate(self.model, self.name, self.size, self.scale.calibration_seconds)

    def edit(self, ratio: float, steps: int | None = None) -> Edit:
        """Make an edit of the sample picture in the default quality."""
        mask = mask_around(MIDDLE, self.size, self.model.patch, ratio)
        steps = steps or self.scale.steps
        edit = Edit(sample_picture(self.size), mask, PROMPT, 0, steps, self.model.guidance, size=self.size)
        return with_quality(edit, "balanced")

    @cached_property
    def job(self) -> Job:
        """A job for the sample picture; it gives the number of tokens and branches."""
        return prepare(self.edit(0.2), self.model)

    @cached_property
    def shape(self) -> JobShape:
        """The shape of jobs like `job`, for pricing."""
        branches = self.job.branches
        return JobShape(self.network, len(branches[0].text), len(branches), self.model.dtype.itemsize)
