"""Malicious and broken clients: each gets a clear refusal, and the next client is served."""

import io
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from helpers.fuzz import fuzz
from helpers.serving import ALICE, MASK, PICTURE, Running, bomb, picture, png
from PIL import Image

import instgenie


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    """A client; after every test an edit still has to work."""
    with server.http() as client:
        yield client
        fields = {"prompt": "a cat", "num_inference_steps": "1"}
        answer = client.post("/v1/images/edits", files={"image": PICTURE, "mask": MASK}, data=fields)
        assert answer.status_code == 200, answer.text


def post(client: httpx.Client, image: bytes = PICTURE, mask: bytes = MASK, **fields: str) -> httpx.Response:
    return client.post("/v1/images/edits", files={"image": image, "mask": mask}, data={"prompt": "a", **fields})


def test_a_small_file_that_decodes_to_a_huge_picture(client: httpx.Client, server: Running) -> None:
    before = server.memory()
    for files in ({"image": bomb(12_000)}, {"image": PICTURE, "mask": bomb(12_000)}):
        answer = post(client, **files)
        assert answer.status_code == 400
        assert "12000x12000" in answer.json()["error"]["message"]
    assert server.memory() < before + 100 * 2**20


@pytest.mark.parametrize("size", [(1, 1), (1, 4000), (15, 15)])
def test_pictures_too_small_for_any_model(client: httpx.Client, size: tuple[int, int]) -> None:
    for answer in (post(client, png(picture(size=size))), client.post("/v1/templates", files={"image": PICTURE[:40]})):
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "image")


@pytest.mark.parametrize("size", [(16, 16), (16, 600)])
def test_the_smallest_pictures_work(client: httpx.Client, size: tuple[int, int]) -> None:
    files = {"image": png(picture(size=size))}
    answer = client.post("/v1/images/edits", files=files, data={"prompt": "a", "num_inference_steps": "1"})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("file_format", ["GIF", "BMP", "TIFF", "PPM"])
def test_other_formats_are_not_even_opened(client: httpx.Client, file_format: str) -> None:
    encoded = io.BytesIO()
    Image.fromarray(picture()).save(encoded, file_format)
    answer = post(client, encoded.getvalue())
    assert answer.status_code == 400
    assert "PNG, JPEG or WebP" in answer.json()["error"]["message"]


def test_a_script_named_as_a_picture(client: httpx.Client) -> None:
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) run\n"
    assert post(client, eps).status_code == 400


def test_errors_of_libraries_are_not_shown(client: httpx.Client) -> None:
    for image in (
        b"",
        b"\x89PNG\r\n\x1a\n",
        PICTURE[:100],
        b"\xff\xd8\xff\xe0garbage",
        b"RIFF\x00\x00\x00\x00WEBPVP8 ",
    ):
        message = post(client, image).json()["error"]["message"]
        assert not re.search(r"0x[0-9a-f]+|BytesIO|/\w+/|\.py|Error", message), message


@pytest.mark.parametrize("name", ["../../../../tmp/pwned", "/tmp/pwned", "..\\pwned", "a\x00b", "pwned" * 100])
def test_file_names_are_never_used(client: httpx.Client, name: str) -> None:
    files = {"image": (name, PICTURE), "mask": (name, MASK)}
    answer = client.post("/v1/images/edits", files=files, data={"prompt": "a", "num_inference_steps": "1"})
    assert answer.status_code == 200, answer.text
    assert not Path("/tmp/pwned").exists()


