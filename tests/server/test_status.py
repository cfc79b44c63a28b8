"""`GET /status` and `instgenie status`: the cluster as operators see it, on one machine and on several nodes."""

import json
from typing import Any

import pytest
from helpers.apps import ask, make_service
from helpers.serving import ALICE, Running
from prometheus_client.parser import text_string_to_metric_families

from instgenie.cli import main
from instgenie.cluster.processes import place
from instgenie.cluster.status import NodeStatus
from instgenie.server.app import make_app
from instgenie.server.service import HttpService

NODES = ("10.0.0.7-aaaaaa", "10.0.0.8-bbbbbb")


def test_the_status_of_a_server(server: Running, edited: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with server.http() as client:
        told = client.get("/status").json()
        refused = client.get("/status", headers={"authorization": "Bearer wrong"})
    assert refused.status_code == 401
    assert (told["state"], told["nodes"], told["fronts"]) == ("ready", [], [])
    assert told["num_finished"] >= 1
    assert sum(told["cache_hits"].values()) <= told["num_cache_queries"]
    [worker, *_] = told["workers"]
    assert (worker["state"], worker["node"]) == ("ready", None)
    assert worker["num_templates"] >= 1
    assert worker["tier_bytes"]["host"] > 0
    assert {process["role"] for process in worker["processes"]} == {"prepare", "denoise", "finish"}
    assert "alice" not in json.dumps(told)

    assert main(["status", server.url, "--api-key", ALICE, "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == told.keys()
    assert main(["status", server.url, "--api-key", ALICE]) == 0
    shown = capsys.readouterr().out
    assert "1 of 1 worker ready" in shown
    assert "ready" in shown
    assert "finished, " in shown
    assert main(["status", server.url, "--api-key", "wrong"]) == 2
    assert "401" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://127.0.0.1:1/", "no url"])
def test_a_server_that_does_not_answer(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", url]) == 2
    assert "no InstGenIE server answers at http://" in capsys.readouterr().err


@pytest.fixture
def on_nodes() -> HttpService:
    """Four workers: two on one node, one on another, one without a node."""
    service = make_service(workers=4, device="cpu")
    cluster = service.cluster
    place(cluster.workers, {0: NODES[0], 1: NODES[0], 2: NODES[1]})
    cluster.nodes = tuple(NodeStatus(name, name.split("-")[0], 16, 2**36) for name in NODES)
    cluster.fronts = ("tcp://10.0.0.1:4000", "tcp://10.0.0.2:4000")
    cluster.workers[1].drain()
    for process in cluster.workers[2].processes.values():
        process.state = "ready"
    return service


def test_workers_on_nodes(on_nodes: HttpService, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    told = ask(make_app(on_nodes, "1.2"), "GET", "/status").json()
    assert [worker["state"] for worker in told["workers"]] == ["starting", "draining", "ready", "waiting"]
    assert [worker["node"] for worker in told["workers"]] == [NODES[0], NODES[0], NODES[1], None]
    assert [(node["name"], node["num_workers"]) for node in told["nodes"]] == [(NODES[0], 2), (NODES[1], 1)]
    assert len(told["fronts"]) == 2
    monkeypatch.setattr("instgenie.cli.status.fetch", lambda url, key: told)
    monkeypatch.setenv("COLUMNS", "140")
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    for text in ("1 of 4 workers ready on 2 nodes", *NODES, "draining", "waiting", "64.0 GiB", "2 fronts: tcp://"):
        assert text in shown


def test_metrics_name_the_node(on_nodes: HttpService) -> None:
    families = {one.name: one for one in text_string_to_metric_families(on_nodes.metrics.render().decode())}
    for name in ("worker_state", "worker_restarts", "worker_running", "worker_predicted_seconds", "worker_cache_bytes"):
        samples = families[f"instgenie:{name}"].samples
        nodes = {sample.labels["worker"]: sample.labels["node"] for sample in samples}
        assert nodes == {"0": NODES[0], "1": NODES[0], "2": NODES[1], "3": ""}, name
    assert families["instgenie:num_nodes"].samples[0].value == 2
    assert families["instgenie:num_fronts"].samples[0].value == 2


def test_the_workers_of_a_node_share_its_link(on_nodes: HttpService) -> None:
    first, second, third, fourth = (worker.load.link for worker in on_nodes.cluster.workers)
    assert first is second
    assert len({id(link) for link in (first, third, fourth)}) == 3
    first.fetching[0, "template"] = first.foreign[0] = 5.0
    place(on_nodes.cluster.workers, {0: NODES[1], 1: NODES[0], 2: NODES[1]})
    assert first.seconds == 0  # nothing is on its way to where the worker was
    assert on_nodes.cluster.workers[0].load.link is third
