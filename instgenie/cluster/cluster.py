"""A cluster: many processes that work as one. Lives in the HTTP process and imports no torch.

Its parts: a launcher starts processes, the supervisor keeps them running, the coordinator moves edits and templates
through them.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

from instgenie.adapters.controlnets import ControlShape
from instgenie.adapters.layers import LayerTable
from instgenie.cluster import wire
from instgenie.cluster.clerk import Clerk
from instgenie.cluster.config import ClusterConfig, resolve
from instgenie.cluster.entries import Ticket
from instgenie.cluster.front import Place
from instgenie.cluster.launch import Launcher, LocalLauncher
from instgenie.cluster.ledger import Ledger, LocalLedger
from instgenie.cluster.orders import Order, TemplateStatus
from instgenie.cluster.processes import Worker, are_broken, make_workers
from instgenie.cluster.quota import check_quota
from instgenie.cluster.status import ClusterStatus, NodeStatus, Observer, WorkerStatus
from instgenie.cluster.supervisor import Supervisor
from instgenie.errors import ClosedError, EditError
from instgenie.pictures.picture import check_edit
from instgenie.types import Pixels

SECONDS_TO_WRITE = (
    5.0  # of the time for a stop that are left to the processes, if it is not shorter than four times this
)


class Cluster:
    def __init__(self, config: ClusterConfig, launcher: Launcher | None = None, ledger: Ledger | None = None) -> None:
        """Workers are child processes on this machine, unless another launcher is given. Fronts that share their
        workers share a ledger."""
        launcher = launcher or LocalLauncher()
        self.config = resolve(config, launcher.worker_bytes(len(config.devices)))
        self.workers = make_workers(self.config)
        self._supervisor = Supervisor(self.config, launcher, self.workers)
        self._coordinator = self._supervisor.coordinator
        self.clerk = Clerk(ledger or LocalLedger(config.hold_seconds))
        self.deposits = self._coordinator.deposits
        self._coordinator.placement.on_placed = self.clerk.placed
        self.forgetting = self._coordinator.library.forgetting
        self.predict = self._coordinator.front.predict
        self.predictor = self._coordinator.front.predictor
        self._is_open = False
        self.nodes: tuple[NodeStatus, ...] = ()  # as the launcher knows them
        self.fronts: tuple[str, ...] = ()
        self.is_abandoned = False  # True if whatever gives it workers has ended for good

    # life

    async def start(self) -> None:
        """Open the socket and return; workers load in the background."""
        self._supervisor.start()
        self._is_open = True

    async def stop(self, timeout: float) -> bool:
        """Take no more edits, finish the accepted ones, end all processes: all of it within the timeout. Return whether
        every edit was worked on to its end. The rest of the timeout, and a part of it always, is left to the processes,
        which write what is worth keeping."""
        self._is_open = False
        end = time.monotonic() + timeout
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout - min(SECONDS_TO_WRITE, timeout / 4)):
                await self._supervisor.until(lambda: not self._coordinator.has_edits)
        is_drained = not self._coordinator.has_edits
        self._coordinator.recovery.give_up()
        self.clerk.close()
        await self._supervisor.stop(max(end - time.monotonic(), 0.0))
        return is_drained

    @property
    def ready(self) -> bool:
        """True if an edit would be worked on at once."""
        return self._is_open and any(worker.is_ready for worker in self.workers)

    @property
    def healthy(self) -> bool:
        """True if a worker is ready or may become ready soon."""
        return self._supervisor.is_running and not self.is_abandoned and not are_broken(self.workers)

    @property
    def has_failed(self) -> bool:
        """True if no worker will ever start."""
        have_failed = (worker.state == "failed" for worker in self.workers if not worker.is_waiting)
        return not self._supervisor.is_running or (next(have_failed, False) and all(have_failed))

    @property
    def failure(self) -> str:
        """Why a worker cannot start; empty if all can."""
        return next((process.message for process in self._supervisor.processes if process.state == "failed"), "")

    @property
    def problems(self) -> list[str]:
        """What keeps workers from becoming ready, without reasons, which may name files."""
        broken = [process for process in self._supervisor.processes if process.is_broken]
        found = [
            f"worker {process.worker}: its {process.role} process failed to start "
            f"{process.num_failed_starts} times in a row"
            for process in broken
        ]
        if self.is_abandoned:
            found.insert(0, "the controller of the cluster has ended: a server that is started anew makes another")
        return found if self._supervisor.is_running else ["the supervision of the workers has ended", *found]

    @property
    def model_facts(self) -> wire.ModelFacts | None:
        """None until a worker is ready."""
        return self._coordinator.naming.model_facts

    async def until_ready(self) -> None:
        """Wait for the first worker. Raises if none can start."""
        await self._supervisor.until(lambda: self.ready or self.has_failed or not self._is_open)
        self._check_open()

    @property
    def host_bytes(self) -> int:
        """Main memory for activations, of all workers."""
        told = self.config.cache.host_bytes
        return sum(told if worker.host_bytes is None else worker.host_bytes for worker in self.workers)

    # edits

    def reserve(self, num_edits: int, tenant: str = "") -> Place:
        """Take places in the queue for edits that will be submitted soon. Raises if there are too few."""
        self._check_open()
        return self._coordinator.front.reserve(num_edits, tenant)

    def submit(self, orders: Sequence[Order], place: Place | None = None) -> list[Ticket]:
        """Accept the edits of one request, in the places reserved for them if there are any; they share a worker and a
        batch. Edits with places are also taken while the cluster stops. Raises if a parameter is out of range."""
        self._check_open(has_place=place is not None and place.is_held)
        for order in orders:
            # the model's own defaults are in range
            check_edit(order.wish.edit(order.picture, order.mask, 1, 1.0, order.control_images))
            if order.wish.reuse == "template" and (why := self.why_no_reuse(order)):
                raise EditError(f"the edit cannot use a template: {why}")
        return self._coordinator.accept(orders, place)

    def why_no_reuse(self, order: Order) -> str:
        """Why an edit cannot use a template, whatever is registered; empty if it can."""
        return order.obstacle or ("" if self.config.reuse else "the server runs without reuse")

    @property
    def retry_after(self) -> float:
        """Seconds after which an edit that was refused may find room."""
        return self._coordinator.front.retry_after

    # templates

    async def register(
        self, tenant: str, picture: Pixels, steps: int | None = None, guidance: float | None = None
    ) -> TemplateStatus:
        """Queue a template; a worker registers it when it is idle. Waits until the model is known."""
        await self.until_ready()
        order = self._coordinator.naming.template_order(tenant, picture, steps, guidance)
        return self._coordinator.register(order).status()

    def check_quota(self, tenant: str) -> None:
        """Raise unless a tenant may ask for one more template."""
        check_quota(self._coordinator.library.templates.values(), tenant, self.config.max_templates)

    def templates(self, tenant: str) -> list[TemplateStatus]:
        records = self._coordinator.library.templates.values()
        return [record.status() for record in records if record.order.tenant == tenant]

    def template(self, tenant: str, id: str) -> TemplateStatus | None:
        return next((status for status in self.templates(tenant) if status.id == id), None)

    async def picture(self, tenant: str, id: str) -> Pixels | None:
        """The picture of a template; None if there is none any more. Raises if no worker can look for it now."""
        record = self._coordinator.library.templates.get(id)
        if record is None or record.order.tenant != tenant:
            return None
        record.used_at = time.monotonic()
        if record.order.picture is not None:
            return record.order.picture
        return await asyncio.shield(self._coordinator.archive.recall(record))

    async def forget(self, tenant: str, id: str) -> bool:
        """Delete a template: from here on it is not used any more. Return whether there was one, or one that is still
        being deleted."""
        if self.template(tenant, id) is None:
            return self.forgetting.tenant_of(id) == tenant
        self._coordinator.forget(self._coordinator.library.templates[id])
        return True

    # status

    def observe(self, observer: Observer) -> None:
        self._coordinator.reporter.observers.append(observer)

    def status(self) -> ClusterStatus:
        edits, reporter = self._coordinator.edits, self._coordinator.reporter
        return ClusterStatus(
            workers=tuple(self._worker_status(worker) for worker in self.workers),
            services=tuple(process.status for process in self._supervisor.services),
            nodes=self.nodes,
            fronts=self.fronts,
            num_waiting=edits.num_waiting + self._coordinator.front.num_reserved,
            num_running=edits.num_running,
            num_registrations_waiting=self._coordinator.library.registrations.num_waiting,
            num_finished=reporter.counts["finished"],
            num_failed=reporter.counts["failed"],
            num_cancelled=reporter.counts["cancelled"],
            num_cache_queries=reporter.counts["queries"],
            cache_hits=dict(reporter.cache_hits),
        )

    def _worker_status(self, worker: Worker) -> WorkerStatus:
        entries = worker.edits.values()
        return WorkerStatus(
            index=worker.index,
            device=worker.device,
            node=worker.node,
            is_draining=worker.is_draining,
            num_fronts=worker.num_fronts,
            state=worker.state,
            processes=tuple(process.status for process in worker.processes.values()),
            running=tuple(entry.status(worker.load.alone_seconds(entry.id)) for entry in entries if entry.is_running),
            num_waiting=sum(entry.is_waiting for entry in entries),
            steps_per_second=worker.steps_per_second,
            last_step_seconds=worker.last_step_seconds,
            num_steps=worker.num_steps,
            num_interruptions=worker.num_interruptions,
            num_joined=worker.num_joined,
            predicted_seconds=worker.load.seconds,
            seconds_per_step=worker.load.pace.seconds(1, worker.load.costs.per_step),
            seconds_per_token=worker.load.seconds_per_token,
            templates=tuple(worker.load.templates),
            tier_bytes=dict(worker.tier_bytes),
            lora_bytes=dict(worker.lora_bytes),
        )

    def _check_open(self, has_place: bool = False) -> None:
        if not (self._is_open or has_place):
            raise ClosedError("the server is stopping: it takes no more edits")
        if self.has_failed:
            raise ClosedError(f"no worker can start: {self.failure}")


def layers_of(cluster: Cluster) -> LayerTable | None:
    """The layers that LoRAs may patch; None until a worker has told them."""
    return cluster._coordinator.naming.layer_table


def control_shape_of(cluster: Cluster) -> ControlShape | None:
    """What ControlNets must have in common with the model; None until a worker has told it."""
    return cluster._coordinator.naming.control_shape


def why_no_controls(cluster: Cluster) -> str:
    """Why a process of ControlNets cannot be started; empty: all can."""
    services = (process for process in cluster._supervisor.services if process.role == "controlnet")
    return next((process.message for process in services if process.is_broken), "")


def has_asked_for(cluster: Cluster, order: Order) -> bool:
    """True if the client asked for the template that an edit would use, and its registration did not fail."""
    coordinator = cluster._coordinator
    record = coordinator.library.templates.get(coordinator.naming.template_order_of(order).id)
    return record is not None and record.is_asked_for and record.state != "failed"


def loading_bytes(cluster: Cluster) -> dict[str, tuple[int, int]]:
    """Bytes of weights that processes have brought to their devices, and of how many, by the names of the processes."""
    return {process.name: process.loading for process in cluster._supervisor.processes if process.loading}
