"""Traces: when they are recorded, and what they need. tests/server/test_lifecycle.py traces edits of a real server."""

import os
import subprocess
import sys
from unittest.mock import MagicMock

import pytest

from instgenie.cli import main
from instgenie.telemetry import traces
from instgenie.telemetry.traces import are_wanted


def test_opentelemetry_is_imported_only_if_traces_are_wanted() -> None:
    code = """
        import sys
        from instgenie.telemetry import traces
        import instgenie.cluster.cluster
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


def test_a_span_names_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(traces, "start_span", lambda name, trace, **facts: started.append(facts) or MagicMock())
    monkeypatch.setenv(traces.NODE, "10.0.0.7-aaaaaa")
    traces.record("00-1-2-01", "denoise", 1.0, attempt=1)
    monkeypatch.delenv(traces.NODE)
    traces.record("00-1-2-01", "denoise", 1.0, attempt=1)
    attributes = [facts["attributes"] for facts in started]
    assert attributes == [{"instgenie.node": "10.0.0.7-aaaaaa", "instgenie.attempt": 1}, {"instgenie.attempt": 1}]


def test_without_the_package_the_server_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    assert main(["serve", "--port", "0", "--otlp-traces-endpoint", "http://127.0.0.1:1"]) == 2
    assert "pip install 'instgenie[otel]'" in capsys.readouterr().err
