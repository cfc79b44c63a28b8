"""Metrics for Prometheus. Knows the names and what is counted; learns what happens in the cluster as its observer."""

from collections.abc import Iterator, Sequence
from typing import TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from instgenie.cluster.cluster import Cluster
from instgenie.cluster.orders import Facts, FailureKind
from instgenie.cluster.status import Observer, ProcessState, WorkerStatus
from instgenie.cluster.templates import SHARED
from instgenie.types import ReuseFound, TierName

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
RATIOS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1)
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
INTERRUPTIONS = "instgenie:step_loop_interruptions_total"
LORA_SOURCES = ("gpu", "host", "disk", "remote")  # where LoRAs are found
OWN_TIERS: tuple[TierName, ...] = ("gpu", "host")
Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)
REASONS = ("stop", "abort", "error")  # finished, cancelled, failed
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
KEPT_IN: tuple[TierName, ...] = tuple(tier for tier in get_args(TierName) if tier != "peer")  # a peer's is its own
OTHER_METHOD = "other"  # a label for each token that a client makes up would fill the memory


class Metrics(Observer):
    def __init__(self, cluster: Cluster) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # only documented names appear
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.registry.register(ClusterCollector(cluster))

        def histogram(name: str, about: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"instgenie:{name}", about, buckets=buckets, registry=self.registry)

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"instgenie:{name}", about, labels, registry=self.registry)

        self.latency = histogram("e2e_request_latency_seconds", "Seconds from acceptance to the picture.", SECONDS)
        self.queue_time = histogram("request_queue_time_seconds", "Seconds from acceptance to a worker.", SECONDS)
        self.step_time = histogram("step_time_seconds", "Seconds of one denoising step of a batch.", STEP_SECONDS)
        self.batch_size = histogram("batch_size", "Number of jobs in a step.", SIZES)
        self.mask_ratio = histogram("mask_ratio", "Masked share of an edit's pixels.", RATIOS)
        self.success = counter("request_success_total", "Edits that ended.", "finished_reason")
        self.edits = counter("edits_total", "Finished edits, by whose activations they read.", "reuse")
        self.deadlines = counter("deadlines_total", "Finished edits that had a deadline.", "met")
        self.preemptions = counter("preemptions_total", "Times that an edit left a batch for another.")
        self.cache_queries = counter("cache_queries_total", "Lookups of a template's activations.")
        self.cache_hits = counter("cache_hits_total", "Lookups that found the activations.", "tier")
        self.fetched_bytes = counter("cache_fetched_bytes_total", "Bytes of activations brought into memory.", "tier")
        self.fetch_time = counter("cache_fetch_seconds_total", "Seconds that bringing them into memory took.", "tier")
        self.lora_edits = counter("lora_edits_total", "Finished edits with LoRAs, by where these were found.", "tier")
        self.lora_waits = counter("lora_wait_seconds_total", "Seconds that edits stood still for their LoRAs.")
        self.lora_loads = counter("lora_loads_total", "LoRAs brought near the steps.", "tier")
        self.lora_load_time = counter("lora_load_seconds_total", "Seconds that this took.", "tier")
        for tier in LORA_SOURCES:
            for counted in (self.lora_edits, self.lora_loads, self.lora_load_time):
                counted.labels(tier)
        self.http = counter("http_requests_total", "Answered HTTP requests.", "method", "route", "status")
        for reason in REASONS:
            self.success.labels(reason)
        for met in ("yes", "no"):
            self.deadlines.labels(met)
        for reuse in get_args(ReuseFound):
            self.edits.labels(reuse)
        for tier in get_args(TierName):
            for counted in (self.cache_hits, self.fetched_bytes, self.fetch_time):
                counted.labels(tier)
        cluster.observe(self)

    def step(self, worker: int, seconds: float, batch_size: int, between: float) -> None:
        self.step_time.observe(seconds)
        self.batch_size.observe(batch_size)

    def accepted(self, mask_ratio: float) -> None:
        self.mask_ratio.observe(mask_ratio)

    def cache_query(self, tier: TierName | None) -> None:
        self.cache_queries.inc()
        if tier is not None:
            self.cache_hits.labels(tier).inc()

    def fetched(self, tier: TierName, num_bytes: int, seconds: float) -> None:
        self.fetched_bytes.labels(tier).inc(num_bytes)
        self.fetch_time.labels(tier).inc(seconds)

    def lora_loaded(self, tier: str, num_bytes: int, seconds: float) -> None:
        self.lora_loads.labels(tier).inc()
        self.lora_load_time.labels(tier).inc(seconds)

    def finished(self, facts: Facts, seconds: float) -> None:
        self.latency.observe(seconds)
        self.queue_time.observe(facts.queue_seconds)
        self.success.labels("stop").inc()
        self.edits.labels(facts.reuse).inc()
        if facts.loras:
            self.lora_edits.labels(facts.loras.tier).inc()
            self.lora_waits.inc(facts.loras.waited_seconds)
        if facts.in_time is not None:
            self.deadlines.labels("yes" if facts.in_time else "no").inc()

    def preempted(self, worker: int, job: str, by: str) -> None:
        self.preemptions.inc()

    def failed(self, kind: FailureKind) -> None:
        self.success.labels("error").inc()

    def cancelled(self) -> None:
        self.success.labels("abort").inc()

    def answered(self, method: str, route: str, status: int) -> None:
        self.http.labels(method if method in METHODS else OTHER_METHOD, route, status).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)


