"""A simulated cluster: jobs arrive, the router chooses, workers work. The router and its loads are the real ones."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from instgenie.scheduling.names import Batching
from instgenie.scheduling.router import Chore, Load, Pace, Policy, Router, Work
from instgenie.simulate.clock import Clock
from instgenie.simulate.service import Service
from instgenie.simulate.worker import Job, Memory, Worker
from instgenie.types import TierName


@dataclass(frozen=True)
class ClusterShape:
    num_workers: int
    max_batch_size: int = 8
    policy: Policy = "mask_aware"
    batching: Batching = "continuous"
    reuse: bool = True  # whether templates have activations: all of them then, and every worker can get at them
    max_templates: int | None = None  # that a worker's memory holds; None: all there are
    fetch: float = 0.0  # seconds until a template that memory lacks is there


def simulate(
    shape: ClusterShape, service: Service, jobs: Iterable[Job], on_finished: Callable[[], None] = lambda: None
) -> list[Job]:
    """All jobs, with their times, in the order they finish. They are to come in the order of their arrival."""
    clock, router = Clock(), Router(shape.policy)
    finished: list[Job] = []

    def finish(job: Job) -> None:
        finished.append(job)
        on_finished()

    arriving = iter(jobs)
    first = next(arriving, None)
    if first is None:
        return []
    costs = replace(service.costs(first.work.num_tokens), fetch={"disk": (shape.fetch, 0.0)})
    shared: dict[str, TierName] = {}  # templates of workers that hold all there are
    common = Pace()
    chores: dict[Chore, float] = {"prepare": service.chores.prepare}  # the other is measured
    workers = []
    for index in range(shape.num_workers):
        memory = None if shape.max_templates is None else Memory(shape.max_templates, shape.fetch)
        load = Load(index, shape.max_batch_size, Pace(common), costs, memory.tiers if memory else shared, chores=chores)
        workers.append(Worker(load, service, clock, finish, shape.batching, memory))
    loads = [worker.load for worker in workers]
    known: set[str] = set()  # templates that have activations

    def learn(template: str) -> None:
        """Every worker can get at it; those with a memory of their own fetch it first."""
        known.add(template)
        shared[template] = "host"
        for worker in workers if shape.max_templates is not None else ():
            worker.load.templates[template] = "disk"

    def arrive(job: Job) -> None:
        template = job.work.template
        if shape.reuse and template and template not in known:
            learn(template)
        job.is_cached = template in known
        workers[router.choose(job.work, loads)].accept(job)
        await_next()

    def await_next() -> None:
        if following := next(arriving, None):
            clock.at(following.arrived, arrive, following)

    clock.at(first.arrived, arrive, first)
    clock.run()
    return sorted(finished, key=lambda job: job.finished)


def make_job(
    index: int, at: float, num_steps: int, num_tokens: int, num_masked: int, template: str, num_dense_steps: int = 0
) -> Job:
    return Job(str(index), at, Work(num_steps, num_tokens, num_masked, template), num_dense_steps)
