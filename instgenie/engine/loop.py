"""The step loop: the one place where jobs, their activations and the model meet. Knows no picture and no prompt."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from instgenie.engine.control_graphs import make_control_graphs
from instgenie.engine.controls import LocalControls, StepControls
from instgenie.engine.copying import Copying
from instgenie.engine.graphs import Graphs
from instgenie.engine.guidance import FarBranches, NoFarBranches
from instgenie.engine.loading.loader import Loader
from instgenie.engine.merging import Merging
from instgenie.engine.own import OwnActivations
from instgenie.engine.planning import Planning
from instgenie.jobs.job import Job, chooses, locate, stands_by, stands_still
from instgenie.machine.device_memory import is_out_of_memory
from instgenie.models.model import Model

MAX_JOBS = 8

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class StepResult:
    """The outcome of one step."""

    jobs: list[Job]  # picked for the step
    finished: list[Job]  # took their last step and left
    failed: dict[Job, Exception]  # could not take the step and left


class Engine:
    """Jobs join and leave between steps; at most `max_jobs` of them take a step together, the oldest first. Jobs keep
    the plans they come with, unless `planning` is given. Captured graphs load the rows they read themselves; for all
    other passes the loader does."""

    def __init__(
        self,
        model: Model,
        max_jobs: int = MAX_JOBS,
        planning: Planning | None = None,
        loader: Loader | None = None,
        graphs: Graphs | None = None,
        own: OwnActivations | None = None,
        merging: Merging | None = None,
        copying: Copying | None = None,
        controls: StepControls | None = None,
        far: FarBranches | None = None,
    ) -> None:
        self.model = model
        self.full_size = max_jobs
        self.max_jobs = max_jobs  # lower after memory ran out, until the engine is empty
        self.planning = planning
        self.loader = loader or Loader(model)
        self.graphs = graphs
        self.own = own or OwnActivations(model)
        network = model.describe()
        self.sides, self.tiles = network.sides, network.tiles
        self.merging = merging or Merging(is_on=False)
        self.copying = copying or Copying()
        captured = make_control_graphs(model.device, enabled=graphs is not None)
        self.controls = controls or LocalControls(model, graphs=captured)
        self.far = far or NoFarBranches()
        self.jobs: list[Job] = []

    def join(self, job: Job, may_choose: bool = True) -> None:
        """Take a job into the batch. This may wait for the device, no step does. Without room for what it would keep, a
        job may not begin to reuse what hardly changes."""
        if may_choose:
            self.own.welcome(job)
        locate(job, self.sides, self.tiles)
        self.jobs.append(job)

    def leave(self, job: Job) -> None:
        self.jobs.remove(job)
        if not job.done:
            forget_blocks([job])
        self.loader.forget([job])
        if not self.jobs:
            self.max_jobs = self.full_size

    def step(self, isolate_failures: bool = False) -> StepResult:
        """Pick jobs, plan, load, run the model, advance, hand over the finished.

        With `isolate_failures`, a batch that fails is tried again in halves, so that only the jobs that cannot take the
        step alone fail; they leave. Without it, the error is raised. Nothing here waits for the device."""
        jobs = self.pick()
        failed: dict[Job, Exception] = {}
        if isolate_failures:
            failed = self.advance_in_halves(jobs)
        else:
            self.advance(jobs)
        for job in failed:
            self.leave(job)
        return StepResult(jobs, self.hand_over(), failed)

    @torch.inference_mode()
    def advance(self, jobs: Sequence[Job]) -> None:
        self.merging.settle(jobs)
        self.copying.settle(jobs)
        self.own.make_ready(jobs)
        self.plan(jobs)
        self.leave_apart(jobs)
        computing = [job for job in jobs if not stands_by(job)]
        standing_by = [job for job in jobs if stands_by(job)]
        self.controls.begin(computing)
        self.far.begin(computing)
        for job, predictions in zip(computing, self.predict(computing) if computing else (), strict=True):
            self.own.watch(job)
            job.advance([*predictions, *self.far.result(job, predictions[0])])
        for job in standing_by:
            job.advance(())
        self.load_ahead([job for job in jobs if not job.done])

    def leave_apart(self, jobs: Sequence[Job]) -> None:
        """Take apart what blocks have kept for jobs that choose nothing at the step that these jobs take."""
        for job in self.jobs:
            if job.blocks and not (job in jobs and chooses(job)):
                job.blocks.leave_others()

    def advance_in_halves(self, jobs: Sequence[Job]) -> dict[Job, Exception]:
        """Advance the jobs together, or in halves where that fails. Returns the jobs that failed alone."""
        steps = {job: job.step for job in jobs}
        try:
            self.advance(jobs)
        except Exception as error:
            left = [job for job in jobs if job.step == steps[job]]
            if len(left) == 1 and left[0].blocks and is_out_of_memory(error):
                log.warning("no room for what an edit keeps of blocks", extra={"num_tokens": len(left[0].masked)})
                left[0].blocks = None  # every block computes all of its tokens from here on
                free_memory(self.model.device, error)
                return self.advance_in_halves(left)
            if len(left) <= 1:
                return dict.fromkeys(left, error)
            half = len(left) // 2
            if is_out_of_memory(error):
                log.warning("out of memory: the batch is halved", extra={"num_jobs": len(left)})
                self.max_jobs = half
                forget_blocks(left)
                free_memory(self.model.device, error)
            return self.advance_in_halves(left[:half]) | self.advance_in_halves(left[half:])
        return {}

    def predict(self, jobs: Sequence[Job]) -> list[list[Tensor]]:
        captured, others = self.part(jobs)
        predicted: dict[Job, list[Tensor]] = {}
        if self.graphs and captured:
            predicted |= zip(captured, self.graphs.predict(captured), strict=True)
        if others:
            with self.loader.loading(others) as rows:
                predicted |= zip(others, self.model.predict(others, rows), strict=True)
        return [predicted[job] for job in jobs]

    def part(self, jobs: Sequence[Job]) -> tuple[list[Job], list[Job]]:
        """The jobs whose passes are captured, and the others. Passes of jobs whose blocks choose what they compute are
        never captured, and keep no other job from it."""
        settled = [job for job in jobs if not chooses(job)]
        if not settled or not self.graphs or not self.graphs.takes(settled):
            return [], list(jobs)
        return settled, [job for job in jobs if chooses(job)]

    def plan(self, jobs: Sequence[Job]) -> None:
        if self.planning:
            self.planning.plan(jobs)

    def load_ahead(self, jobs: Sequence[Job]) -> None:
        """Start to load for the next step, which these jobs are expected to take."""
        self.plan(jobs)
        captured, others = self.part(jobs)
        if others or not captured:
            self.loader.start(others)

    def pick(self) -> list[Job]:
        return [job for job in self.jobs if not stands_still(job)][: self.max_jobs]

    def hand_over(self) -> list[Job]:
        finished = [job for job in self.jobs if job.done]
        self.jobs = [job for job in self.jobs if not job.done]
        forget_blocks(finished)
        self.loader.forget(finished)
        if not self.jobs:
            self.max_jobs = self.full_size
        return finished


def forget_blocks(jobs: Sequence[Job]) -> None:
    """Let go of what jobs keep of blocks that take no step, or have no room: they begin anew, if they go on."""
    for job in jobs:
        if job.blocks:
            job.blocks.forget()


def free_memory(device: torch.device, error: Exception | None = None) -> None:
    """Give memory that torch keeps for later use back to the device, and before that what a step holds that failed
    with an error."""
    if error:
        error.__traceback__ = None  # its frames hold tensors
    if device.type == "cuda":
        torch.cuda.empty_cache()
