"""Own reuse: an edit without a template keeps what its own dense steps leave behind, on its device, and goes on with
that. Knows jobs and the memory they take; the families know what a pass leaves behind.

The rows of the latest dense step serve the steps that follow, so one copy is kept and written over by the next dense
step. It belongs to the job: it ends with the job, and a job that starts again makes it again.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from weakref import WeakKeyDictionary

import torch

from instgenie.cache.buffers import TensorSpec, carve
from instgenie.cost.kept_steps import KeptSteps
from instgenie.cost.network import NetworkShape
from instgenie.cost.plan import DENSE
from instgenie.engine.changed import Changed
from instgenie.engine.changes import Change, next_dense_step
from instgenie.jobs.activations import Activations, Key
from instgenie.jobs.job import Job
from instgenie.jobs.quality import SETTINGS
from instgenie.machine.device_memory import is_out_of_memory
from instgenie.models.model import Model
from instgenie.types import NUM_PARTS, Edit, Kind, ReuseFound

log = logging.getLogger(__name__)


class OwnActivations:
    """What the jobs of a step loop keep for themselves."""

    def __init__(
        self, model: Model, kind: Kind = "kv", keeps_text: bool = False, changed: Changed | None = None
    ) -> None:
        self.model = model
        self.changed = changed  # chooses what jobs compute that reuse what hardly changes
        self.kind = kind
        self.num_text = model.num_flowing_text if keeps_text else 0
        self.network = model.describe()
        self.changes: WeakKeyDictionary[Job, Change] = WeakKeyDictionary()  # of the jobs that find their dense steps

    def welcome(self, job: Job) -> None:
        """Let a job that joins reuse what hardly changes, if it may."""
        if self.changed:
            own_bytes = room_bytes(job, self.model, self.network, self.kind, self.num_text) if job.own_steps else 0
            self.changed.welcome(job, own_bytes)

    def make_ready(self, jobs: Sequence[Job]) -> None:
        """Give the jobs whose present step keeps activations the room for them. A job for which memory has no room
        computes every token from here on."""
        for job in jobs:
            self.find_dense_step(job)
            if self.changed and job.reuses_changed:
                self.changed.settle(job)
            if not job.keeps_activations:
                continue
            try:
                if job.activations is None:
                    make_room(job, self.model, self.network, self.kind, self.num_text)
                keep_time(job, self.model)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                log.warning("no room for an edit's own activations", extra={"num_tokens": len(job.masked)})
                job.activations, job.plan, job.own_steps, job.blocks = None, DENSE, None, None
                job.edit = replace(job.edit, dense_steps=job.num_steps)

    def watch(self, job: Job) -> None:
        """Note how much the activations that a job has just kept differ from those before, if it wants to know."""
        if job.edit.max_change and job.keeps_activations:
            assert job.activations is not None
            self.changes.setdefault(job, Change()).note(job.activations, job.step)

    def find_dense_step(self, job: Job) -> None:
        """Choose the next dense step of a job whose last one is behind it, from how fast its activations change."""
        change = self.changes.get(job)
        if job.own_steps is None or change is None or job.step <= job.own_steps.steps[-1] + 1 or not change.is_known:
            return
        step = next_dense_step(job.own_steps.steps[-1], change.per_step(), job.edit.max_change)
        if step < job.num_steps:
            job.own_steps = replace(job.own_steps, steps=(*job.own_steps.steps, max(step, job.step)))


def reuse_own(job: Job) -> Job:
    """Return a copy of the job that computes every token at some steps, and at the others reads what these left."""
    return replace(job, activations=None, plan=DENSE, own_steps=own_steps(job.edit, job.num_steps), kept_step=None)


def own_steps(edit: Edit, num_steps: int) -> KeptSteps:
    """The dense steps of an edit that takes `num_steps`: its leading dense steps, and those it asks for or those of the
    quality `balanced`. An edit that finds further ones itself needs two samples of its activations for that."""
    asked = SETTINGS["balanced"].own_steps(edit.steps) if edit.own_steps is None else edit.own_steps
    num_leading = max(edit.dense_steps, 1)
    measured = {num_leading + 1} if edit.max_change else set[int]()
    steps = {*range(num_leading), *asked, *measured}
    return KeptSteps(num_steps, tuple(sorted(step for step in steps if step < num_steps)))


def can_reuse_own(job: Job) -> bool:
    """Return whether the job's own dense steps would save it any work."""
    steps = own_steps(job.edit, job.num_steps)
    return job.edit.reuse in ("auto", "own") and len(job.rest) > 0 and len(steps.steps) < job.num_steps


