"""The step loop: the one place where jobs, their activations and the model meet. Knows no picture and no prompt."""

from collections.abc import Sequence

import torch
from torch import Tensor

from instgenie.engine.graphs import Graphs
from instgenie.engine.loading.loader import Loader
from instgenie.engine.planning import Planning
from instgenie.jobs.job import Job
from instgenie.models.model import Model

MAX_JOBS = 8


class Engine:
    """Jobs join and leave between steps; at most `max_jobs` of them take a step together, the oldest first. Jobs keep
    the plans they come with, unless there is somebody who plans. Graphs, where there are any, bring the rows of
    captured passes by themselves; all others come through the loader."""

    def __init__(
        self,
        model: Model,
        max_jobs: int = MAX_JOBS,
        planning: Planning | None = None,
        loader: Loader | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        self.model = model
        self.max_jobs = max_jobs
        self.planning = planning
        self.loader = loader or Loader(model)
        self.graphs = graphs
        self.jobs: list[Job] = []

    def join(self, job: Job) -> None:
        self.jobs.append(job)

    def leave(self, job: Job) -> None:
        self.jobs.remove(job)
        if not self.jobs:
            self.loader.start(())

    def step(self) -> list[Job]:
        """Pick jobs, plan, load, run the model, advance, hand over the finished."""
        self.advance(self.pick())
        return self.hand_over()

    @torch.inference_mode()
    def advance(self, jobs: Sequence[Job]) -> None:
        self.plan(jobs)
        for job, predictions in zip(jobs, self.predict(jobs), strict=True):
            job.advance(predictions)
        self.load_ahead([job for job in jobs if not job.done])

    def predict(self, jobs: Sequence[Job]) -> list[list[Tensor]]:
        if self.graphs and self.graphs.takes(jobs):
            return self.graphs.predict(jobs)
        with self.loader.loading(jobs):
            return self.model.predict(jobs)

    def plan(self, jobs: Sequence[Job]) -> None:
        if self.planning:
            self.planning.plan(jobs)

    def load_ahead(self, jobs: Sequence[Job]) -> None:
        """For the next step, if these are the jobs that take it."""
        self.plan(jobs)
        if not self.graphs or not self.graphs.takes(jobs):
            self.loader.start(jobs)

    def pick(self) -> list[Job]:
        return self.jobs[: self.max_jobs]

    def hand_over(self) -> list[Job]:
        finished = [job for job in self.jobs if job.done]
        self.jobs = [job for job in self.jobs if not job.done]
        return finished
