"""Simulates a cluster under a workload with every routing policy, and prints the latencies."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from instgenie.bench.files import check_folder, write_json
from instgenie.bench.latencies import Latencies
from instgenie.bench.workload import Arrival
from instgenie.cost.latency import DEFAULTS, read_latency
from instgenie.cost.network import VALUE_BYTES
from instgenie.cost.pricing import FETCH
from instgenie.engine.pricing import job_shape
from instgenie.jobs.quality import DEFAULT, SETTINGS
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.pictures.resizing import working_size
from instgenie.scheduling.names import RoutingPolicy, Scheduling
from instgenie.scheduling.terms import NO_DEADLINE
from instgenie.simulate.cluster import ClusterShape, make_job, simulate
from instgenie.simulate.service import PlannedService, SideSeconds
from instgenie.simulate.worker import SimulatedJob
from instgenie.telemetry.progress import Progress, show_status
from instgenie.types import CacheDtype, PlanPolicy, TextPadding

TABLE_WIDTH = 110


@dataclass(frozen=True)
class Setup:
    """The model and the device of the simulated workers, and the times of their stages."""

    model: str
    kind: str  # of device: cpu or cuda
    latency: Path | None  # file that instgenie calibrate wrote
    plan: PlanPolicy
    in_gpu: bool
    side: SideSeconds
    cache_dtype: CacheDtype = "model"  # of the activations
    cache_stride: int = 1  # every so many steps are kept
    text_padding: TextPadding = "computed"
    cache_gib: float | None = None  # memory of a worker for templates; None: as many as the shape says


@dataclass(frozen=True)
class SimulatedRow:
    policy: str
    scheduling: str
    throughput: float  # edits per second
    mean_s: float
    median_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    waiting_s: float  # mean, from prepared to the first step
    attainment: float | None  # share of edits that met their deadline; None: they had none
    num_preemptions: int
    hit_rate: float  # share of edits whose template is in the worker's memory when they arrive
    simulated_in_s: float


def bench_simulate(
    title: str,
    workload: Sequence[Arrival],
    shape: ClusterShape,
    policies: Sequence[RoutingPolicy],
    setup: Setup,
    json_path: Path | None,
    schedulings: Sequence[Scheduling] = ("fcfs",),
    slo_scale: float | None = None,
) -> None:
    check_folder(json_path)
    with show_status("loading the model"):
        model = load(setup.model, "cpu", weights=frozenset())
    service = make_service(model, setup)
    template_bytes = bytes_per_template(model, service)
    if setup.cache_gib is not None:
        shape = fit_memory(shape, setup.cache_gib, template_bytes)
    rows = []
    with Progress(transient=True) as progress:
        for policy, scheduling in product(policies, schedulings):
            name = policy if len(schedulings) == 1 else f"{policy}, {scheduling}"
            task = progress.add(name, len(workload))
            jobs = make_jobs(model, workload)
            if slo_scale is not None:
                set_deadlines(jobs, slo_scale, shape, service)
            start = time.perf_counter()
            simulate(replace(shape, policy=policy, scheduling=scheduling), service, jobs, task.advance)
            rows.append(make_row(policy, scheduling, jobs, time.perf_counter() - start))
    in_memory = "all" if shape.max_templates is None else f"{shape.max_templates:,}"
    kept = f"{decimal(round(template_bytes))} a template, {in_memory} in memory"
    print_rows(rows, f"{shape.num_workers:,} workers, {setup.model}, {title}; {kept}")
    if json_path:
        figures = {"template_bytes": round(template_bytes), "rows": [asdict(row) for row in rows]}
        content = {"shape": asdict(shape), "workload": title} | figures
        write_json(content, json_path)


def make_service(model: Model, setup: Setup) -> PlannedService:
    return PlannedService(
        latency=read_latency(setup.latency) if setup.latency else DEFAULTS[setup.kind],
        shape=job_shape(model, value_bytes(setup), setup.cache_stride, setup.text_padding == "reused"),
        side=setup.side,
        policy=setup.plan,
        in_gpu=setup.in_gpu,
    )


def value_bytes(setup: Setup) -> float:
    return VALUE_BYTES.get(setup.cache_dtype, 2 if setup.kind == "cuda" else 4)


def bytes_per_template(model: Model, service: PlannedService) -> float:
    """Bytes of the activations of a template of the model's own size and number of steps."""
    num_tokens = (model.own_size // model.patch) ** 2
    return service.costs(num_tokens).template_bytes(num_tokens, model.steps)


def fit_memory(shape: ClusterShape, gib: float, template_bytes: float) -> ClusterShape:
    """The shape with as many templates as fit into a worker's memory, and the time to read one from a disk."""
    fixed, per_byte = FETCH["disk"]
    max_templates = max(int(gib * 2**30 / template_bytes), 1)
    return replace(shape, max_templates=max_templates, fetch=fixed + per_byte * template_bytes)


def make_jobs(model: Model, workload: Sequence[Arrival]) -> list[SimulatedJob]:
    jobs = []
    size_of = lru_cache(working_size)
    for index, arrival in enumerate(workload):
        height, width = size_of(*arrival.size, model.size_multiple, model.own_size)
        num_tokens = (height // model.patch) * (width // model.patch)
        num_steps = arrival.steps or model.steps
        num_masked = max(round(arrival.mask_ratio * num_tokens), 1)
        num_dense = SETTINGS[DEFAULT].dense_steps(num_steps)
        jobs.append(make_job(index, arrival.at, num_steps, num_tokens, num_masked, str(arrival.template), num_dense))
    return jobs


def set_deadlines(jobs: Sequence[SimulatedJob], scale: float, shape: ClusterShape, service: PlannedService) -> None:
    """Give each edit `scale` times what it takes alone, on a worker that has nothing else to do."""
    alone = replace(shape, num_workers=1, max_templates=None)
    for job in jobs:
        [done] = simulate(alone, service, [make_job(0, 0.0, *edit_of(job))])
        job.deadline = job.arrived + scale * done.latency


def edit_of(job: SimulatedJob) -> tuple[int, int, int, str, int]:
    work = job.work
    return work.num_steps, work.num_tokens, work.num_masked_tokens, work.template or "", job.num_dense_steps


def make_row(policy: str, scheduling: str, jobs: Sequence[SimulatedJob], seconds: float) -> SimulatedRow:
    duration = max(job.finished for job in jobs) - jobs[0].arrived
    return SimulatedRow(
        policy=policy,
        scheduling=scheduling,
        throughput=round(len(jobs) / duration, 3),
        **Latencies.of([job.latency for job in jobs]).figures,
        waiting_s=round(statistics.fmean(job.joined - job.prepared for job in jobs), 3),
        attainment=attainment(jobs),
        num_preemptions=sum(job.num_preemptions for job in jobs),
        hit_rate=round(statistics.fmean(job.fetched_at <= job.arrived for job in jobs), 4),
        simulated_in_s=round(seconds, 2),
    )


def attainment(jobs: Sequence[SimulatedJob]) -> float | None:
    if any(job.deadline == NO_DEADLINE for job in jobs):
        return None
    return round(statistics.fmean(job.finished <= job.deadline for job in jobs), 4)


def print_rows(rows: Sequence[SimulatedRow], title: str) -> None:
    table = Table(title=title)
    table.add_column("policy")
    table.add_column("scheduling")
    headings = "edits/s,mean s,median,P90,P95,P99,waiting s,in time,preempted,hit rate,simulated in s"
    for heading in headings.split(","):
        table.add_column(heading, justify="right")
    for row in rows:
        _, _, *figures = asdict(row).values()
        table.add_row(row.policy, row.scheduling, *("–" if one is None else f"{one:.4g}" for one in figures))
    Console(width=max(Console().width, TABLE_WIDTH)).print(table)