def test_no_url_is_ever_fetched(client: httpx.Client) -> None:
    visits: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(1)

        def accept() -> None:
            with suppress(TimeoutError):
                visits.append(trap.accept())

        watching = threading.Thread(target=accept)
        watching.start()
        address = f"http://127.0.0.1:{trap.getsockname()[1]}/x.png"
        for url in (address, address.upper(), "file:///etc/passwd", "ftp://127.0.0.1/x", "//127.0.0.1/x", "data:,x"):
            answers = [
                client.post("/v1/images/edits", json={"prompt": "a", "image": url}),
                client.post("/v1/images/edits", data={"prompt": "a", "image": url}, files={"mask": MASK}),
                client.post("/v1/templates", json={"image": [url]}),
                client.post("/v1/images/edits", json={"prompt": "a", "image": {"image_url": url}}),
            ]
            assert [(answer.status_code, answer.json()["error"]["param"]) for answer in answers] == [(400, "image")] * 4
        watching.join()
    assert not visits


def test_a_body_that_lies_about_its_length(server: Running, client: httpx.Client) -> None:
    place = urlsplit(server.url)
    head = (
        f"POST /v1/images/edits HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ALICE}\r\n"
        "Content-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    )
    for length, body in (("999999999999", b""), ("1" * 5000, b""), ("100", b'{"prompt"')):
        with socket.create_connection((place.hostname, place.port), timeout=10) as connection:
            connection.sendall(head.format(length).encode() + body)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while chunk := connection.recv(4096):
                answer += chunk
            if length != "100":
                assert re.match(rb"HTTP/1.1 4\d\d ", answer), answer


def test_too_many_parts_and_too_long_ones(client: httpx.Client) -> None:
    many = client.post("/v1/images/edits", files=[("image", PICTURE)] * 30, data={"prompt": "a"})
    fields = client.post("/v1/images/edits", files={"image": PICTURE}, data={f"f{i}": "x" for i in range(100)})
    long = client.post("/v1/images/edits", files={"image": PICTURE}, data={"prompt": "x" * 300_000})
    for answer in (many, fields, long):
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_multipart")


def test_deep_json(client: httpx.Client) -> None:
    for body in (b"[" * 200_000, b'{"prompt":' * 100_000):
        answer = client.post("/v1/images/edits", content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


def test_lone_surrogates_are_refused(client: httpx.Client) -> None:
    lone = client.post(
        "/v1/images/generations", content=b'{"prompt":"\\ud800"}', headers={"content-type": "application/json"}
    )
    assert (lone.status_code, lone.json()["error"]["param"]) == (400, "prompt")
    named = client.post("/v1/images/edits", content=b'{"\\ud800":1}', headers={"content-type": "application/json"})
    assert named.status_code == 400


def test_silent_connections_do_no_harm(server: Running, client: httpx.Client) -> None:
    place = urlsplit(server.url)
    silent = [socket.create_connection((place.hostname, place.port), timeout=10) for _ in range(100)]
    try:
        for connection in silent[::2]:
            connection.sendall(b"POST /v1/images/edits HTTP/1.1\r\nHost:")
        assert client.get("/health").status_code == 200
        assert post(client, num_inference_steps="1").status_code == 200
    finally:
        for connection in silent:
            connection.close()


def test_a_fuzzed_server_stays_healthy_and_small(server: Running, client: httpx.Client) -> None:
    fuzz(client, 60, seed=1)
    before = server.memory()
    statuses = fuzz(client, 240, seed=2)
    assert client.get("/health").status_code == 200
    assert statuses[400] > 100
    assert server.memory() < before + 32 * 2**20


def test_no_pickle_in_the_package() -> None:
    """No module of the package can run code from data, not even unused ones."""
    runs_code = re.compile(
        r"import (pickle|marshal)\b|pyobj|torch\.load\((?!.*weights_only=True)|(?<!\.)\b(eval|exec)\("
    )
    for path in Path(instgenie.__file__).parent.rglob("*.py"):
        assert not runs_code.search(path.read_text()), path


def test_the_http_process_imports_no_torch() -> None:
    code = "import sys, instgenie.server.serve; sys.exit('torch' in sys.modules or 'diffusers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_mask_without_a_fully_transparent_pixel_is_refused(client: httpx.Client) -> None:
    soft = np.full((40, 56, 4), 128, np.uint8)
    assert post(client, mask=png(soft)).status_code == 400
