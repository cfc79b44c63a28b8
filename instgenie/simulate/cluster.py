"""A simulated cluster: jobs arrive, the router picks a worker, workers run them. The router is the real one."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from instgenie.jobs.quality import SETTINGS, Quality
from instgenie.scheduling.backlog import SideStage
from instgenie.scheduling.names import Batching, RoutingPolicy, Scheduling
from instgenie.scheduling.pace import Pace
from instgenie.scheduling.policies import make_policy
from instgenie.scheduling.router import Router, Work, WorkerLoad
from instgenie.simulate.clock import Clock
from instgenie.simulate.service import Service
from instgenie.simulate.worker import SimulatedJob, SimulatedWorker, TemplateMemory
from instgenie.types import TierName


@dataclass(frozen=True)
class ClusterShape:
    num_workers: int
    max_batch_size: int = 8
    policy: RoutingPolicy = "mask_aware"
    batching: Batching = "continuous"
    scheduling: Scheduling = "fcfs"
    reuse: bool = True  # True if all templates have activations, which every worker can fetch
    own: Quality | None = None  # edits without a template read what the dense steps of this quality leave; None: none
    max_templates: int | None = None  # templates that fit into a worker's memory; None: all
    fetch: float = 0.0  # seconds to fetch a template into memory


def simulate(
    shape: ClusterShape, service: Service, jobs: Iterable[SimulatedJob], on_finished: Callable[[], None] = lambda: None
) -> list[SimulatedJob]:
    """Run the jobs, which must be in the order of arrival. Returns them with their times, in the order they finish."""
    clock, router = Clock(), Router(shape.policy)
    finished: list[SimulatedJob] = []

    def finish(job: SimulatedJob) -> None:
        finished.append(job)
        on_finished()

    arriving = iter(jobs)
    first = next(arriving, None)
    if first is None:
        return []
    costs = replace(service.costs(first.work.num_tokens), fetch={"disk": (shape.fetch, 0.0)})
    shared: dict[str, TierName] = {}  # used by workers whose memory holds all templates
    common = Pace()
    side_seconds: dict[SideStage, float] = {"prepare": service.side.prepare}  # finishing is measured
    workers = []
    for index in range(shape.num_workers):
        memory = None if shape.max_templates is None else TemplateMemory(shape.max_templates, shape.fetch)
        load = WorkerLoad(
            index,
            shape.max_batch_size,
            Pace(common),
            costs,
            templates=memory.tiers if memory else shared,
            side_seconds=side_seconds,
        )
        workers.append(
            SimulatedWorker(
                load,
                service,
                clock,
                finish,
                shape.batching,
                memory,
                make_policy(shape.scheduling, shape.batching, load.pace),
            )
        )
    loads = [worker.load for worker in workers]
    known: set[str] = set()  # templates that have activations

    def learn(template: str) -> None:
        """Make a template available to every worker; those with limited memory must fetch it first."""
        known.add(template)
        shared[template] = "host"
        for worker in workers if shape.max_templates is not None else ():
            worker.load.templates[template] = "disk"

    def arrive(job: SimulatedJob) -> None:
        template = job.work.template
        if shape.reuse and template and template not in known:
            learn(template)
        job.is_cached = template in known
        if shape.own and not job.is_cached:
            job.own_steps = SETTINGS[shape.own].own_steps(job.work.num_steps)
            job.work = dataclasses.replace(job.work, own_share=len(job.own_steps) / job.work.num_steps)
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
) -> SimulatedJob:
    return SimulatedJob(str(index), at, Work(num_steps, num_tokens, num_masked, template), num_dense_steps)
