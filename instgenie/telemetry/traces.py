"""Traces of edits across processes, for OpenTelemetry, which is imported when the first span is made.

A trace travels as text, a W3C traceparent. An empty text means no trace, and nothing is recorded. Collector, service
name and sampling are set by OpenTelemetry's own environment variables.
"""

import os
import socket
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

from instgenie.errors import ConfigError

ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
NODE = "INSTGENIE_NODE"  # set for processes that run on a node of a cluster: its name
ENDPOINTS = (ENDPOINT, "OTEL_EXPORTER_OTLP_ENDPOINT")


def are_wanted(environment: Mapping[str, str]) -> bool:
    """True if the environment names a collector and does not turn traces off."""
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    is_off |= environment.get("OTEL_TRACES_EXPORTER", "otlp") == "none"
    return not is_off and any(environment.get(name) for name in ENDPOINTS)


def check() -> None:
    """Raise a ConfigError if traces cannot be sent."""
    try:
        provider()
    except ImportError:
        raise ConfigError("traces need OpenTelemetry: install it with pip install 'instgenie[otel]'") from None


@cache
def provider() -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "instgenie"}
    where: dict[str, Any] = {"host.name": socket.gethostname(), "process.pid": os.getpid()}
    made = TracerProvider(resource=Resource.create({**named, **where}))
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return made


def start_span(name: str, trace: str, **facts: Any) -> Any:
    """Start a child span of the trace, or a root span if the text is not a traceparent."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract({"traceparent": trace})
    return provider().get_tracer("instgenie").start_span(name, context, **facts)


class RequestSpan:
    """A span from the arrival of a request to its answer; the spans of its edits are its children."""

    def __init__(self, trace: str) -> None:
        from opentelemetry.trace import SpanKind

        self._span = start_span("http", trace, kind=SpanKind.SERVER)

    @property
    def trace(self) -> str:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def end(self, **attributes: Any) -> None:
        self._span.set_attributes(named(attributes))
        self._span.end()


def record(trace: str, name: str, seconds: float, ended_ago: float = 0.0, **attributes: Any) -> None:
    """Record a span of `seconds` that ended now, or `ended_ago` seconds ago; it names the node, if there are nodes."""
    if not trace:
        return
    end = time.time_ns() - round(ended_ago * 1e9)
    start = end - round(max(seconds, 0.0) * 1e9)
    start_span(name, trace, start_time=start, attributes=named({"node": os.environ.get(NODE)} | attributes)).end(end)


def named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"instgenie.{name}": value for name, value in attributes.items() if value is not None}


def close() -> None:
    """Send the spans that are still buffered."""
    if provider.cache_info().currsize:
        provider().shutdown()
