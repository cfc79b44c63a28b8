"""The life of a server: it traces edits, stops gracefully, and leaves its templates to the next server.

The first server does all its work in one fixture, since starting servers is slow; the tests look at the outcome.
"""

import base64
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from helpers.collector import facts_of, running_collector
from helpers.serving import ALICE, BOB, MASK, PICTURE, Running, mask, picture, png, register, running_server, wait_for

from instgenie.pictures.picture import open_picture

STEPS = "4"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
# quality=exact: these edits reuse nothing, so their picture does not become a template
TRACED = {"prompt": "a red cat", "num_inference_steps": "3", "n": "2", "quality": "exact"}
LONG = {"prompt": "a cat", "num_inference_steps": "200", "quality": "exact"}


@dataclass
class FirstLife:
    """What the first server did, and what it left."""

    flags: list[str]
    cache: Path
    ids: dict[str, str] = field(default_factory=dict)  # of a template, by key
    spans: list[tuple[Any, int]] = field(default_factory=list)  # with the pid of their process
    draining: httpx.Response | None = None  # of /ready, after SIGTERM
    refused: httpx.Response | None = None  # of an edit sent after SIGTERM
    healthy: httpx.Response | None = None  # of /health, after SIGTERM
    accepted: list[httpx.Response] = field(default_factory=list)  # of the edit that ran at SIGTERM
    exit_code: int | None = None
    log: str = ""


