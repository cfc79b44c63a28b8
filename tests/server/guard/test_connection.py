"""Clients that stop halfway: the server ends their connections and does not wait for them."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from instgenie.server.guard import connection
from instgenie.server.guard.connection import Connection

CHUNK, NUM_CHUNKS = b"x" * 2**20, 256


class Answering:
    """An application whose answers are larger than any buffer."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.ended = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            for _ in range(0 if scope["path"] == "/brief" else NUM_CHUNKS):
                await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
                self.num_sent += 1
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.ended.set()


@pytest.fixture
def answering() -> Answering:
    return Answering()


@pytest.fixture
def port(answering: Answering, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    for name in ("HEAD_TIMEOUT", "STALL_TIMEOUT"):
        monkeypatch.setattr(connection, name, 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(answering, http=Connection, ws="none", lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join()


def ends(client: socket.socket) -> bool:
    """Read until the server closes the connection."""
    try:
        while client.recv(2**20):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost:"])
def test_a_head_that_never_arrives(port: int, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(sent)
        assert ends(client)


def trickle(client: socket.socket) -> None:
    for _ in range(2000):
        client.sendall(b"x")
        threading.Event().wait(0.01)


def test_a_body_that_trickles_in_after_its_answer(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(b"POST /brief HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
        assert client.recv(2**20).startswith(b"HTTP/1.1 200")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            trickle(client)


def test_a_client_that_does_not_read(port: int, answering: Answering) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answering.ended.wait(60)
        assert ends(client)


def test_a_client_that_reads_slowly_gets_everything(port: int, answering: Answering) -> None:
    """The transfer takes longer than the timeout, but no single pause does."""
    num_bytes = 0
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        while chunk := client.recv(2**22):
            num_bytes += len(chunk)
            threading.Event().wait(0.002)
    assert num_bytes > NUM_CHUNKS * len(CHUNK)
    assert answering.num_sent == NUM_CHUNKS
