"""The server in numbers, for Prometheus. Knows the names and what is counted; the cluster tells its part through an
observer."""

from collections.abc import Iterator, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from instgenie.cluster.local import Cluster
from instgenie.cluster.orders import Facts, FailureKind, Tier
from instgenie.cluster.status import Observer
from instgenie.cluster.templates import SHARED

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
RATIOS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1)
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
INTERRUPTIONS = "instgenie:step_loop_interruptions_total"
REASONS = ("stop", "abort", "error")  # finished, given up by the client, failed


class Metrics(Observer):
    def __init__(self, cluster: Cluster) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the names are those of the documents, and no others
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.registry.register(Live(cluster))

        def histogram(name: str, about: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"instgenie:{name}", about, buckets=buckets, registry=self.registry)

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"instgenie:{name}", about, labels, registry=self.registry)

        self.latency = histogram("e2e_request_latency_seconds", "From acceptance to the finished picture.", SECONDS)
        self.queue_time = histogram("request_queue_time_seconds", "From acceptance to a worker.", SECONDS)
        self.step_time = histogram("step_time_seconds", "One denoising step of a batch.", STEP_SECONDS)
        self.batch_size = histogram("batch_size", "Jobs in a step.", SIZES)
        self.mask_ratio = histogram("mask_ratio", "Share of the pixels that an edit masks.", RATIOS)
        self.success = counter("request_success_total", "Edits that ended.", "finished_reason")
        self.cache_queries = counter("cache_queries_total", "Looks for a template's activations.")
        self.cache_hits = counter("cache_hits_total", "Those that found them.", "tier")
        self.http = counter("http_requests_total", "Requests answered.", "method", "route", "status")
        for reason in REASONS:
            self.success.labels(reason)
        for tier in get_args(Tier):
            self.cache_hits.labels(tier)
        cluster.observe(self)

    def step(self, worker: int, seconds: float, batch_size: int) -> None:
        self.step_time.observe(seconds)
        self.batch_size.observe(batch_size)

    def accepted(self, mask_ratio: float) -> None:
        self.mask_ratio.observe(mask_ratio)

    def cache_query(self, tier: Tier | None) -> None:
        self.cache_queries.inc()
        if tier is not None:
            self.cache_hits.labels(tier).inc()

    def finished(self, facts: Facts, seconds: float) -> None:
        self.latency.observe(seconds)
        self.queue_time.observe(facts.queue_seconds)
        self.success.labels("stop").inc()

    def failed(self, kind: FailureKind) -> None:
        self.success.labels("error").inc()

    def cancelled(self) -> None:
        self.success.labels("abort").inc()

    def answered(self, method: str, route: str, status: int) -> None:
        self.http.labels(method, route, status).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)


class Live(Collector):
    """What is read from the cluster when someone looks."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def collect(self) -> Iterator[Metric]:
        status = self.cluster.status()
        yield gauge("num_requests_running", "Edits on a worker.", status.num_running)
        yield gauge("num_requests_waiting", "Edits that wait for a worker.", status.num_waiting)
        usage = GaugeMetricFamily("instgenie:cache_usage_bytes", "Activations kept, over all workers.", labels=["tier"])
        for tier in get_args(Tier):
            of_each = [worker.tier_bytes.get(tier, 0) for worker in status.workers]
            usage.add_metric([tier], max(of_each) if tier in SHARED else sum(of_each))
        yield usage
        about = "Times that other work went before a step while jobs were running, since the worker's process started."
        interruptions = CounterMetricFamily(INTERRUPTIONS, about, labels=["worker"])
        for worker in status.workers:
            interruptions.add_metric([str(worker.index)], worker.num_interruptions)
        yield interruptions


def gauge(name: str, about: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"instgenie:{name}", about, value=value)