def reuse_found(job: Job) -> ReuseFound:
    """Whose activations a job reads, or has read."""
    if job.own_steps is None and job.activations is not None:
        return "template"
    return "own" if job.own_steps is not None or job.reuses_changed else "none"


def make_room(job: Job, model: Model, network: NetworkShape, kind: Kind, num_text: int = 0) -> None:
    """Give a job memory for what it keeps. Nothing is read there before a dense step has written it."""
    specs = specs_of(job, model, network, kind, num_text)
    memory = torch.empty(sum(spec.num_bytes for spec in specs), dtype=torch.uint8, device=job.device)
    job.activations = Activations(
        key=replace(own_key(job, model, kind), num_text=job.branches[0].num_facts or num_text),
        run_lengths=network.run_lengths,
        num_tokens=len(job.masked),
        rows=tuple(carve(memory, specs)),
        time=torch.empty(1, 0, dtype=model.dtype, device=job.device),
        steps=KeptSteps(job.num_steps, (0,)),  # one slot, whichever step wrote it last
        ranks=model.kept_convolutions.ranks if convolution_specs(job, network, model.dtype) else (),
    )
    job.plan = (True,) * sum(network.run_lengths)


def room_specs(
    network: NetworkShape, num_tokens: int, num_branches: int, kind: Kind, dtype: torch.dtype, num_text: int = 0
) -> list[TensorSpec]:
    """The tensors that hold one step of all branches of a job, place after place."""
    ends = set(accumulate(network.run_lengths))
    specs = []
    for number, block in enumerate(network.blocks, 1):
        num_rows = num_text + num_tokens // block.side**2
        specs.append(TensorSpec((num_branches, 1, NUM_PARTS[kind], num_rows, block.row_width(kind)), dtype))
        if number in ends and block.output_width:
            specs.append(TensorSpec((num_branches, 1, 1, num_rows, block.output_width), dtype))
    return specs


def specs_of(job: Job, model: Model, network: NetworkShape, kind: Kind, num_text: int) -> list[TensorSpec]:
    """The tensors of all that a job keeps of one step."""
    specs = room_specs(
        network, job.num_seen, len(job.branches), kind, model.dtype, job.branches[0].num_facts or num_text
    )
    return specs + convolution_specs(job, network, model.dtype)


def convolution_specs(job: Job, network: NetworkShape, dtype: torch.dtype) -> list[TensorSpec]:
    """The tensors of what convolutions read. LoRAs and ControlNets may change what they compute: jobs with any have
    dense convolutions, as has a job without a masked token."""
    if job.edit.loras or job.edit.controls or not len(job.inside):
        return []
    return [
        TensorSpec(
            (len(job.branches), 1, 1, shape.num_rows(job.grid), shape.width),
            torch.float32 if shape.rows == "tiles" else dtype,
        )
        for shape in network.convolutions
    ]


def room_bytes(job: Job, model: Model, network: NetworkShape, kind: Kind = "kv", num_text: int = 0) -> int:
    """Bytes that the job's own activations take on its device."""
    return sum(spec.num_bytes for spec in specs_of(job, model, network, kind, num_text))


def own_key(job: Job, model: Model, kind: Kind) -> Key:
    """A key that says what the activations are. No store ever sees it."""
    size = job.grid[0] * model.patch, job.grid[1] * model.patch
    return Key("", "", size, job.num_steps, job.schedule.levels, job.edit.guidance, kind, str(model.dtype))


def keep_time(job: Job, model: Model) -> None:
    """Keep what modulates the blocks at this step: where Y is kept, K and V are projected with it later."""
    assert job.activations is not None
    if job.activations.kind == "y":
        job.activations = replace(job.activations, time=model.observe_time([job])[None])
