"""LoRAs of the jobs of a step loop. A job starts without waiting for its LoRAs and gets them at the step at which they
have come; after a share of its steps it stands still until then."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from instgenie.adapters.tiers import LoraFetch
from instgenie.cluster.config import LoraConfig
from instgenie.cluster.orders import LoraFacts
from instgenie.cluster.wire import LorasKept
from instgenie.engine.adapting import JobLoras, make_tiers
from instgenie.jobs.job import Job
from instgenie.models.model import Model
from instgenie.workers.line import Line


@dataclass(eq=False)
class LoraWait:
    """What is known of the LoRAs of one job."""

    fetch: LoraFetch
    num_free_steps: int  # that the job takes without them
    step: int | None = None  # from which they are applied; None: they have not come
    held_from: float = 0.0  # when the job began to stand still
    waited_seconds: float = 0.0

    @property
    def facts(self) -> LoraFacts:
        assert self.step is not None
        return LoraFacts(self.step, self.fetch.tier, self.waited_seconds)


class LoraUser(Protocol):
    """A job with the state of its LoRAs."""

    job: Job
    loras: LoraWait | None


class LoraDesk:
    def __init__(self, model: Model, config: LoraConfig, line: Line) -> None:
        self.config, self.line = config, line
        self.tiers = make_tiers(model, config.host_bytes, config.gpu_bytes, config.disk_bytes)
        self.tiers.wake = line.wake
        self.job_loras = JobLoras(model, self.tiers)

    def begin(self, user: LoraUser) -> None:
        """Begin to load what a job asks for."""
        uses = user.job.edit.loras
        if uses and user.loras is None:
            user.loras = LoraWait(self.tiers.fetch(uses), self.config.num_free_steps(user.job.num_steps))

    def settle(self, users: Iterable[LoraUser]) -> Iterator[tuple[LoraUser, Exception]]:
        """Give running jobs the LoRAs that have come, and hold those that have taken their steps without. Yields the
        jobs whose LoRAs cannot be loaded."""
        for user in users:
            wait = user.loras
            if wait is None or wait.step is not None:
                continue
            if not wait.fetch.is_done:
                self.hold(user.job, wait)
                continue
            try:
                self.job_loras.give(user.job, wait.fetch)
            except Exception as error:  # a bad file, or no memory for a good one
                yield user, error
                continue
            wait.step = user.job.step
            if user.job.is_held:
                wait.waited_seconds += time.perf_counter() - wait.held_from
                user.job.is_held = False
            self.report()

    def hold(self, job: Job, wait: LoraWait) -> None:
        if job.step >= wait.num_free_steps and not job.is_held:
            job.is_held, wait.held_from = True, time.perf_counter()

    def release(self, user: LoraUser) -> None:
        """Let go of the LoRAs of a job that has ended."""
        if user.loras:
            self.tiers.release(user.loras.fetch)
            user.loras = None

    def report(self) -> None:
        """Tell what is in memory."""
        loads, self.tiers.loaded_seconds = tuple(self.tiers.loaded_seconds), []
        sizes = {str(tier): num for tier, num in self.tiers.num_bytes().items()}
        self.line.send(LorasKept(self.tiers.versions(), sizes, loads))
