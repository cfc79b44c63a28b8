"""The step loop: the one place where jobs and the model meet. Knows no picture and no prompt."""

from collections.abc import Sequence

import torch

from instgenie.batch import Job
from instgenie.engine.graphs import Graphs
from instgenie.models.model import Model

MAX_JOBS = 8


class Engine:
    """Jobs join and leave between steps; at most `max_jobs` of them take a step together, the oldest first."""

    def __init__(self, model: Model, max_jobs: int = MAX_JOBS, graphs: Graphs | None = None) -> None:
        self.model = model
        self.predict = graphs.predict if graphs else model.predict
        self.max_jobs = max_jobs
        self.jobs: list[Job] = []

    def join(self, job: Job) -> None:
        self.jobs.append(job)

    def leave(self, job: Job) -> None:
        self.jobs.remove(job)

    def step(self) -> list[Job]:
        """Pick jobs, run the model, advance, hand over the finished."""
        self.advance(self.pick())
        return self.hand_over()

    @torch.inference_mode()
    def advance(self, jobs: Sequence[Job]) -> None:
        for job, predictions in zip(jobs, self.predict(jobs), strict=True):
            job.advance(predictions)

    def pick(self) -> list[Job]:
        return self.jobs[: self.max_jobs]

    def hand_over(self) -> list[Job]:
        finished = [job for job in self.jobs if job.done]
        self.jobs = [job for job in self.jobs if not job.done]
        return finished
