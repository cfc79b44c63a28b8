"""The end of a server: what it cannot finish in time is refused, and nothing of it is left."""

import asyncio
import json
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from helpers.instant import InstantCluster
from helpers.serving import MASK, PICTURE, Running, running_server, wait_for

from instgenie.server.app import make_app
from instgenie.server.config import read_config
from instgenie.server.routes import opening
from instgenie.server.service import HttpService

LONG = {"prompt": "a cat", "num_inference_steps": "999", "quality": "exact", "n": "10"}
ONE_PROCESS = ("--batching", "naive")
REAL = {"TESTS_FORK_FOLDER": ""}  # its processes are forked by a nursery of its own, and are below it


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A short path for the sockets of a server: the system allows no long ones."""
    with tempfile.TemporaryDirectory(prefix="ig-") as folder:
        yield Path(folder)


def edit(server: Running, **fields: str) -> httpx.Response:
    with server.http() as client:
        return client.post("/v1/images/edits", files={"image": PICTURE, "mask": MASK}, data=LONG | fields)


def processes_of(server: Running) -> list[psutil.Process]:
    """The server, its nursery, and the processes of its worker, which a fork server of the tests may have forked."""
    with server.http() as client:
        [worker] = client.get("/status").json()["workers"]
    workers = [psutil.Process(one["pid"]) for one in worker["processes"]]
    nursery = workers[0].parent()
    assert nursery
    assert nursery.pid != os.getpid()
    return [psutil.Process(server.pid), nursery, *workers]


def num_accepted(server: Running) -> float:
    return server.metric("instgenie:num_requests_running") + server.metric("instgenie:num_requests_waiting")


def send_half_a_body(server: Running) -> socket.socket:
    place = urlsplit(server.url)
    connection = socket.create_connection((place.hostname, place.port), timeout=60)
    connection.sendall(
        b"POST /v1/images/edits HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b'Content-Length: 500\r\n\r\n{"prompt": "a'
    )
    return connection


def test_what_is_not_done_in_time_is_refused_and_the_server_ends(
    folders: dict[str, Path], tmp_path: Path, sockets: Path
) -> None:
    """An edit, a stream and a request whose body never arrives: each gets to know why."""
    flags = [*ONE_PROCESS, "--shutdown-timeout", "2"]
    with (
        running_server(tmp_path, str(folders["sd_fill"]), *flags, TMPDIR=str(sockets)) as server,
        ThreadPoolExecutor(2) as threads,
        send_half_a_body(server) as uploading,
    ):
        assert list(sockets.iterdir())
        processes = processes_of(server)
        editing, streaming = threads.submit(edit, server), threads.submit(edit, server, stream="true")
        wait_for(lambda: num_accepted(server) == 20)
        server.process.terminate()
        edited, streamed, uploaded = editing.result(), streaming.result(), uploading.makefile("rb").read()
        assert server.process.wait(60) == 1
    assert (edited.status_code, edited.json()["error"]["code"]) == (503, "shutting_down")
    assert int(edited.headers["retry-after"]) >= 1
    error = next(json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith('data: {"error"'))
    assert error["error"]["code"] == "shutting_down"
    assert uploaded.startswith(b"HTTP/1.1 503 ")
    assert b'"shutting_down"' in uploaded
    assert "internal" not in edited.text + streamed.text
    assert not psutil.wait_procs(processes, timeout=60)[1]
    assert not list(sockets.iterdir())
    assert "Traceback" not in server.log.read_text()


def test_a_second_signal_ends_the_server_at_once(folders: dict[str, Path], tmp_path: Path, sockets: Path) -> None:
    """Its processes go with it; the folder of sockets stays for the next server to delete."""
    flags = [*ONE_PROCESS, "--shutdown-timeout", "3600"]
    with (
        running_server(tmp_path, str(folders["sd_fill"]), *flags, TMPDIR=str(sockets), **REAL) as server,
        ThreadPoolExecutor(1) as threads,
        server.http() as client,
    ):
        children = psutil.Process(server.process.pid).children(recursive=True)
        editing = threads.submit(edit, server)
        wait_for(lambda: num_accepted(server) == 10)
        server.process.terminate()
        wait_for(lambda: client.get("/ready").json()["status"] == "draining")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 128 + signal.SIGTERM
        assert isinstance(editing.exception(), httpx.TransportError)
    assert children
    assert not psutil.wait_procs(children, timeout=60)[1]


def test_an_edit_that_is_admitted_is_finished_though_the_server_begins_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal arrives while the first picture is decoded."""
    config = read_config({"device": "cpu", "host_cache_gib": "0.1"}, {})
    cluster = InstantCluster(config.cluster, b"painted")
    service = HttpService(config.http, cluster)
    decode = opening.decode_edit

    def decode_slowly(*given: Any) -> Any:
        service.draining, cluster._is_open = True, False
        return decode(*given)

    monkeypatch.setattr(opening, "decode_edit", decode_slowly)

    async def play() -> list[httpx.Response]:
        transport = httpx.ASGITransport(make_app(service, "0"))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            files, fields = {"image": PICTURE, "mask": MASK}, {"prompt": "a", "num_inference_steps": "4"}
            return [await client.post("/v1/images/edits", files=files, data=fields) for _ in range(2)]

    finished, refused = asyncio.run(play())
    assert finished.status_code == 200, finished.text
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
