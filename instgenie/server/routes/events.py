"""Answers with server-sent events: progress if the client asks for it, partial pictures, then finished ones. Nothing is
sent before the cluster accepts the edits, so a refusal is still a plain answer."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from instgenie.cluster.orders import Event, Finished, Order, Partial, Queued, Stepped
from instgenie.server.admission import Admitted
from instgenie.server.bodies.answers import (
    EventPrefix,
    completed_event,
    error_event,
    event,
    partial_event,
    sending_event,
)
from instgenie.server.bodies.fields import ImageFields
from instgenie.server.errors import ApiError
from instgenie.server.routes.sending import send_pieces
from instgenie.server.runs import EditRun
from instgenie.server.service import HttpService, deadline_of
from instgenie.server.watch import EditWatch, unless_gone
from instgenie.types import Notes

SECONDS_BETWEEN_KEEPALIVES = 10.0
REPEATED = {"idempotent-replayed": "true"}
KEEPALIVE = b": still working\n\n"


@dataclass(frozen=True, eq=False)
class Submission:
    """The edits of a request that are ready to be submitted, and what their answer needs."""

    request: Request
    service: HttpService
    admitted: Admitted
    orders: Sequence[Order]
    fields: ImageFields
    notes: Notes
    prefix: EventPrefix
    run: EditRun | None = None  # of its idempotency key

    def watch(self) -> AbstractAsyncContextManager[EditWatch]:
        """Submit the edits and watch them until the request's deadline."""
        deadline = deadline_of(self.request, self.fields)
        return self.service.watch(self.orders, deadline, self.admitted, self.run)

    def size(self, index: int) -> tuple[int, int]:
        """(height, width) of a picture."""
        return self.orders[index].size


@dataclass(frozen=True, eq=False)
class Repetition:
    """A request that follows the run of an earlier one."""

    request: Request
    service: HttpService
    run: EditRun
    fields: ImageFields
    notes: Notes
    prefix: EventPrefix

    def watch(self) -> AbstractAsyncContextManager[EditWatch]:
        deadline = deadline_of(self.request, self.fields)
        return self.service.follow(self.run.tickets, deadline)

    def size(self, index: int) -> tuple[int, int]:
        return self.run.sizes[index]


class EventStream(Response):
    def __init__(self, submission: Submission | Repetition) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"} | answer_headers(submission)
        super().__init__(media_type="text/event-stream", headers=headers)
        del self.headers["content-length"]
        self.submission = submission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.submission.watch() as watch:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await unless_gone(self.submission.request, self.send_events(watch, send))
            except ApiError:  # the client is gone; failures of edits are events
                return
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def send_events(self, watch: EditWatch, send: Send) -> None:
        while watch.open:
            happened = await watch.next(SECONDS_BETWEEN_KEEPALIVES)
            if happened is None:
                await send_pieces(send, KEEPALIVE)
                continue
            if isinstance(happened[1], Partial | Finished):  # pictures are encoded beside the event loop
                chunk = await self.submission.service.decoder.run(self.chunk_for, *happened)
            else:
                chunk = self.chunk_for(*happened)
            if chunk and isinstance(happened[1], Finished) and self.submission.fields.stream_progress:
                await send_pieces(send, sending_event(happened[0], len(chunk)))
            if chunk:
                await send_pieces(send, chunk)
        # OpenAI's clients stop at the first error, so errors come after the pictures
        for index, error in sorted(watch.errors.items()):
            await send_pieces(send, error_event(index, error))

    def chunk_for(self, index: int, happened: Event) -> bytes | None:
        """Return the chunk to send, if any: only clients that asked for progress get other events than OpenAI's."""
        given = self.submission
        match happened:
            case Partial():
                height, width = given.size(index)
                size = f"{width}x{height}"
                return partial_event(given.prefix, index, happened.index, happened.picture, size, given.fields)
            case Finished():
                return completed_event(given.prefix, index, happened, given.fields, given.notes)
            case Queued(position, left, predicted) if given.fields.stream_progress:
                queued = {"index": index, "position": position, "predicted_ms": round(1000 * predicted)}
                return event("instgenie.queued", queued | time_left(left))
            case Stepped(step, num_steps, left) if given.fields.stream_progress:
                done = {"step": step, "num_steps": num_steps}
                return event("instgenie.step", {"index": index} | done | time_left(left))
        return None


def answer_headers(submission: Submission | Repetition) -> dict[str, str]:
    """Say that an answer is that of an earlier request."""
    return REPEATED if isinstance(submission, Repetition) else {}


def time_left(seconds: float | None) -> dict[str, float | None]:
    return {"seconds_left": None if seconds is None else round(seconds, 3)}
