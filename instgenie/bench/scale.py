"""Clusters of 1 to 20,000 workers on paper: several fronts with views of a bounded age, and links that templates move
over. Shows which part of a cluster is full first. The router is the real one; seconds come from latency models."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from instgenie.bench.files import check_folder, write_json, write_text
from instgenie.bench.latencies import Latencies
from instgenie.bench.plots import Axis, Chart, Series
from instgenie.bench.reproduce.axes import decades
from instgenie.bench.simulate import make_jobs
from instgenie.bench.workload import WorkloadRecipe, draw_workload
from instgenie.cost.latency import DEFAULTS
from instgenie.cost.network import VALUE_BYTES
from instgenie.engine.pricing import job_shape
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.simulate.fronts import BusyShares, FrontedShape, FrontSeconds, simulate_fronts
from instgenie.simulate.network import LinkShape
from instgenie.simulate.service import PlannedService, SideSeconds
from instgenie.telemetry.progress import show_status
from instgenie.types import CacheDtype

MODEL = "dummy:flux.1-dev"
SIZE = (1024, 1024)
SIDE = SideSeconds(prepare=0.05, decode=0.03, finish_thread=0.02)  # measured with FLUX.1-dev on an H200, rounded
FRONT = FrontSeconds(edit=0.04, step=4e-5, job_step=2e-5)  # of one core, as measured with pictures of a megapixel
WARM_UP = 0.3  # share of the edits that fill the cluster and are not counted
GBIT = 1e9 / 8  # bytes per second
SMALL = 64  # workers of the studies that vary something else
CACHE_BYTES = 128e9  # memory of a worker for templates
MAX_EDITS_PER_FRONT = 0.6 / FRONT.edit  # edits per second that a front is given


@dataclass(frozen=True)
class ScaleStudy:
    workers: tuple[int, ...] = (1, 8, 64, 512, 4096, 20_000)
    load: float = 0.6  # share of the workers' capacity
    edits_per_worker: int = 20
    min_edits: int = 400
    max_edits: int = 80_000
    templates_per_worker: float = 2.0
    staleness: float = 0.1
    cache_dtype: CacheDtype = "fp8"  # of the activations
    cache_stride: int = 1  # every so many steps are kept


@dataclass(frozen=True)
class ScaleRow:
    study: str
    case: str
    num_workers: int
    num_fronts: int
    mean_s: float
    p95_s: float
    fronts: float  # shares of capacity from here
    senders: float
    receivers: float
    store: float
    hits: float
    gb_per_edit: float
    simulated_in_s: float

    @property
    def fullest(self) -> str:
        """The part that is nearest to its capacity."""
        parts = {"fronts": self.fronts, "a node's link": max(self.senders, self.receivers), "the store": self.store}
        name = max(parts, key=lambda part: parts[part])
        return f"{name}, {parts[name]:.0%}"


class ScaleRunner:
    def __init__(self, study: ScaleStudy, model: Model) -> None:
        self.study, self.model = study, model
        kept = job_shape(model, VALUE_BYTES.get(study.cache_dtype, 2), study.cache_stride)
        self.service = PlannedService(DEFAULTS["cuda"], kept, SIDE)
        self.num_tokens = (SIZE[0] // model.patch) * (SIZE[1] // model.patch)
        self.template_bytes = self.service.costs(self.num_tokens).template_bytes(self.num_tokens, model.steps)
        self.max_templates = max(int(CACHE_BYTES / self.template_bytes), 1)
        self.rate = study.load * self.capacity()
        self.rows: list[ScaleRow] = []

    def capacity(self) -> float:
        """Edits per second of a worker with full batches."""
        sample = make_jobs(self.model, draw_workload(WorkloadRecipe(500, 1.0, sizes=(SIZE,))))
        masked = round(statistics.fmean(job.work.num_masked_tokens for job in sample))
        num_steps, num_dense = sample[0].work.num_steps, sample[0].num_dense_steps
        cached = self.service.step(((self.num_tokens, 8, 8 * masked, 0),))
        dense = self.service.step(((self.num_tokens, 0, 0, 8),))
        return 8 / ((num_steps - num_dense) * cached + num_dense * dense)

    def fronts_for(self, num_workers: int) -> int:
        return max(round(self.rate * num_workers / MAX_EDITS_PER_FRONT), 1)

    def run(self, study: str, case: str, shape: FrontedShape, fill: float = 1.0) -> ScaleRow:
        """Simulate one case. `fill` is the share of the usual rate."""
        asked = self.study
        num_edits = min(max(asked.min_edits, asked.edits_per_worker * shape.num_workers), asked.max_edits)
        num_templates = max(round(asked.templates_per_worker * shape.num_workers), 1)
        rate = fill * self.rate * shape.num_workers
        recipe = WorkloadRecipe(num_edits, rate, num_templates=num_templates, sizes=(SIZE,))
        jobs = make_jobs(self.model, draw_workload(recipe))
        start = time.perf_counter()
        shape = replace(shape, max_templates=self.max_templates)
        outcome = simulate_fronts(shape, self.service, jobs)
        seconds = time.perf_counter() - start
        latencies = Latencies.of([job.latency for job in jobs[int(WARM_UP * num_edits) :]])
        row = make_row(study, case, shape, latencies, outcome, seconds)
        self.rows.append(row)
        return row


def make_row(
    study: str, case: str, shape: FrontedShape, latencies: Latencies, outcome: BusyShares, seconds: float
) -> ScaleRow:
    return ScaleRow(
        study=study,
        case=case,
        num_workers=shape.num_workers,
        num_fronts=shape.num_fronts,
        mean_s=round(latencies.mean, 2),
        p95_s=round(latencies.p95, 2),
        fronts=round(outcome.fronts, 3),
        senders=round(outcome.worst_sender, 3),
        receivers=round(outcome.worst_receiver, 3),
        store=round(outcome.store, 3),
        hits=round(outcome.hits, 3),
        gb_per_edit=round(outcome.num_bytes / 1e9, 2),
        simulated_in_s=round(seconds, 1),
    )


Study = Callable[[ScaleRunner], Iterable[ScaleRow]]


def by_size(scale: ScaleRunner) -> Iterable[ScaleRow]:
    """Everything grows with the cluster: fronts, nodes, and the store's bandwidth."""
    for num_workers in scale.study.workers:
        network = LinkShape(store_rate=6.25e9 * max(num_workers / 8, 1))
        shape = FrontedShape(num_workers, scale.fronts_for(num_workers), scale.study.staleness, network=network)
        yield scale.run("size", "", replace(shape, front=FRONT))


