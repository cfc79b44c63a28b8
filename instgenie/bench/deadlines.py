"""How many edits are in time, by policy: simulated clusters against the arrival rate, the number of workers and a noisy
neighbour. Beside the policies stands the most that any order could reach."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

from rich.console import Console

from instgenie.bench.bound import Window, most_in_time
from instgenie.bench.files import check_folder, write_json, write_text
from instgenie.bench.points import BOUND, DeadlinePoint, charts, line_of, summary
from instgenie.bench.simulate import Setup, edit_of, make_service
from instgenie.bench.workload import WorkloadRecipe, draw_workload
from instgenie.jobs.quality import DEFAULT, SETTINGS
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.scheduling.names import Scheduling
from instgenie.simulate.cluster import ClusterShape, make_job, simulate
from instgenie.simulate.service import PlannedService
from instgenie.simulate.worker import SimulatedJob

SIZES = (0.5, 0.75, 1.0)  # sides of the pictures, as shares of the model's own: as 512, 768 and 1024
STEPS = (1 / 12, 1 / 12, 1 / 12, 1.0)  # steps of the edits, as shares of the model's own: as 2, 2, 2 and 24
MASKS = {"sizes": "production", "steps": "inpaint"}  # of workloads that are not named by their masks
GRAIN = 16  # masked tokens are rounded to this many, so that equal edits are simulated alone once


@dataclass(frozen=True)
class DeadlineStudy:
    workloads: tuple[str, ...] = ("sizes", "steps", "production", "inpaint", "retouch")
    workers: tuple[int, ...] = (1,)
    loads: tuple[float, ...] = (0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9)  # shares of what full batches reach
    policies: tuple[Scheduling, ...] = ("fcfs", "edf", "slack", "preemptive")
    seconds: float = 1200.0  # of load
    max_edits: int = 20_000  # large clusters get a shorter load
    slo_scale: float = 5.0  # deadline, as a multiple of what the edit takes alone
    seed: int = 0
    neighbours: tuple[float, ...] = ()  # loads of a tenant beside one with a fifth of the capacity


class DeadlineLab:
    """Draws workloads and simulates them."""

    def __init__(self, model: Model, service: PlannedService, study: DeadlineStudy) -> None:
        self.model, self.service, self.study = model, service, study
        self.alone = lru_cache(maxsize=None)(self._alone)

    def _alone(self, edit: tuple[int, int, int, str, int]) -> float:
        [done] = simulate(ClusterShape(1), self.service, [make_job(0, 0.0, *edit)])
        return done.latency

    def jobs(self, workload: str, rate: float, tenant: str = "", seed: int = 0) -> list[SimulatedJob]:
        num_edits = min(max(round(rate * self.study.seconds), 1), self.study.max_edits)
        recipe = WorkloadRecipe(num_edits, rate, mask_ratios=MASKS.get(workload, workload), num_templates=50)
        jobs = []
        for index, one in enumerate(draw_workload(replace(recipe, seed=self.study.seed + seed))):
            share = SIZES[one.seed % len(SIZES)] if workload == "sizes" else 1.0
            num_tokens = round(share * self.model.own_size / self.model.patch) ** 2
            num_masked = max(round(one.mask_ratio * num_tokens / GRAIN), 1) * GRAIN
            few = STEPS[one.seed % len(STEPS)] if workload == "steps" else 1.0
            steps = round(few * self.model.steps)
            num_dense = SETTINGS[DEFAULT].dense_steps(steps)
            job = make_job(index, one.at, steps, num_tokens, num_masked, str(one.template), num_dense)
            job.id, job.tenant = f"{tenant}{index}", tenant
            job.deadline = job.arrived + self.study.slo_scale * self.alone((*edit_of(job)[:3], "one", num_dense))
            jobs.append(job)
        return jobs

    def work(self, job: SimulatedJob) -> float:
        """Seconds of a worker that an edit takes in a full batch of its like."""
        num = ClusterShape(1).max_batch_size
        tokens, masked, num_dense = job.work.num_tokens, job.work.num_masked_tokens, job.num_dense_steps
        cached, dense = ((tokens, num, num * masked, 0),), ((tokens, 0, 0, num),)
        num_cached = job.work.num_steps - num_dense
        return (num_cached * self.service.step(cached) + num_dense * self.service.step(dense)) / num

    def capacity(self, workload: str) -> float:
        """Edits per second of one worker whose batches are full."""
        return 1 / statistics.fmean(self.work(job) for job in self.jobs(workload, 500 / self.study.seconds))

    def bound(self, jobs: Sequence[SimulatedJob], num_workers: int) -> float:
        side = self.service.side
        return most_in_time(
            [
                Window(job.arrived + side.prepare, job.deadline - side.decode, self.work(job) / num_workers)
                for job in jobs
            ]
        )

    def points(self, workload: str, num_workers: int, load: float) -> list[DeadlinePoint]:
        rate = load * num_workers * self.capacity(workload)
        jobs = self.jobs(workload, rate)
        found = [DeadlinePoint(workload, num_workers, load, BOUND, rate, round(self.bound(jobs, num_workers), 4))]
        for policy in self.study.policies:
            jobs = self.jobs(workload, rate)
            simulate(ClusterShape(num_workers, scheduling=policy), self.service, jobs)
            mean = statistics.fmean(job.latency for job in jobs)
            num = sum(job.num_preemptions for job in jobs)
            found.append(DeadlinePoint(workload, num_workers, load, policy, rate, in_time(jobs), round(mean, 3), num))
        return found

    def neighbour(self, load: float) -> list[DeadlinePoint]:
        """A quiet tenant with a fifth of the capacity, beside one that loads the worker as much as given."""
        most, found = self.capacity("production"), []
        for policy in self.study.policies:
            quiet = self.jobs("production", 0.2 * most, "quiet")
            noisy = self.jobs("production", load * most, "noisy", seed=1)
            jobs = sorted((*quiet, *noisy), key=lambda job: job.arrived)
            simulate(ClusterShape(1, scheduling=policy), self.service, jobs)
            mean = statistics.fmean(job.latency for job in quiet)
            point = DeadlinePoint("neighbour", 1, load, policy, load * most, in_time(quiet), round(mean, 3))
            found.append(point)
        return found


def in_time(jobs: Sequence[SimulatedJob]) -> float:
    return round(statistics.fmean(job.finished <= job.deadline for job in jobs), 4)


def bench_deadlines(setup: Setup, study: DeadlineStudy, out: Path | None, json_path: Path | None) -> None:
    check_folder(json_path)
    model = load(setup.model, "cpu", weights=frozenset())
    lab = DeadlineLab(model, make_service(model, setup), study)
    print_line, points = Console(width=120, highlight=False).print, list[DeadlinePoint]()
    for workload in study.workloads:
        for num_workers in study.workers:
            for load_share in study.loads:
                new = lab.points(workload, num_workers, load_share)
                points += new
                print_line(line_of(f"{workload}, {num_workers:,} workers, load {load_share:.0%}", new))
            own = [point for point in points if (point.workload, point.workers) == (workload, num_workers)]
            for sentence in summary(own):
                print_line(f"  {sentence}")
    for load_share in study.neighbours:
        new = lab.neighbour(load_share)
        points += new
        print_line(line_of(f"quiet beside a neighbour of load {load_share:.0%}", new))
    if json_path:
        write_json({"study": asdict(study), "points": [asdict(point) for point in points]}, json_path)
    for name, chart in charts(setup.model, points).items() if out else ():
        write_text(chart.svg(), Path(out or ".") / f"{name}.svg")
