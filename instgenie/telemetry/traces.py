"""Traces of edits across the processes, for OpenTelemetry. Knows spans; nothing of OpenTelemetry is imported before the
first of them.

A trace travels as text, W3C's traceparent. The empty text is no trace: whoever gets it does nothing. Collector, service
name and sampling are those of OpenTelemetry's own environment variables.
"""

import os
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

from instgenie.errors import ConfigError

ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
ENDPOINTS = (ENDPOINT, "OTEL_EXPORTER_OTLP_ENDPOINT")


def are_wanted(environment: Mapping[str, str]) -> bool:
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    is_off |= environment.get("OTEL_TRACES_EXPORTER", "otlp") == "none"
    return not is_off and any(environment.get(name) for name in ENDPOINTS)


def check() -> None:
    """Raises if traces cannot be sent."""
    try:
        provider()
    except ImportError:
        raise ConfigError("traces need OpenTelemetry: pip install 'instgenie[otel]' brings it") from None


@cache
def provider() -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "instgenie"}
    made = TracerProvider(resource=Resource.create({**named, "process.pid": os.getpid()}))
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return made


def start_span(name: str, trace: str, **facts: Any) -> Any:
    """A child of the trace; of none, if it is not a traceparent."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract({"traceparent": trace})
    return provider().get_tracer("instgenie").start_span(name, context, **facts)


class RequestSpan:
    """From when a request comes to when it is answered; what its edits do are its children."""

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
    """A span of so many seconds that ended just now, or a while ago."""
    if not trace:
        return
    end = time.time_ns() - round(ended_ago * 1e9)
    start = end - round(max(seconds, 0.0) * 1e9)
    start_span(name, trace, start_time=start, attributes=named(attributes)).end(end)


def named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"instgenie.{name}": value for name, value in attributes.items() if value is not None}


def close() -> None:
    """Sends what is still here."""
    if provider.cache_info().currsize:
        provider().shutdown()
