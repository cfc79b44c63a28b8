"""Traces of edits: a real server and its processes, and a collector that listens."""

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from helpers.serving import MASK, PICTURE, running_server
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from instgenie.cli import main
from instgenie.telemetry.traces import are_wanted

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
EDIT = {"prompt": "a red cat", "num_inference_steps": "3", "n": "2"}


class Collector(ThreadingHTTPServer):
    """Keeps what it is sent: each span, and the process it comes from."""

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


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


def facts_of(span: Any) -> dict[str, Any]:
    return {fact.key.removeprefix("instgenie."): fact.value for fact in span.attributes}


def test_an_edit_is_traced_across_the_processes(collector: Collector, folders: dict[str, Path], tmp_path: Path) -> None:
    flags = [str(folders["sd_fill"]), "--otlp-traces-endpoint", collector.url]
    with running_server(tmp_path, *flags) as server:
        with server.http() as client:
            for sampled in ("00", "01"):
                headers = {"traceparent": f"00-{TRACE}-{CALLER}-{sampled}", "x-request-id": f"request-{sampled}"}
                files = {"image": PICTURE, "mask": MASK}
                answer = client.post("/v1/images/edits", files=files, data=EDIT, headers=headers)
                assert answer.status_code == 200, answer.text
            client.get("/v1/models")
        assert server.stop() == 0
        assert "Traceback" not in server.log.read_text()
    names = Counter(span.name for span, _ in collector.spans)
    assert names == {"http": 1, "queue": 6, "prepare": 2, "denoise": 2, "finish": 2}
    assert {span.trace_id.hex() for span, _ in collector.spans} == {TRACE}
    [(http, own)] = [(span, process) for span, process in collector.spans if span.name == "http"]
    assert http.parent_span_id.hex() == CALLER
    assert facts_of(http)["request_id"].string_value == "request-01"
    assert facts_of(http)["status"].int_value == 200
    children = [(span, process) for span, process in collector.spans if span is not http]
    assert {span.parent_span_id for span, _ in children} == {http.span_id}
    assert {facts_of(span)["num_steps"].int_value for span, _ in children if span.name == "denoise"} == {3}
    stages = Counter(facts_of(span)["stage"].string_value for span, _ in children if span.name == "queue")
    assert stages == {"prepare": 2, "denoise": 2, "finish": 2}
    places = {span.name: process for span, process in collector.spans}
    assert places["queue"] == own
    assert len(set(places.values())) == 4


def test_who_does_not_ask_for_traces_imports_nothing_of_them() -> None:
    code = """
        import sys
        from instgenie.telemetry import traces
        import instgenie.cluster.local
        traces.record("", "denoise", 1.0)
        traces.close()
        assert not [name for name in sys.modules if name.startswith("opentelemetry")]
        import instgenie.server.serve
        assert "opentelemetry.sdk" not in sys.modules
    """
    lines = "\n".join(line.strip() for line in code.splitlines())
    assert subprocess.run([sys.executable, "-c", lines], check=False).returncode == 0


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_the_variables_of_opentelemetry_decide(environment: dict[str, str], expected: bool) -> None:
    assert are_wanted(environment) == expected


def test_without_the_package_the_server_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    assert main(["serve", "--port", "0", "--otlp-traces-endpoint", "http://127.0.0.1:1"]) == 2
    assert "pip install 'instgenie[otel]'" in capsys.readouterr().err
