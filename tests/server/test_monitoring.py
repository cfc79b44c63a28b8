"""What operators see: metrics, log lines, engine events."""

import json
import re
from typing import Any

from helpers.serving import ALICE, PICTURE, Running, wait_for
from prometheus_client.parser import text_string_to_metric_families


def test_metrics(server: Running, edited: Any) -> None:
    """Dashboards rely on names, types and labels."""
    with server.http() as client:
        text = client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    kinds = {name.removeprefix("instgenie:"): one.type for name, one in families.items() if "instgenie:" in name}
    assert kinds == {
        "num_requests_running": "gauge", "num_requests_waiting": "gauge", "num_registrations_waiting": "gauge",
        "e2e_request_latency_seconds": "histogram",
        "request_queue_time_seconds": "histogram", "request_success": "counter", "step_time_seconds": "histogram",
        "batch_size": "histogram", "mask_ratio": "histogram", "cache_queries": "counter", "cache_hits": "counter",
        "lora_edits": "counter", "lora_wait_seconds": "counter", "lora_loads": "counter",
        "lora_load_seconds": "counter", "lora_bytes": "gauge",
        "edits": "counter", "cache_fetched_bytes": "counter", "cache_fetch_seconds": "counter",
        "cache_usage_bytes": "gauge", "http_requests": "counter", "step_loop_interruptions": "counter",
        "worker_state": "gauge", "worker_restarts": "counter", "worker_running": "gauge", "worker_jobs": "counter",
        "worker_predicted_seconds": "gauge", "worker_cache_bytes": "gauge", "deadlines": "counter",
        "preemptions": "counter", "prediction_error_ratio": "gauge",
    }  # fmt: skip

    def labels(name: str, label: str) -> set[str]:
        samples = families[f"instgenie:{name}"].samples
        return {sample.labels[label] for sample in samples if label in sample.labels}

    assert labels("request_success", "finished_reason") == {"stop", "abort", "error"}
    assert labels("edits", "reuse") == {"template", "own", "none"}
    for name in ("cache_hits", "cache_fetched_bytes", "cache_fetch_seconds"):
        assert labels(name, "tier") == {"gpu", "host", "disk", "peer", "remote"}
    assert labels("cache_usage_bytes", "tier") == {"gpu", "host", "disk", "remote"}
    assert "\ninstgenie:request_success_total{" in text
    assert "\ninstgenie:cache_hits_total{" in text
    assert "\ninstgenie:cache_queries_total " in text
    assert '\ninstgenie:step_loop_interruptions_total{worker="0"} 0.0' in text
    for name in (
        "e2e_request_latency_seconds_count",
        "step_time_seconds_count",
        "batch_size_count",
        "mask_ratio_count",
    ):
        assert server.metric(f"instgenie:{name}") > 0, name
    assert server.metric('instgenie:request_success_total{finished_reason="stop"}') > 0


def test_log_lines_are_json_and_carry_the_request_id(server: Running) -> None:
    with server.http() as client:
        broken = {"content-type": "multipart/form-data; boundary=x"}
        client.post("/v1/images/edits", content=b"\xc9" * 9, headers=broken)  # the parser logs a warning of its own
        client.get("/v1/models?secret=1", headers={"x-request-id": "look-for-me"})
    wait_for(lambda: "look-for-me" in whole_lines(server))  # the line is written after the answer is sent
    lines = [json.loads(line) for line in whole_lines(server).splitlines()]
    [line] = [line for line in lines if line.get("request_id") == "look-for-me"]
    assert (line["method"], line["path"], line["status"]) == ("GET", "/v1/models", 200)
    assert ALICE not in server.log.read_text()
    assert "secret" not in server.log.read_text()


def test_every_line_about_an_edit_names_its_request_and_its_job(server: Running, edited: Any) -> None:
    """From the acceptance to the answer, so that a request can be followed through the processes."""
    with server.http() as client:
        fields = {"prompt": "a red cat", "num_inference_steps": "2", "n": "2"}
        client.post(
            "/v1/images/edits", files={"image": PICTURE}, data=fields, headers={"x-request-id": "follow-me"}
        ).raise_for_status()
    wait_for(lambda: re.search(r'"answered".*"follow-me"', whole_lines(server)))
    lines = [json.loads(line) for line in whole_lines(server).splitlines() if "follow-me" in line]
    jobs = {line["message"]: [] for line in lines}
    for line in lines:
        jobs[line["message"]] += [line["job"]] if "job" in line else line["jobs"]
    assert set(jobs) == {"accepted", "finished", "answered"}
    assert len(jobs["accepted"]) == 2
    assert set(jobs["accepted"]) == set(jobs["finished"]) == set(jobs["answered"])


def whole_lines(server: Running) -> str:
    """Return the complete lines of the log; the last one may be half-written."""
    return server.log.read_text().rpartition("\n")[0]


def test_engine_events(server: Running) -> None:
    with server.http() as client, client.stream("GET", "/engine/events") as answer:
        line = next(line for line in answer.iter_lines() if line)
    snapshot = json.loads(line.removeprefix("data: "))
    assert snapshot["model"]["name"] == "tiny"
    assert [worker["state"] for worker in snapshot["workers"]] == ["ready"]
    assert ALICE not in line