def by_fronts(scale: ScaleRunner) -> Iterable[ScaleRow]:
    """One front, and more of them, for the same workers."""
    num_workers = 4 * SMALL
    enough = scale.fronts_for(num_workers)
    for num_fronts in (max(enough // 4, 1), max(enough // 2, 1), enough, 2 * enough):
        network = LinkShape(store_rate=6.25e9 * num_workers / 8)
        shape = FrontedShape(num_workers, num_fronts, scale.study.staleness, network=network, front=FRONT)
        yield scale.run("fronts", f"{num_fronts} fronts", shape)


def by_age(scale: ScaleRunner) -> Iterable[ScaleRow]:
    """Views of growing age, for routers that look at all workers and for those that draw a sample."""
    for max_scanned, name in ((2 * SMALL, "all workers"), (0, "a sample")):
        for staleness in (0.0, 0.1, 1.0, 5.0):
            network = LinkShape(store_rate=1e12, node_rate=1e12)  # no limit
            shape = FrontedShape(2 * SMALL, 16, staleness, max_scanned=max_scanned, network=network)
            yield scale.run("age", f"{name}, {staleness:g} s old", shape)


def by_links(scale: ScaleRunner) -> Iterable[ScaleRow]:
    """Slower links, a slower store, no peers, and routers that do not count what is on its way."""
    usual = LinkShape(store_rate=50e9)
    cases = {
        "100 Gbit/s a node, store 400": (usual, True),
        "the same, fetches not counted": (usual, False),
        "the same, no peers": (replace(usual, has_peers=False), True),
        "25 Gbit/s a node": (replace(usual, node_rate=25 * GBIT), True),
        "store 50 Gbit/s": (replace(usual, store_rate=50 * GBIT), True),
        "store 50 Gbit/s, no peers": (replace(usual, store_rate=50 * GBIT, has_peers=False), True),
    }
    for name, (network, knows) in cases.items():
        shape = FrontedShape(SMALL, 4, scale.study.staleness, knows_fetches=knows, network=network)
        yield scale.run("links", name, shape)


STUDIES: dict[str, Study] = {"size": by_size, "fronts": by_fronts, "age": by_age, "links": by_links}


def bench_scale(
    study: ScaleStudy, parts: Sequence[str], json_path: Path | None = None, plot_path: Path | None = None
) -> None:
    check_folder(json_path)
    check_folder(plot_path)
    with show_status("loading the model"):
        model = load(MODEL, "cpu", weights=frozenset())
    scale = ScaleRunner(study, model)
    kept = f"{decimal(round(scale.template_bytes))} a template, {scale.max_templates} in memory"
    for part in parts or STUDIES:
        print_rows(part, STUDIES[part](scale), f"{study.load:.0%} of the workers' capacity; {kept}.")
    if json_path:
        figures = {"template_bytes": round(scale.template_bytes), "rows": [asdict(row) for row in scale.rows]}
        write_json({"study": asdict(study)} | figures, json_path)
    if plot_path and (rows := [row for row in scale.rows if row.study == "size"]):
        write_text(chart(rows).svg(), plot_path)


def print_rows(part: str, rows: Iterable[ScaleRow], title: str) -> None:
    about = (STUDIES[part].__doc__ or "").strip()
    table = Table(title=f"{about} {title}", title_justify="left")
    table.add_column("case" if part != "size" else "workers")
    headings = ("fronts", "mean s", "P95 s", "fronts busy", "links", "store", "hits", "GB/edit", "fullest")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        cells = (
            f"{row.num_fronts}", f"{row.mean_s:.1f}", f"{row.p95_s:.1f}", f"{row.fronts:.0%}",
            f"{max(row.senders, row.receivers):.0%}", f"{row.store:.0%}", f"{row.hits:.0%}", f"{row.gb_per_edit:.2f}",
        )  # fmt: skip
        table.add_row(row.case or f"{row.num_workers:,}", *cells, row.fullest)
    Console(width=max(Console().width, 120)).print(table)


def front_label(row: ScaleRow) -> str:
    return "1 front" if row.num_fronts == 1 else f"{row.num_fronts} fronts"


def chart(rows: Sequence[ScaleRow]) -> Chart:
    """Latencies against the number of workers."""
    sizes = [row.num_workers for row in rows]
    series = [
        Series("mean", [(row.num_workers, row.mean_s) for row in rows]),
        Series("P95", [(row.num_workers, row.p95_s) for row in rows], [front_label(row) for row in rows]),
    ]
    workers = Axis("workers", sizes, min(sizes) / 1.3, max(sizes) * 1.3, log=True, form="{:,.0f}")
    seconds = decades("seconds", [seconds for row in rows for seconds in (row.mean_s, row.p95_s)])
    return Chart("Simulated latency by size of the cluster", workers, seconds, series)
