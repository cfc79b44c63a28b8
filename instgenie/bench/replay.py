"""The simulator against recorded runs of real servers: the same edits, at the same times, under the same policy.

All that the simulator knows of a run is how the other runs of the record went: a latency model that is fitted to their
steps, the seconds between steps, and those of the stages beside them.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from instgenie.bench.latencies import Latencies
from instgenie.bench.reproduce.traffic import fit_line, step_sample
from instgenie.bench.served import ServedEdit, ServedRecord, ServedRun, ServedStep, read_record
from instgenie.cost.latency import Latency, StepSample, fit_latency
from instgenie.cost.pricing import JobShape
from instgenie.engine.pricing import job_shape
from instgenie.jobs.quality import DEFAULT, SETTINGS
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.scheduling.policies import POLICIES
from instgenie.simulate.cluster import ClusterShape, make_job, simulate
from instgenie.simulate.service import PlannedService, SideSeconds
from instgenie.simulate.worker import SimulatedJob


@dataclass(frozen=True)
class ReplayRow:
    """Figures of a run, each simulated and measured."""

    policy: str
    load: float
    mean: tuple[float, float]  # seconds
    p95: tuple[float, float]
    attainment: tuple[float, float]

    @property
    def error(self) -> float:
        """Of the mean latency, relative."""
        predicted, measured = self.mean
        return predicted / measured - 1


def bench_replay(path: Path) -> None:
    record = read_record(path)
    model = load(record.study.model, "cpu", weights=frozenset())
    rows = replay(record, model)
    table = Table("load", "policy", title=f"simulated and measured: {path}")
    for heading in ("mean s", "measured", "error", "P95 s", "measured", "error", "in time", "measured"):
        table.add_column(heading, justify="right")
    for row in rows:
        (mean, real_mean), (p95, real_p95), (share, real_share) = row.mean, row.p95, row.attainment
        seconds = (f"{mean:.2f}", f"{real_mean:.2f}", f"{row.error:+.1%}")
        tail = (f"{p95:.2f}", f"{real_p95:.2f}", f"{p95 / real_p95 - 1:+.1%}")
        table.add_row(f"{row.load:.0%}", row.policy, *seconds, *tail, f"{share:.1%}", f"{real_share:.1%}")
    console = Console(width=110, highlight=False)
    console.print(table)
    means = [statistics.fmean(column) for column in zip(*(row.mean for row in rows), strict=True)]
    sizes = statistics.fmean(abs(row.error) for row in rows)
    console.print(
        f"mean latency over all runs: simulated {means[0]:.3f} s, measured {means[1]:.3f} s "
        f"({means[0] / means[1] - 1:+.1%}); mean size of the error of a run {sizes:.1%}"
    )


def replay(record: ServedRecord, model: Model) -> list[ReplayRow]:
    itemsize = 2 if record.study.device.startswith("cuda") else 4
    shape = job_shape(model, itemsize)
    cluster = ClusterShape(record.num_workers, record.max_batch_size)
    rows = []
    for run in sorted(record.runs, key=lambda run: run.load):
        others = [other for other in record.runs if other is not run] or [run]
        service, outside = service_of(others, shape)
        jobs = jobs_of(run.edits, model.steps)
        [scheduling] = [name for name in POLICIES if name == run.policy]
        simulate(replace(cluster, scheduling=scheduling), service, jobs)
        predicted, measured = [job.latency + outside for job in jobs], run.latencies
        in_time = statistics.fmean(
            one <= edit.deadline for one, edit in zip(predicted, answered(run.edits), strict=True)
        )
        pair = Latencies.of(predicted), Latencies.of(measured)
        means, tails = [one.mean for one in pair], [one.p95 for one in pair]
        rows.append(
            ReplayRow(run.policy, run.load, (means[0], means[1]), (tails[0], tails[1]), (in_time, run.attainment))
        )
    return rows


def answered(edits: Sequence[ServedEdit]) -> list[ServedEdit]:
    return [edit for edit in edits if not edit.error]


def jobs_of(edits: Sequence[ServedEdit], model_steps: int) -> list[SimulatedJob]:
    jobs = []
    for index, edit in enumerate(answered(edits)):
        num_steps = edit.steps or model_steps
        num_dense = SETTINGS[DEFAULT].dense_steps(num_steps)
        sizes = num_steps, edit.num_tokens, edit.num_masked_tokens
        job = make_job(index, edit.at, *sizes, str(edit.template), num_dense)
        job.deadline = edit.at + edit.deadline
        jobs.append(job)
    return jobs


def service_of(runs: Sequence[ServedRun], shape: JobShape) -> tuple[PlannedService, float]:
    """The service of a worker as these runs saw it, and the seconds of an edit outside its stages."""
    steps = [step for run in runs for step in run.steps]
    edits = [edit for run in runs for edit in answered(run.edits)]
    decode, decode_token = fit_line([edit.num_masked_tokens for edit in edits], [edit.finish for edit in edits])
    side = SideSeconds(
        prepare=statistics.fmean(edit.prepare for edit in edits),
        decode=decode,
        decode_token=decode_token,
        between=statistics.fmean(step.between for step in steps),
    )
    service = PlannedService(fitted(steps, shape), shape, side, policy="cached", in_gpu=True)
    return service, statistics.fmean(edit.outside for edit in edits)


def fitted(steps: Sequence[ServedStep], shape: JobShape) -> Latency:
    """A latency model whose steps take as long in total as those that were measured."""
    samples = [sample_of(step, shape) for step in steps]
    latency = fit_latency("", "", shape.network, samples, [])
    predicted = sum(latency.predict_step(shape.network, one.demands, one.plan) for one in samples)
    ratio = sum(one.seconds for one in samples) / predicted
    return replace(
        latency, block=ratio * latency.block, flop=ratio * latency.flop, flop_outside=ratio * latency.flop_outside
    )


def sample_of(step: ServedStep, shape: JobShape) -> StepSample:
    jobs = [
        (
            job.num_tokens,
            job.num_masked_tokens,
            job.is_cached and job.step >= SETTINGS[DEFAULT].dense_steps(job.num_steps),
        )
        for job in step.jobs
    ]
    return step_sample(shape, jobs, step.seconds)
