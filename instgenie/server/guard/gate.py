"""The gate that every request passes: it assigns a request id, refuses foreign hosts and origins, and writes a log
line. Behind it the key check finds the tenant. Knows no route."""

import asyncio
import re
import secrets
import time
from contextlib import ExitStack
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from instgenie.server.errors import ApiError, error_response
from instgenie.server.guard.hosts import HostGuard
from instgenie.server.monitoring.log import begin_request, log, say
from instgenie.server.service import HttpService
from instgenie.telemetry.traces import RequestSpan

OPEN_PATHS = frozenset({"/health", "/ready", "/", "/engine"})
OPEN_FOLDER = "/static/"  # the pages' files, the same for everyone
VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
STATUS_GONE = 499


class Gate:
    def __init__(self, app: ASGIApp, service: HttpService) -> None:
        self.app = app
        self.service = service
        config = service.config
        self.guard = HostGuard(config.host, config.allowed_hosts, config.allowed_origins, bool(config.api_keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope.setdefault("start", time.monotonic())
        headers = Headers(scope=scope)
        visit = Visit(scope, choose_id(headers.get("x-request-id")), send, self.service)
        begin_request(visit.id)
        if self.service.with_traces and scope["method"] == "POST":
            visit.span = RequestSpan(headers.get("traceparent", ""))
        on_end = scope["on_end"] = ExitStack()  # releases what the request holds, however it ends
        scope["trace"] = visit.span.trace if visit.span else ""
        self.service.requests.add(visit.task)
        try:
            self.guard.check(scope, headers)
            await self.app(scope, receive, visit.send)
        except ApiError as refused:
            await error_response(refused)(scope, receive, visit.send)
        except asyncio.CancelledError:
            if not self.service.is_closing:
                raise
            visit.task.uncancel()
            if not visit.is_answered:
                await error_response(self.service.shutting_down())(scope, receive, visit.send)
        except Exception:  # the framework has already answered with 500 if it could
            log.exception("unhandled error in a request")
        finally:
            on_end.close()
            self.service.requests.discard(visit.task)
            visit.log()
            visit.end_span()


class KeyCheck:
    """Finds the tenant of each request, and refuses those without a valid key."""

    def __init__(self, app: ASGIApp, service: HttpService) -> None:
        self.app = app
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            scope["tenant"] = self.tenant(scope["path"], Headers(scope=scope))
        except ApiError as refused:
            await error_response(refused)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def tenant(self, path: str, headers: Headers) -> str:
        is_open = path in OPEN_PATHS or path.startswith(OPEN_FOLDER)
        return "" if is_open else self.service.keys.tenant(headers)


class Visit:
    """One request on its way through the server."""

    def __init__(self, scope: Scope, request_id: str, send: Send, service: HttpService) -> None:
        self.scope = scope
        self.id = request_id
        self.service = service
        self.task = running_task()
        self.start = time.perf_counter()
        self.status = STATUS_GONE
        self.num_bytes = 0
        self.span: RequestSpan | None = None  # None unless the request may run edits and traces are wanted
        self._send = send

    @property
    def is_answered(self) -> bool:
        """True once the answer has begun."""
        return self.status != STATUS_GONE

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.service.requests.discard(self.task)
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.id
            headers["x-content-type-options"] = "nosniff"
        self.num_bytes += len(message.get("body", b""))
        await self._send(message)

    def log(self) -> None:
        route = getattr(self.scope.get("route"), "path", "none")
        self.service.metrics.answered(self.scope["method"], route, self.status)
        say(
            "answered",
            method=self.scope["method"][:20],
            path=self.scope["raw_path"].decode("ascii", "backslashreplace")[:200],
            status=self.status,
            seconds=round(time.perf_counter() - self.start, 4),
            bytes=self.num_bytes,
            tenant=self.scope.get("tenant", "")[:8],
        )

    def end_span(self) -> None:
        if self.span:
            route = getattr(self.scope.get("route"), "path", "none")
            self.span.end(method=self.scope["method"], route=route, status=self.status, request_id=self.id)


def running_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def choose_id(given: str | None) -> str:
    return given if given and VALID_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
