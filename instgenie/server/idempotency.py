"""Idempotency keys: requests of one tenant with the same key are one request. The first one runs; the others follow it,
or get its answer, which is kept for a while. Another request with a key that is taken is refused.

The key is the header `Idempotency-Key` or the field `idempotency_key`. Between fronts the ledger knows who has a key,
and the worker has the answer, or the latents of an edit whose front has died.
"""

import asyncio
import hashlib
import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from instgenie.cluster.clerk import order_key
from instgenie.cluster.cluster import Cluster
from instgenie.cluster.ledger import KeyClaim
from instgenie.cluster.orders import Order
from instgenie.server.admission import Admitted
from instgenie.server.bodies.fields import MAX_KEY, ImageFields
from instgenie.server.errors import NO_RETRY, ApiError, bad, echo
from instgenie.server.runs import DepositedRequest, EditRun, RunTicket, read_request
from instgenie.telemetry.logs import request_id

HEADER = "idempotency-key"
VALID_KEY = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")
DELIVERY = {
    "stream", "stream_progress", "partial_images", "response_format", "deadline_ms", "on_late", "priority",
    "user", "safety_identifier", "idempotency_key",
}  # fmt: skip  # fields that change when and how an answer is sent; what it shows is that of the first request


class Idempotency:
    def __init__(
        self, cluster: Cluster, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Answers are kept up to a number of bytes and of seconds; the oldest go first."""
        self.cluster = cluster
        self.max_bytes, self.seconds, self.clock = max_bytes, seconds, clock
        self.num_repeated = 0
        self._runs: dict[str, EditRun] = {}  # by name
        self._kept: OrderedDict[str, EditRun] = OrderedDict()  # those that have ended, the oldest first
        self._num_bytes = 0  # of those
        self._names: dict[str, str] = {}  # by the name of the first request

    async def enter(self, request: Request, tenant: str, claim: KeyClaim) -> EditRun:
        """The run of a key. A new one is to be submitted; if the request ends before that, the key is free again."""
        self._drop_old()
        name, fingerprint = claim.name, claim.fingerprint
        while run := self._runs.get(name):
            if run.fingerprint != fingerprint:
                raise reused()
            if await asyncio.shield(run.is_opened):
                self.num_repeated += 1
                return run
        first = claim.request_id or digest(tenant, "request", request_id.get())
        run = self._runs[name] = EditRun(name, fingerprint, first)
        self._names[run.request_name] = name
        request.scope["on_end"].callback(self._abandon, run)
        known = await self.cluster.clerk.claim(KeyClaim(name, fingerprint, run.request_name))
        if known.fingerprint != fingerprint:
            raise reused()
        run.home = known.worker
        if known.is_done and await self._collect(known, run):
            self.num_repeated += 1
        return run

    def submit(self, run: EditRun, orders: Sequence[Order], admitted: Admitted) -> list[RunTicket]:
        """Run the edits of the first request. What was admitted for them is held until they end."""
        named = [replace(order, key=order_key(run.name, index), home=run.home) for index, order in enumerate(orders)]
        tickets = self.cluster.submit(named, admitted.place)
        held = admitted.hand_over()
        self._deposit_request(run)
        run.open(tickets, [order.size for order in orders])
        run.tasks = [asyncio.create_task(run.follow(index, ticket)) for index, ticket in enumerate(tickets)]
        asyncio.gather(*run.tasks, return_exceptions=True).add_done_callback(lambda _: self._ended(run, held))
        return run.tickets

    def _deposit_request(self, run: EditRun) -> None:
        """Leave a request with its worker, so that another front can go on with it."""
        claim = self.cluster.clerk.claims.get(run.name)
        if run.request and claim and claim.worker is not None:
            self.cluster.deposits.put(claim.worker, request_name(run.name), run.request.frames())
        run.request = None

    async def request_of(self, claim: KeyClaim) -> DepositedRequest | None:
        """The request of a key, as the front that took it has left it with the worker."""
        if claim.worker is None:
            return None
        frames = await self.cluster.deposits.get(claim.worker, request_name(claim.name))
        return None if frames is None else read_request(frames)

    async def find(self, tenant: str, id: str) -> EditRun | KeyClaim | None:
        """The run of a key or of a request's id, if this front has it or can get it; else what is known of it."""
        self._drop_old()
        names = digest(tenant, id), digest(tenant, "request", id)
        run = self._runs.get(names[0]) or self._runs.get(self._names.get(names[1], ""))
        if run:
            return run
        for name in names:
            if claim := await self.cluster.clerk.find(name):
                run = EditRun(claim.name, claim.fingerprint, claim.request_id)
                return run if claim.is_done and await self._collect(claim, run) else claim
        return None

    async def _collect(self, claim: KeyClaim, run: EditRun) -> bool:
        """Get the answer that another front has left with a worker."""
        if claim.worker is None:
            return False
        frames = await self.cluster.deposits.get(claim.worker, claim.name)
        if frames is None:
            return False
        run.restore(frames)
        self._keep(run)
        return True

    def _ended(self, run: EditRun, held: Admitted) -> None:
        held.leave()
        if not run.is_whole:
            self._forget(run)
            self.cluster.clerk.release(run.name)
            return
        worker = run.results[0].facts.worker
        if self.cluster.deposits.put(worker, run.name, run.frames()):
            self.cluster.clerk.finish(run.name)
        self._keep(run)

    def _keep(self, run: EditRun) -> None:
        if (known := self._runs.get(run.name)) and known is not run:
            self._forget(known)
        run.until = self.clock() + self.seconds
        self._runs[run.name] = self._kept[run.name] = run
        self._num_bytes += run.num_bytes
        self._names[run.request_name] = run.name
        self._drop_old()
        asyncio.get_running_loop().call_later(self.seconds + 1, self._drop_old)

    def _drop_old(self) -> None:
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if self._num_bytes <= self.max_bytes and self.clock() < oldest.until:
                return
            self._forget(oldest)
            self.cluster.clerk.forget(oldest.name)

    def _abandon(self, run: EditRun) -> None:
        """Free the key of a request that ended before its edits were submitted."""
        if not run.is_opened.done():
            self._forget(run)
            self.cluster.clerk.release(run.name)
            run.is_opened.set_result(False)

    def _forget(self, run: EditRun) -> None:
        if self._runs.get(run.name) is run:
            del self._runs[run.name]
            self._names.pop(run.request_name, None)
        if self._kept.get(run.name) is run:
            del self._kept[run.name]
            self._num_bytes -= run.num_bytes


def key_of(request: Request, fields: ImageFields) -> str | None:
    """The key of a request; None: it is like no other."""
    sent = request.headers.get(HEADER)
    for given in (sent, fields.idempotency_key):
        if given is not None and not (VALID_KEY.fullmatch(given) and len(given) <= MAX_KEY):
            message = f"The idempotency key is {echo(given)}: 1 to {MAX_KEY} printable ASCII characters are expected."
            raise bad("idempotency_key", message)
    if sent and fields.idempotency_key and sent != fields.idempotency_key:
        message = f"The header has the idempotency key {echo(sent)}, the body {echo(fields.idempotency_key)}."
        raise bad("idempotency_key", message)
    return sent or fields.idempotency_key


def fingerprint_of(kind: str, fields: ImageFields, *pictures: bytes | None) -> str:
    """A digest of all that the answer shows; what only changes how it is sent does not count."""
    shown = sent_fields(fields)
    parts = [hashlib.sha256(picture).hexdigest() if picture is not None else "" for picture in pictures]
    return digest(kind, json.dumps(shown, sort_keys=True), *parts)


def digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


def sent_fields(fields: ImageFields) -> dict[str, Any]:
    """The fields as a client could have sent them, without those that change how an answer is sent."""
    return fields.model_dump(mode="json", exclude=DELIVERY, exclude_none=True)


def request_name(name: str) -> str:
    return f"{name}/request"


def reused() -> ApiError:
    message = "The idempotency key belongs to another request: a repeated request has the same body."
    return ApiError(422, message, "idempotency_key_reused", "idempotency_key", NO_RETRY)