class ClusterCollector(Collector):
    """Metrics that are read from the cluster at each scrape."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def collect(self) -> Iterator[Metric]:
        status = self.cluster.status()
        yield gauge("num_requests_running", "Edits on workers.", status.num_running)
        yield gauge("num_requests_waiting", "Edits waiting for a worker.", status.num_waiting)
        about = "Registrations of templates waiting for their turn."
        yield gauge("num_registrations_waiting", about, status.num_registrations_waiting)
        about = "Mean relative error of the latencies that were predicted for recent edits."
        yield gauge("prediction_error_ratio", about, self.cluster.predictor.error)
        usage = GaugeMetricFamily("instgenie:cache_usage_bytes", "Cached activations of all workers.", labels=["tier"])
        for tier in KEPT_IN:
            per_worker = [worker.tier_bytes.get(tier, 0) for worker in status.workers]
            usage.add_metric([tier], max(per_worker) if tier in SHARED else sum(per_worker))
        yield usage
        loras = GaugeMetricFamily("instgenie:lora_bytes", "LoRAs in the memory of all workers.", labels=["tier"])
        for tier in OWN_TIERS:
            loras.add_metric([tier], sum(worker.lora_bytes.get(tier, 0) for worker in status.workers))
        yield loras
        if status.nodes:
            yield gauge("num_nodes", "Nodes with workers.", len(status.nodes))
            yield gauge("num_fronts", "Fronts that share the workers.", len(status.fronts))
        yield from self.collect_workers(status.workers, has_nodes=bool(status.nodes))

    def collect_workers(self, workers: Sequence[WorkerStatus], has_nodes: bool) -> Iterator[Metric]:
        """Metrics of each worker. Where the workers are on several machines, they have the label `node`."""
        place = ["node"] if has_nodes else []

        def per_worker(kind: type[Family], name: str, about: str, *labels: str) -> Family:
            return kind(name, about, labels=["worker", *labels, *place])

        about = "Times other work delayed a step while jobs were running, since the worker process started."
        interruptions = per_worker(CounterMetricFamily, INTERRUPTIONS, about)
        about = "Jobs that began to take steps, of all servers that share the worker, since its process started."
        joined = per_worker(CounterMetricFamily, "instgenie:worker_jobs_total", about)
        about = "1 for the state a worker is in, 0 for the others."
        states = per_worker(GaugeMetricFamily, "instgenie:worker_state", about, "device", "state")
        about = "Starts of a worker's process after its first."
        restarts = per_worker(CounterMetricFamily, "instgenie:worker_restarts_total", about, "role")
        about = "Edits in a worker's batch, of this front."
        running = per_worker(GaugeMetricFamily, "instgenie:worker_running", about)
        about = "Seconds until a worker has done all its work, as predicted."
        seconds = per_worker(GaugeMetricFamily, "instgenie:worker_predicted_seconds", about)
        about = "Cached activations of a worker, in its memory."
        memory = per_worker(GaugeMetricFamily, "instgenie:worker_cache_bytes", about, "tier")
        for worker in workers:
            index, where = str(worker.index), [worker.node] if has_nodes else []
            interruptions.add_metric([index, *where], worker.num_interruptions)
            joined.add_metric([index, *where], worker.num_joined)
            for state in get_args(ProcessState):
                states.add_metric([index, worker.device, state, *where], worker.state == state)
            for process in worker.processes:
                restarts.add_metric([index, process.role, *where], process.num_restarts)
            running.add_metric([index, *where], len(worker.running))
            seconds.add_metric([index, *where], worker.predicted_seconds)
            for tier in OWN_TIERS:
                memory.add_metric([index, tier, *where], worker.tier_bytes.get(tier, 0))
        yield from (interruptions, joined, states, restarts, running, seconds, memory)


def gauge(name: str, about: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"instgenie:{name}", about, value=value)
