"""An OpenTelemetry collector for tests, on a free port of this machine."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector(ThreadingHTTPServer):
    """Keeps each span it receives, with the pid of the process that sent it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.spans: list[tuple[Any, int]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"


class Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        for group in sent.resource_spans:
            facts = {fact.key: fact.value for fact in group.resource.attributes}
            assert facts["service.name"].string_value == "instgenie"
            spans = [span for scope in group.scope_spans for span in scope.spans]
            self.server.spans += [(span, facts["process.pid"].int_value) for span in spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def running_collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


def facts_of(span: Any) -> dict[str, Any]:
    return {fact.key.removeprefix("instgenie."): fact.value for fact in span.attributes}
