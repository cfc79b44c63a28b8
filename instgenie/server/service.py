"""What the routes share: configuration, cluster, limits, metrics, and whether new work is taken. Knows no route."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.requests import Request

from instgenie.cluster.local import Cluster
from instgenie.cluster.orders import Order
from instgenie.cluster.wire import ModelFacts
from instgenie.errors import ClosedError, QueueFullError
from instgenie.server.bodies.body import Intake
from instgenie.server.bodies.pictures import Pictures
from instgenie.server.config import HttpConfig
from instgenie.server.errors import busy, closed, not_found
from instgenie.server.guard.keys import Keys
from instgenie.server.monitoring.metrics import Metrics
from instgenie.server.monitoring.pulse import Pulse
from instgenie.server.watch import Watch

SECONDS_TO_LOAD = 5
BODIES_AT_ONCE = 8  # as many of the largest size may be in memory


class Service:
    def __init__(self, config: HttpConfig, cluster: Cluster, with_traces: bool = False) -> None:
        self.config = config
        self.with_traces = with_traces
        self.cluster = cluster
        self.keys = Keys(config.api_keys)
        self.intake = Intake(config.max_body_bytes, BODIES_AT_ONCE * config.max_body_bytes, config.body_timeout)
        self.pictures = Pictures(config.decode_threads, config.max_pixels)
        self.metrics = Metrics(cluster)
        self.pulse = Pulse(cluster, config.served_model_names[0])
        self.draining = False
        self.num_watches = 0
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def ready(self) -> bool:
        return self.cluster.ready and not self.draining

    @property
    def model_facts(self) -> ModelFacts:
        """Of a server that is ready."""
        facts = self.cluster.model_facts
        assert facts is not None
        return facts

    def check_open(self) -> None:
        """Raises unless new work is taken."""
        if self.draining:
            raise closed("The server is shutting down.", self.config.shutdown_timeout, "shutting_down")
        if not self.cluster.ready:
            raise closed("The model is loading.", SECONDS_TO_LOAD, "loading")

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.config.served_model_names:
            raise not_found("model", name, "model_not_found", "model")

    @asynccontextmanager
    async def watch(self, orders: Sequence[Order], deadline_ms: int | None) -> AsyncIterator[Watch]:
        """Hands the orders to the cluster; while the watch is open the server does not stop."""
        self.check_open()
        try:
            tickets = self.cluster.submit(orders)
        except QueueFullError as full:
            message = f"The queue is full: {full.num_waiting} edits wait, at most {full.limit} may."
            raise busy(message, full.retry_after, "queue_full") from None
        except ClosedError:
            raise closed("No worker can run the edit.", SECONDS_TO_LOAD, "unavailable") from None
        self.num_watches += 1
        self.idle.clear()
        try:
            async with Watch(tickets, deadline_ms) as watch:
                yield watch
        finally:
            self.num_watches -= 1
            if not self.num_watches:
                self.idle.set()

    async def drain(self, timeout: float) -> bool:
        """Takes no new work; whether what was accepted is finished in time."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout):
                await self.idle.wait()
        except TimeoutError:
            return False
        return True


def service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


def tenant_of(request: Request) -> str:
    return str(request.scope["tenant"])


def trace_of(request: Request) -> str:
    """Empty, where there is none."""
    return str(request.scope["trace"])


def draw_seed() -> int:
    return secrets.randbelow(2**31)
