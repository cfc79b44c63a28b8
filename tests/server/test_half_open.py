"""Half-open connections: clients that fall silent, or vanish without closing. Other clients are served meanwhile, and
the server keeps nothing of the lost ones."""

import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from helpers.serving import MASK, PICTURE, Running, wait_for

NUM_EACH = 10
MAX_ROUNDS = 6
TCP_REPAIR = 19  # socket option: closing the socket then sends nothing
POST = b"POST /v1/images/edits HTTP/1.1\r\nHost: localhost\r\n"
PARTS = POST + b"Content-Type: multipart/form-data; boundary=b\r\n"
IMAGE = b'--b\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n' + PICTURE
HEADLESS = {"nothing": b"", "half a line": b"POST /v1/ima", "half a head": POST + b"Content-"}
BODILESS = {
    "no body": PARTS + b"Content-Length: 5000\r\n\r\n",
    "half a body": PARTS + b"Content-Length: 99999\r\n\r\n" + IMAGE[:-200],
    "half a chunk": PARTS + b"Transfer-Encoding: chunked\r\n\r\n1000\r\n" + IMAGE[:500],
    "half of some JSON": POST + b'Content-Type: application/json\r\nContent-Length: 500\r\n\r\n{"prompt": "a',
}


def edit(server: Running) -> None:
    fields = {"prompt": "a cat", "num_inference_steps": "2"}
    with server.http() as client:
        assert client.get("/health").status_code == 200
        answer = client.post("/v1/images/edits", files={"image": PICTURE, "mask": MASK}, data=fields)
        assert answer.status_code == 200, answer.text


def connect(server: Running, sent: bytes) -> socket.socket:
    place = urlsplit(server.url)
    connection = socket.create_connection((place.hostname, place.port), timeout=60)
    connection.sendall(sent)
    return connection


def told(connection: socket.socket) -> bytes:
    """Return everything the server sends until it closes the connection."""
    answer = b""
    with suppress(ConnectionResetError):
        while chunk := connection.recv(4096):
            answer += chunk
    return answer


def num_open(server: Running) -> int:
    """Count the open sockets of the server."""
    num_sockets = 0
    for place in Path(f"/proc/{server.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            num_sockets += str(place.readlink()).startswith("socket:")
    return num_sockets


def num_threads(server: Running) -> int:
    return len(list(Path(f"/proc/{server.pid}/task").iterdir()))


def check_nothing_stays(server: Running, num_before: int) -> None:
    """Allow fewer sockets than before: one of those may have been about to close."""
    wait_for(lambda: num_open(server) <= num_before)
    for name in ("running", "waiting"):  # a step that has begun goes on to its end
        wait_for(lambda name=name: server.metric(f"instgenie:num_requests_{name}") == 0)


def test_clients_that_fall_silent(narrow: Running) -> None:
    """The clients keep their side open until the server closes its own. The number of threads must settle: a new thread
    pool grows for a few rounds, a leak grows in every round."""
    edit(narrow)
    num_before, threads = num_open(narrow), list[int]()
    while len(threads) < 2 or threads[-1] != threads[-2]:
        assert len(threads) < MAX_ROUNDS, threads
        with ExitStack() as stack:
            silent = [
                (name, stack.enter_context(connect(narrow, sent)))
                for name, sent in (HEADLESS | BODILESS).items()
                for _ in range(NUM_EACH)
            ]
            wait_for(lambda: num_open(narrow) >= num_before + NUM_EACH * len(BODILESS))
            edit(narrow)
            for name, connection in silent:
                answer = told(connection)
                assert answer == b"" if name in HEADLESS else answer.startswith(b"HTTP/1.1 408 "), (name, answer)
            check_nothing_stays(narrow, num_before)
        threads.append(num_threads(narrow))


def whole(steps: int, *, stream: bool) -> bytes:
    fields = {"prompt": "a cat", "num_inference_steps": str(steps), "stream": str(stream).lower()}
    request = httpx.Request(
        "POST", "http://localhost/v1/images/edits", files={"image": PICTURE, "mask": MASK}, data=fields
    )
    head = b"".join(name + b": " + value + b"\r\n" for name, value in request.headers.raw)
    return b"POST /v1/images/edits HTTP/1.1\r\n" + head + b"\r\n" + request.read()


def test_clients_that_vanish(narrow: Running) -> None:
    """The clients send nothing more, not even the end of the connection, as after a power cut."""
    edit(narrow)
    num_before, num_steps = num_open(narrow), narrow.metric("instgenie:step_time_seconds_count")
    requests = [*(HEADLESS | BODILESS).values(), whole(40, stream=False), whole(40, stream=True)]
    connections = [connect(narrow, sent) for sent in requests for _ in range(3)]
    wait_for(lambda: narrow.metric("instgenie:step_time_seconds_count") > num_steps)
    for connection in connections:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        except PermissionError:
            pytest.skip("closing a socket silently needs CAP_NET_ADMIN")
        connection.close()
    edit(narrow)
    check_nothing_stays(narrow, num_before)
