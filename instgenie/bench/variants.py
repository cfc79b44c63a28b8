"""The methods that the quality study compares, run over one set of samples. Knows jobs and costs; judges nothing.

All samples of a run have the same size and are denoised together, so that only the methods differ.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from instgenie.bench.baselines import StepSkipping, crop, drop_unmasked, find_threshold, put_back, side_of_cost
from instgenie.bench.cost import job_flops
from instgenie.engine.finish import decode
from instgenie.engine.graphs import Graphs
from instgenie.engine.loop import Engine
from instgenie.engine.own import OwnActivations, reuse_own
from instgenie.engine.prepare import prepare
from instgenie.engine.register import register, reuse
from instgenie.jobs.activations import Activations, CacheDtype, Kind
from instgenie.jobs.job import Job
from instgenie.jobs.quality import SETTINGS, Quality
from instgenie.machine.clock import now
from instgenie.models.flux.model import FluxModel
from instgenie.pictures.compositing import composite
from instgenie.types import Edit, Pixels

DENSE, NAIVE, SKIPPING, SMALL_CROP = "dense", "naive", "step skipping", "crop, equal cost"
MARGINS = (32, 128)  # in a picture of 256 pixels: the defaults of A1111 and IOPaint
NUM_STEPS_AT_ONCE = {"cpu": 4, "cuda": 28}
NUM_TUNING = 8  # jobs to find the threshold of step skipping with


@dataclass(frozen=True)
class Reuse:
    """A way to reuse activations: a template's, or those of the edit's own dense steps."""

    kind: Kind = "kv"
    cache_dtype: CacheDtype = "model"
    caption: bool = False  # registered with the picture's caption instead of the empty prompt
    isolated: bool = False  # registered without text
    dense_steps: int = 0
    halo: int = 0
    dense_blocks: int = 0
    own_steps: tuple[int, ...] = ()  # no template: dense steps whose activations the other steps read
    max_change: float = 0.0  # no template: further dense steps are found on the way
    stride: int = 1  # every so many steps are registered
    reads_padding: bool = False  # of the text, from the activations

    @property
    def name(self) -> str:
        if self.own_steps:
            found = f", change {self.max_change:g}" if self.max_change else ""
            padding = ", padding read" if self.reads_padding else ""
            return f"own, {' '.join(map(str, self.own_steps))}{found}{padding}"
        parts = {
            self.cache_dtype: self.cache_dtype != "model",
            f"every {self.stride} steps": self.stride > 1,
            "padding read": self.reads_padding,
            "caption": self.caption,
            "isolated": self.isolated,
            count(self.dense_steps, "dense step"): self.dense_steps,
            count(self.dense_blocks, "dense block"): self.dense_blocks,
            f"halo {self.halo}": self.halo,
        }
        return ", ".join([self.kind, *(part for part, on in parts.items() if on)])

    @property
    def registration(self) -> tuple[Kind, CacheDtype, bool, bool, int, bool]:
        return self.kind, self.cache_dtype, self.caption, self.isolated, self.stride, self.reads_padding


def count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def of_quality(
    quality: Quality, steps: int, kind: Kind = "kv", cache_dtype: CacheDtype = "model", stride: int = 1
) -> Reuse:
    setting = SETTINGS[quality]
    return Reuse(kind, cache_dtype, dense_steps=setting.dense_steps(steps), halo=setting.halo, stride=stride)


@dataclass(frozen=True, eq=False)
class Sample:
    """An edit of the study and its labels."""

    edit: Edit
    caption: str  # of the original picture
    label: str
    mask_kind: str
    ratio: float  # requested share of masked tokens


@dataclass(frozen=True, eq=False)
class Outcome:
    """The pictures that one method made of the samples, and their costs."""

    name: str
    pictures: list[Pixels]
    costs: list[float]  # operations, as a share of the dense edit's
    seconds: float  # for all steps of all samples
    num_bytes: list[int] | None = None  # of the activations of each template; None if there are none


@dataclass(frozen=True, eq=False)
class Runner:
    model: FluxModel
    samples: Sequence[Sample]
    graphs: Graphs | None = None

    def run(
        self, reuses: Sequence[Reuse], balanced: Reuse, crops: bool = True, others: bool = True
    ) -> Iterator[Outcome]:
        """Run dense, naive and each way of reuse, then the other methods at the cost of the balanced one; without
        `others`, dense and the ways of reuse alone."""
        jobs = [prepare(sample.edit, self.model) for sample in self.samples]
        dense_flops = [job_flops(self.model, job) for job in jobs]

        def share(jobs: Sequence[Job]) -> list[float]:
            return [job_flops(self.model, j) / d for j, d in zip(jobs, dense_flops, strict=True)]

        def outcome(
            name: str,
            jobs: Sequence[Job],
            end: Callable[[Job, int], Job] = lambda job, _: job,
            keeps_text: bool = False,
        ) -> Outcome:
            own = [replace(job) for job in jobs]
            seconds = self.denoise(own, keeps_text)
            costs = share(own)  # as they were run: some find their dense steps on the way
            kept = [job.activations.num_bytes for job in jobs if job.activations]
            pictures = self.finish([end(job, i) for i, job in enumerate(own)])
            return Outcome(name, pictures, costs, seconds, kept or None)

        yield outcome(DENSE, jobs)
        if others:
            yield outcome(NAIVE, [drop_unmasked(job) for job in jobs], lambda job, i: put_back(job, jobs[i]))
        target = 1.0
        for how, made in self.reused(jobs, reuses):
            if how == balanced:
                shares = share(made)
                target = sum(shares) / len(shares)
            yield outcome(how.name, made, keeps_text=how.reads_padding)
        if not others:
            return
        yield self.skip(jobs, target)
        num_text = len(jobs[0].branches[0].text)
        sides = {f"crop, margin {margin}": (margin, self.model.own_size) for margin in MARGINS if crops}
        sides[SMALL_CROP] = MARGINS[0], side_of_cost(self.model, num_text, target)
        for name, (margin, side) in sides.items():
            yield self.cropped(name, margin, side, dense_flops)

    def reused(self, jobs: Sequence[Job], reuses: Iterable[Reuse]) -> Iterator[tuple[Reuse, list[Job]]]:
        """Yield the jobs of each way of reuse; only one registration per picture is in memory at a time."""
        for how in [how for how in reuses if how.own_steps]:
            yield how, [make_own(job, how) for job in jobs]
        registered = sorted((how for how in reuses if not how.own_steps), key=lambda how: how.registration)
        for registration, same in groupby(registered, lambda how: how.registration):
            activations = [self.register(sample, *registration) for sample in self.samples]
            for how in same:
                yield how, [make_cached(job, cache, how) for job, cache in zip(jobs, activations, strict=True)]

    def register(
        self,
        sample: Sample,
        kind: Kind,
        cache_dtype: CacheDtype,
        caption: bool,
        isolated: bool,
        stride: int,
        keeps_text: bool,
    ) -> Activations:
        edit = sample.edit
        at_once = NUM_STEPS_AT_ONCE[self.model.device.type]
        prompt = sample.caption if caption else ""
        options = edit.size, edit.steps, edit.guidance, kind, at_once, prompt, isolated, cache_dtype
        return register(edit.picture, self.model, *options, stride=stride, keeps_text=keeps_text)

    def skip(self, jobs: Sequence[Job], target: float) -> Outcome:
        """Skip steps down to the target's cost; a dense run of a few jobs gives the threshold."""
        network = self.model.joint_network
        tuning = StepSkipping(network, 0.0).run([replace(job) for job in jobs[:NUM_TUNING]])
        threshold = find_threshold([track.changes for track in tuning], target * jobs[0].num_steps)
        own = [replace(job) for job in jobs]
        start = now(self.model.device)
        tracks = StepSkipping(network, threshold).run(own)
        seconds = now(self.model.device) - start
        costs = [track.num_computed / job.num_steps for track, job in zip(tracks, own, strict=True)]
        return Outcome(SKIPPING, self.finish(own), costs, seconds)

    def cropped(self, name: str, margin: int, side: int, dense_flops: Sequence[float]) -> Outcome:
        crops = [crop(sample.edit, margin, side, self.model) for sample in self.samples]
        jobs = [prepare(part.edit, self.model) for part in crops]
        costs = [job_flops(self.model, job) / d for job, d in zip(jobs, dense_flops, strict=True)]
        seconds = self.denoise(jobs)
        return Outcome(name, [part.stitch(p) for part, p in zip(crops, self.finish(jobs), strict=True)], costs, seconds)

    def denoise(self, jobs: Sequence[Job], keeps_text: bool = False) -> float:
        own = OwnActivations(self.model, keeps_text=keeps_text)
        engine = Engine(self.model, max_jobs=len(jobs), graphs=self.graphs, own=own)
        start = now(self.model.device)
        for job in jobs:
            engine.join(job)
        while engine.jobs:
            engine.step()
        return now(self.model.device) - start

    def finish(self, jobs: Sequence[Job]) -> list[Pixels]:
        """Decode the jobs, those of one grid together, and return pictures in the order of the jobs. Tones at the edge
        of a mask are not matched: that would hide what a way of reuse does there."""
        pictures: dict[Job, Pixels] = {}
        for grid in dict.fromkeys(job.grid for job in jobs):
            same = [job for job in jobs if job.grid == grid]
            decoded = decode([job.latents for job in same], [job.edit.mask for job in same], grid, self.model)
            for job, made in zip(same, decoded, strict=True):
                pictures[job] = composite(job.edit.picture, made, job.edit.mask, job.edit.feather)
        return [pictures[job] for job in jobs]


def make_own(job: Job, how: Reuse) -> Job:
    edit = replace(job.edit, dense_steps=0, halo=how.halo, own_steps=how.own_steps, max_change=how.max_change)
    return reuse_own(replace(job, edit=edit))


def own_of_quality(quality: Quality, steps: int) -> Reuse:
    setting = SETTINGS[quality]
    leading = range(setting.dense_steps(steps))
    found = tuple(sorted({*leading, *setting.own_steps(steps)}))
    return Reuse(own_steps=found, halo=setting.halo, max_change=setting.max_change)


def make_cached(job: Job, activations: Activations, how: Reuse) -> Job:
    edit = replace(job.edit, dense_steps=how.dense_steps, halo=how.halo)
    num_blocks = activations.num_blocks
    plan = (False,) * how.dense_blocks + (True,) * (num_blocks - how.dense_blocks)
    return reuse(replace(job, edit=edit), activations, plan)
