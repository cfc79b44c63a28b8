"""Health as an orchestrator sees it while processes fail to start, and what the cluster does about it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from helpers.clusters import Run, collect, make_order, until
from helpers.launching import DEATH, READY, ScriptedLauncher

from instgenie.cli import main
from instgenie.cluster import processes, wire
from instgenie.cluster.cluster import Cluster
from instgenie.cluster.config import ClusterConfig
from instgenie.cluster.orders import Failed
from instgenie.cluster.processes import MAX_FAILED_STARTS
from instgenie.errors import ClosedError
from instgenie.server.app import make_app
from instgenie.server.config import read_config
from instgenie.server.service import HttpService

FULL = wire.Broken("the disk is full: 0 bytes left in /secret/folder")
STATE = 'instgenie:worker_state{device="cpu",state="ready",worker="0"}'


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "FIRST_BACK_OFF", 0.05)
    monkeypatch.setattr(processes, "LAST_BACK_OFF", 0.05)


@asynccontextmanager
async def serving(launcher: ScriptedLauncher, num_workers: int = 1) -> AsyncIterator[tuple[Cluster, httpx.AsyncClient]]:
    """The HTTP application over a cluster whose processes are played."""
    cluster = Cluster(ClusterConfig(model="tiny", devices=("cpu",) * num_workers), launcher)
    await cluster.start()
    service = HttpService(read_config({}, {}).http, cluster)
    transport = httpx.ASGITransport(make_app(service, "1"))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            yield cluster, client
    finally:
        service.decoder.close()
        await cluster.stop(0)


def num_starts(cluster: Cluster, role: str, worker: int = 0) -> int:
    [process] = [one for one in cluster.status().workers[worker].processes if one.role == role]
    return process.num_starts


def test_a_server_whose_every_worker_fails_to_start_again_and_again_is_unhealthy(run: Run) -> None:
    """One that has a single good worker is healthy. So is one whose worker comes back."""
    is_mended = False

    def script(worker: int, role: str) -> list[wire.Message | None]:
        return [READY] if role != "finish" or is_mended else [DEATH]

    async def play() -> None:
        nonlocal is_mended
        async with serving(ScriptedLauncher(script), num_workers=2) as (cluster, client):
            assert (await client.get("/health")).json() == {"status": "ok"}
            await until(lambda: min(num_starts(cluster, "finish", worker) for worker in (0, 1)) > MAX_FAILED_STARTS)
            sick = await client.get("/health")
            assert (sick.status_code, sick.json()["status"]) == (503, "broken")
            for worker in (0, 1):
                assert f"worker {worker}: its finish process failed to start" in sick.json()["message"]
            assert (await client.get("/ready")).json() == {"status": "broken"}
            refused = await client.post("/v1/images/edits", data={"prompt": "a cat"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            lines = (await client.get("/metrics")).text.splitlines()
            assert 'instgenie:worker_restarts_total{role="prepare",worker="0"} 0.0' in lines
            [died] = [line for line in lines if 'restarts_total{role="finish",worker="1"}' in line]
            assert float(died.split()[-1]) >= MAX_FAILED_STARTS
            assert f"{STATE} 0.0" in lines
            is_mended = True
            await until(lambda: cluster.ready)
            assert (await client.get("/health")).status_code == 200
            await until(lambda: all(worker.is_ready for worker in cluster.workers))
            assert f"{STATE} 1.0" in (await client.get("/metrics")).text

    run(play())


def test_edits_do_not_wait_for_workers_that_fail_to_start_again_and_again(run: Run) -> None:
    """An edit is accepted by a worker that then breaks for good."""
    launcher = ScriptedLauncher(lambda _, role: [READY, DEATH] if role == "denoise" else [READY])

    async def play() -> None:
        async with serving(launcher) as (cluster, _):
            await cluster.until_ready()
            tickets = cluster.submit([make_order()])
            launcher.starts[0, "denoise"][0].kill()
            launcher.starts[0, "prepare"][0].kill()
            await until(lambda: not cluster.healthy)
            launcher.script = lambda _, role: [DEATH]
            launcher.starts[0, "prepare"][-1].kill()
            async with asyncio.timeout(60):
                [failed] = await collect(tickets)
            assert isinstance(failed, Failed)
            assert failed.kind == "unavailable"

    run(play())


def test_a_process_that_cannot_start_again_is_tried_again(run: Run) -> None:
    """A full disk or memory at a restart is no reason to give a worker up, nor the edit that it held."""
    launcher = ScriptedLauncher(lambda _, role: [READY, FULL, FULL, READY] if role == "prepare" else [READY])

    async def play() -> None:
        async with serving(launcher) as (cluster, client):
            await cluster.until_ready()
            cluster.submit([make_order()])
            launcher.starts[0, "prepare"][0].kill()
            await until(lambda: len(launcher.starts[0, "prepare"]) == 4 and cluster.ready)
            assert num_starts(cluster, "prepare") == 4
            assert cluster.status().num_failed == 0
            assert "secret" not in (await client.get("/health")).text

    run(play())


def test_a_worker_that_cannot_start_is_tried_again_once_another_shows_that_the_model_loads(run: Run) -> None:
    others_may_start = False

    def script(worker: int, role: str) -> list[wire.Message | None]:
        if worker == 1:
            return [FULL, FULL, READY]
        return [READY] if others_may_start else [DEATH]

    launcher = ScriptedLauncher(script)

    async def play() -> None:
        nonlocal others_may_start
        async with serving(launcher, num_workers=2) as (cluster, _):
            await until(lambda: cluster.workers[1].state == "failed")
            assert num_starts(cluster, "denoise", 1) == 1
            others_may_start = True
            await until(lambda: all(worker.is_ready for worker in cluster.workers))
            assert num_starts(cluster, "denoise", 1) == 3

    run(play())


def test_a_server_whose_model_never_loads_exits_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("instgenie.cluster.cluster.LocalLauncher", lambda: ScriptedLauncher(lambda *_: [FULL]))
    for lasting in ("set_up_log", "end_by_force"):  # these would outlast the test
        monkeypatch.setattr(f"instgenie.server.serve.{lasting}", lambda given: None)
    assert main(["serve", "tiny", "--device", "cpu", "--port", "0"]) == 2
    assert "the disk is full" in capsys.readouterr().err


def test_a_model_that_never_loads_ends_the_wait_at_once(run: Run) -> None:
    async def play() -> None:
        async with serving(ScriptedLauncher(lambda *_: [FULL])) as (cluster, client):
            with pytest.raises(ClosedError, match="the disk is full"):
                await cluster.until_ready()
            sick = await client.get("/health")
            assert sick.status_code == 503
            assert "secret" not in sick.text

    run(play())