@pytest.fixture(scope="module")
def first_life(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> FirstLife:
    folder = tmp_path_factory.mktemp("life")
    flags = [str(folders["sd_fill"]), "--cache-dir", str(folder / "cache"), "--api-key", ALICE, "--api-key", BOB]
    flags += ["--plan", "exact", "--gpu-cache-gib", "1"]
    life = FirstLife(flags, folder / "cache")
    with running_collector() as collector:
        extra = ["--otlp-traces-endpoint", collector.url, "--shutdown-timeout", "60"]
        with running_server(folder, *flags, *extra) as server:
            for key in (ALICE, BOB):
                life.ids[key] = register(server, png(picture(seed=1)), key=key, num_inference_steps=STEPS)
            send_traced(server)
            wait_for(lambda: len(list(life.cache.glob("*/picture.safetensors"))) == 2)
            stop_during_an_edit(server, life)
            life.log = server.log.read_text()
        life.spans = collector.spans
    return life


def edit(server: Running, fields: dict[str, str], **headers: str) -> httpx.Response:
    with server.http() as client:
        return client.post("/v1/images/edits", files={"image": PICTURE, "mask": MASK}, data=fields, headers=headers)


def send_traced(server: Running) -> None:
    """Send the same edits twice: first in a trace that is not sampled, then in one that is."""
    for sampled in ("00", "01"):
        headers = {"traceparent": f"00-{TRACE}-{CALLER}-{sampled}", "x-request-id": f"request-{sampled}"}
        answer = edit(server, TRACED, **headers)
        assert answer.status_code == 200, answer.text
    with server.http() as client:
        client.get("/v1/models")


def stop_during_an_edit(server: Running, life: FirstLife) -> None:
    running = threading.Thread(target=lambda: life.accepted.append(edit(server, LONG)))
    running.start()
    while server.metric("instgenie:num_requests_running") + server.metric("instgenie:num_requests_waiting") == 0:
        time.sleep(0.02)
    server.process.terminate()
    with server.http() as client:
        while (ready := client.get("/ready")).status_code == 200:
            time.sleep(0.02)
        life.draining = ready
        life.refused = client.post("/v1/images/edits", files={"image": PICTURE}, data=LONG)
        life.healthy = client.get("/health")
    running.join()
    life.exit_code = server.process.wait(60)


def test_after_sigterm_accepted_edits_finish_and_new_ones_are_refused(first_life: FirstLife) -> None:
    assert first_life.draining is not None
    assert first_life.refused is not None
    assert first_life.healthy is not None
    assert first_life.draining.json() == {"status": "draining"}
    assert (first_life.refused.status_code, first_life.refused.json()["error"]["code"]) == (503, "shutting_down")
    assert int(first_life.refused.headers["retry-after"]) >= 1
    assert first_life.healthy.status_code == 200
    assert [answer.status_code for answer in first_life.accepted] == [200]
    assert first_life.exit_code == 0
    assert "Traceback" not in first_life.log


def test_an_edit_is_traced_across_the_processes(first_life: FirstLife) -> None:
    spans = [(span, process) for span, process in first_life.spans if span.trace_id.hex() == TRACE]
    names = Counter(span.name for span, _ in spans)
    assert names == {"http": 1, "queue": 6, "prepare": 2, "denoise": 2, "finish": 2}
    [(http, own)] = [(span, process) for span, process in spans if span.name == "http"]
    assert http.parent_span_id.hex() == CALLER
    assert facts_of(http)["request_id"].string_value == "request-01"
    assert facts_of(http)["status"].int_value == 200
    children = [(span, process) for span, process in spans if span is not http]
    assert {span.parent_span_id for span, _ in children} == {http.span_id}
    assert {facts_of(span)["num_steps"].int_value for span, _ in children if span.name == "denoise"} == {3}
    stages = Counter(facts_of(span)["stage"].string_value for span, _ in children if span.name == "queue")
    assert stages == {"prepare": 2, "denoise": 2, "finish": 2}
    places = {span.name: process for span, process in spans}
    assert places["queue"] == own
    assert len(set(places.values())) == 4


def test_the_last_spans_are_sent_before_the_server_exits(first_life: FirstLife) -> None:
    """Every other trace begins at the server: each request that may run edits has one, a GET has none."""
    others = [span for span, _ in first_life.spans if span.trace_id.hex() != TRACE]
    requests = [facts_of(span) for span in others if span.name == "http"]
    statuses = Counter((facts["route"].string_value, facts["status"].int_value) for facts in requests)
    assert statuses == {("/v1/templates", 201): 2, ("/v1/images/edits", 200): 1, ("/v1/images/edits", 503): 1}
    assert {facts_of(span)["num_steps"].int_value for span in others if span.name == "denoise"} >= {200}


def listed(server: Running, key: str) -> dict[str, dict[str, object]]:
    with server.http(key) as client:
        return {one["id"]: one for one in client.get("/v1/templates").json()["data"]}


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_templates_are_listed_used_and_deleted_after_a_restart(first_life: FirstLife, tmp_path: Path) -> None:
    mine, other = first_life.ids[ALICE], first_life.ids[BOB]
    assert {path.stat().st_mode & 0o777 for path in files(first_life.cache)} == {0o600}
    with running_server(tmp_path, *first_life.flags) as server:
        wait_for(lambda: listed(server, ALICE) and listed(server, BOB))
        assert (set(listed(server, ALICE)), set(listed(server, BOB))) == ({mine}, {other})
        status = listed(server, ALICE)[mine]
        assert (status["state"], status["num_registered_steps"], status["size"]) == ("ready", 4, "56x40")
        assert status["tier_bytes"]["disk"] > 0  # type: ignore[index]
        fields = {"prompt": "a red cat", "num_inference_steps": STEPS, "template": mine}
        with server.http(BOB) as client:
            assert client.post("/v1/images/edits", files={"mask": MASK}, data=fields).status_code == 404
            assert client.delete(f"/v1/templates/{mine}").status_code == 404
        with server.http() as client:
            [one] = client.post("/v1/images/edits", files={"mask": MASK}, data=fields).json()["data"]
            assert one["cache_tier"] == "disk"
            result = open_picture(base64.b64decode(one["b64_json"]))
            assert np.array_equal(result[~mask()], picture(seed=1)[~mask()])
            assert client.delete(f"/v1/templates/{mine}").json()["deleted"]
        assert listed(server, ALICE) == {}
        wait_for(lambda: len(list(first_life.cache.iterdir())) == 1)
        assert set(listed(server, BOB)) == {other}
        assert server.stop() == 0
