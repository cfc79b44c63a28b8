"""State that all routes share: configuration, cluster, limits, metrics, and whether new work is accepted. Knows no
route."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request

from instgenie.adapters.controlnets import ControlNetRegistry
from instgenie.adapters.registry import LoraRegistry
from instgenie.cluster.cluster import Cluster, control_shape_of, layers_of, why_no_controls
from instgenie.cluster.orders import Order
from instgenie.cluster.wire import ModelFacts
from instgenie.errors import ClosedError, ControlError, LoraError
from instgenie.pictures.control import check_word
from instgenie.server.admission import Admission, Admitted
from instgenie.server.bodies.body import Intake
from instgenie.server.bodies.controls import is_word, uses_of
from instgenie.server.bodies.fields import ImageFields
from instgenie.server.bodies.pictures import PictureDecoder
from instgenie.server.config import HttpConfig
from instgenie.server.errors import (
    SECONDS_TO_RECOVER,
    ApiError,
    bad,
    closed,
    echo,
    from_control_error,
    from_lora_error,
    not_found,
)
from instgenie.server.guard.keys import ApiKeys
from instgenie.server.idempotency import Idempotency
from instgenie.server.monitoring.log import note_jobs
from instgenie.server.monitoring.metrics import Metrics
from instgenie.server.monitoring.pulse import Pulse
from instgenie.server.runs import EditRun
from instgenie.server.vocabulary import read_vocabulary
from instgenie.server.warming import Warming
from instgenie.server.watch import Deadline, EditTicket, EditWatch
from instgenie.types import ControlUse, LoraUse, Notes

SECONDS_TO_LOAD = 5
BODIES_AT_ONCE = 8  # bodies of the largest size that may be in memory together


class HttpService:
    def __init__(self, config: HttpConfig, cluster: Cluster, with_traces: bool = False) -> None:
        self.config = config
        self.with_traces = with_traces
        self.cluster = cluster
        self.keys = ApiKeys(config.api_keys)
        self.intake = Intake(config.max_body_bytes, BODIES_AT_ONCE * config.max_body_bytes, config.body_timeout)
        self.decoder = PictureDecoder(config.decode_threads, config.max_pixels)
        self.admission = Admission(cluster, config.max_decoded_bytes, config.decode_threads)
        self.idempotency = Idempotency(cluster, config.keep_bytes, cluster.config.hold_seconds)
        self.metrics = Metrics(cluster)
        loras = cluster.config.loras
        self.loras = LoraRegistry(dict(loras.modules), loras.folder, loras.remote, loras.disk_folder)
        self.controlnets = ControlNetRegistry(dict(cluster.config.controls.modules))
        self.warming = Warming(cluster, config.register_examples)
        self.vocabulary = read_vocabulary(cluster.config.model)
        self.pulse = Pulse(cluster, config.served_model_names[0])
        self.draining = False
        self.is_closing = False
        self.requests: set[asyncio.Task[Any]] = set()  # tasks of requests whose answer has not begun
        self.num_watches = 0

    @property
    def ready(self) -> bool:
        return self.cluster.ready and not self.draining

    @property
    def model_facts(self) -> ModelFacts:
        """Facts about the model; call only once the server is ready."""
        facts = self.cluster.model_facts
        assert facts is not None
        return facts

    def check_open(self) -> None:
        """Raise unless the server accepts new work."""
        if self.draining:
            raise self.shutting_down()
        if not self.cluster.healthy:
            raise closed("No worker can be started.", SECONDS_TO_RECOVER, "unavailable")
        if not self.cluster.ready:
            raise closed("The model is loading.", SECONDS_TO_LOAD, "loading")

    def admit(self, request: Request, num_edits: int) -> Admitted:
        """Take places in the queue for the edits of a request, until it is answered or its client is gone."""
        try:
            admitted = self.admission.admit(num_edits, tenant_of(request))
        except ClosedError:
            raise self.unavailable() from None
        request.scope["on_end"].callback(admitted.leave)
        return admitted

    def check_work(self, steps: int | None, num_pictures: int = 1) -> None:
        """Raise if a request asks for more work than the operator allows."""
        max_steps, max_n = self.config.max_steps, self.config.max_n
        if steps is not None and steps > max(max_steps, self.model_facts.steps):
            raise bad("num_inference_steps", f"The number of steps is {steps}: this server allows {max_steps} at most.")
        if num_pictures > max_n:
            raise bad("n", f"The number of pictures is {num_pictures}: this server allows {max_n} at most.")

    def check_model(self, name: str | None, notes: Notes) -> None:
        """Note that another model was asked for than there is, or refuse it where the operator wants that."""
        served = self.config.served_model_names
        if not name or name in served:
            return
        if self.config.strict_model:
            raise not_found("model", name, "model_not_found", "model")
        notes.append(f"The model {echo(name)} is not served here: {served[0]} made the picture.")

    async def find_loras(self, tenant: str, fields: ImageFields) -> tuple[LoraUse, ...]:
        """The files of the LoRAs that a request names; refuses names that do not exist and files that do not fit."""
        self.loras.table = layers_of(self.cluster)
        uses = [LoraUse(lora["name"], lora["scale"]) for lora in fields.loras]
        try:
            return await self.decoder.run(self.loras.resolve, uses, tenant) if uses else ()
        except LoraError as error:
            raise from_lora_error(error) from None

    def find_controls(self, fields: ImageFields) -> tuple[ControlUse, ...]:
        """The folders of the ControlNets that a request names; refuses names that do not exist, folders that do not
        fit, and images that cannot be made."""
        if not fields.controls:
            return ()
        self.controlnets.shape = control_shape_of(self.cluster)
        if why := why_no_controls(self.cluster):
            raise closed(f"No process of ControlNets can be started: {why}.", SECONDS_TO_RECOVER, "unavailable")
        try:
            for control in fields.controls:
                if is_word(control["image"]):
                    check_word(control["image"])
            return self.controlnets.resolve(uses_of(fields.controls))
        except ControlError as error:
            raise from_control_error(error) from None

    @asynccontextmanager
    async def watch(
        self, orders: Sequence[Order], deadline: Deadline | None, admitted: Admitted, run: EditRun | None = None
    ) -> AsyncIterator[EditWatch]:
        """Submit the orders of an admitted request to the cluster and watch them, as the run of its key if it has one.
        A server that shuts down still takes the edits that it has admitted."""
        if not self.draining:
            self.check_open()
        if deadline:
            deadline.check()
        try:
            tickets: Sequence[EditTicket]
            if run:
                tickets = self.idempotency.submit(run, orders, admitted)
            else:
                tickets = self.cluster.submit(orders, admitted.place)
        except ClosedError:
            raise self.unavailable() from None
        try:
            async with self.follow(tickets, deadline) as watch:
                yield watch
        finally:
            admitted.leave()

    @asynccontextmanager
    async def follow(self, tickets: Sequence[EditTicket], deadline: Deadline | None) -> AsyncIterator[EditWatch]:
        """Watch edits that were submitted."""
        note_jobs(ticket.id for ticket in tickets)
        self.num_watches += 1
        try:
            async with EditWatch(tickets, deadline) as watch:
                yield watch
        finally:
            self.num_watches -= 1

    def unavailable(self) -> ApiError:
        if self.draining:
            return self.shutting_down()
        return closed("No worker can run the edit.", SECONDS_TO_LOAD, "unavailable")

    def shutting_down(self) -> ApiError:
        return closed("The server is shutting down.", self.config.shutdown_timeout, "shutting_down")

    def refuse_rest(self) -> None:
        """Give up all requests whose answer has not begun, whatever they wait for: the gate answers them."""
        self.is_closing = True
        for request in self.requests:
            request.cancel()


def service_of(request: Request) -> HttpService:
    service = request.app.state.service
    assert isinstance(service, HttpService)
    return service


def tenant_of(request: Request) -> str:
    return str(request.scope["tenant"])


def trace_of(request: Request) -> str:
    """Return the traceparent, or an empty string if the request is not traced."""
    return str(request.scope["trace"])


def deadline_of(request: Request, fields: ImageFields) -> Deadline | None:
    """The time at which an edit is given up; None: it is not. Only clients that want no late picture give up."""
    if fields.deadline_ms is None or fields.on_late != "reject":
        return None
    return Deadline(request.scope["start"], fields.deadline_ms)


def draw_seed() -> int:
    return secrets.randbelow(2**31)
