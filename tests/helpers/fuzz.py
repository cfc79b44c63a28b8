"""Sends many malformed requests to a running server. From the root of the repository:

    PYTHONPATH=tests python -m helpers.fuzz --base-url http://127.0.0.1:8000 --num-requests 100000 [--api-key KEY]

Each must be answered with a well-formed error and no status of 500 or above; the server must stay healthy, and its
memory must not grow by more than 32 MiB after the first thousand.
"""

import argparse
import json
import random
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import numpy as np

from helpers.serving import MASK, PICTURE, SIZE, alpha_png, bomb, mask, png, wait_for
from instgenie.server.bodies.fields import EditFields

Request = tuple[str, bytes, dict[str, str]]  # path, body, headers
PATHS = ("/v1/images/edits", "/v1/images/generations", "/v1/templates")
BOUNDARY = "xyz"
BLOCK = 1000  # requests per row of the report
GROWTH = 32  # MiB by which the HTTP process may grow after the first block
LEAK = re.compile(r"\b0x[0-9a-f]|/tmp|/usr|\.py|Traceback|site-packages")
BOMB = bomb(12_000)
OTHER_SHAPE = alpha_png(mask((16, 200)))
MULTIPART = f"multipart/form-data; boundary={BOUNDARY}"
SCALARS = ("", "0", "-1", "1e999", "nan", "true", "null", "9" * 5000, "\x00", "é" * 100, "1x1", "99999x99999", "{}")
NAMES = (*EditFields.model_fields, "image[]", "mask")
FILE_NAMES = ("upload", "../../etc/passwd", "a\x00b", "x" * 5000, "con", ".", "/dev/null", "a.png.exe")
URLS = (
    "http://127.0.0.1:1/x.png", "file:///etc/passwd", "data:image/png;base64,####", "data:text/html,x", "ftp://x",
    "data:image/png;charset=utf-8;base64,iVBOR\nw0KGgo=", "data:,", "data:image/png;base64", "",
)  # fmt: skip


def part(name: str, value: bytes, file_name: str | None = None) -> bytes:
    disposition = f'Content-Disposition: form-data; name="{name}"'
    if file_name is not None:
        disposition += f'; filename="{file_name}"'
    return f"--{BOUNDARY}\r\n{disposition}\r\n\r\n".encode() + value + b"\r\n"


def multipart(draw: random.Random, *parts: bytes) -> Request:
    return draw.choice(PATHS), b"".join(parts) + f"--{BOUNDARY}--\r\n".encode(), {"content-type": MULTIPART}


def bad_scalar(draw: random.Random) -> Request:
    value = draw.choice(SCALARS).encode()
    wrong = part(draw.choice(NAMES), value)
    return multipart(draw, part("image", PICTURE, "upload"), part("prompt", b"a"), wrong, part("n", b"0"))


def broken_picture(draw: random.Random) -> Request:
    """Flip, cut or repeat bytes. If the picture still decodes, the request is refused for its mask."""
    data = bytearray(PICTURE)
    for _ in range(draw.randint(1, 40)):
        data[draw.randrange(len(data))] = draw.randrange(256)
    cut = bytes(data[: draw.randint(0, len(data))]) * draw.randint(1, 2)
    picture = part("image", cut, draw.choice(FILE_NAMES))
    return multipart(draw, picture, part("mask", OTHER_SHAPE, "m"), part("prompt", b"a"))


def wrong_mask(draw: random.Random) -> Request:
    masks = [
        b"", MASK[: draw.randint(0, len(MASK))], PICTURE, alpha_png(mask((41, 56))), alpha_png(mask((16, 16))),
        alpha_png(np.zeros(SIZE, np.bool_)), png(np.zeros((1, 1), np.uint8)), draw.randbytes(99),
    ]  # fmt: skip
    fields = [part("image", PICTURE, "upload"), part("prompt", b"a"), part("mask", draw.choice(masks), "m")]
    fields.append(part("num_inference_steps", b"1"))  # some of these masks can be read
    return PATHS[0], multipart(draw, *fields)[1], {"content-type": MULTIPART}


def bombs(draw: random.Random) -> Request:
    """Send a file of a few KB that decodes to more than a hundred megapixels."""
    name, other = draw.choice([("image", ("mask", MASK)), ("mask", ("image", PICTURE))])
    fields = [part(name, BOMB, "upload"), part(other[0], other[1], "upload"), part("prompt", b"a")]
    return PATHS[0], multipart(draw, *fields)[1], {"content-type": MULTIPART}


def broken_multipart(draw: random.Random) -> Request:
    path, body, _ = multipart(draw, part("image", PICTURE[:200], "upload"), part("prompt", b"a"))
    position = draw.randrange(len(body))
    mangled = draw.choice(
        [body[:position], body[position:], body[:position] + b"\r\n--" + body[position:], body.replace(b"\r\n", b"\n"),
         body.replace(b"name=", b"nam="), b"--xyz" * 1000, b"", bytes(draw.randrange(256) for _ in range(500))]
    )  # fmt: skip
    kind = draw.choice(
        [MULTIPART, "multipart/form-data", "multipart/form-data; boundary=", MULTIPART + "; charset=utf-7"]
    )
    return path, mangled, {"content-type": kind}


def many_parts(draw: random.Random) -> Request:
    file_name = draw.choice([None, "f"])
    return multipart(draw, *[part(f"field{i}", b"x", file_name) for i in range(draw.choice([50, 200, 2000]))])


def bad_json(draw: random.Random) -> Request:
    bodies = [
        b"", b"{", b"[]", b"null", b'"x"', b"[" * 100_000, b'{"a":' * 5000, b'{"prompt": NaN}', b'{"prompt": 1}',
        b'{"prompt": "\\ud800", "n": 0}', b'{"prompt": "a", "n": 1e400}', b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}",
        b"\xff\xfe\x00", json.dumps({"prompt": "a", "image": draw.choice(URLS), "n": 0}).encode(),
        json.dumps({"prompt": ["a"] * 1000, "image": {"a": {}}}).encode(),
        json.dumps({"prompt": "a", "images": [{"image_url": draw.choice(URLS)}] * draw.choice([0, 1, 17])}).encode(),
        json.dumps({"prompt": "a", "images": draw.choice([{}, [[]], 5, [None]]), "mask": {"image_url": {}}}).encode(),
        json.dumps({f"f{i}": i for i in range(1000)}).encode(),
    ]  # fmt: skip
    return draw.choice(PATHS), draw.choice(bodies), {"content-type": "application/json"}


def odd_request(draw: random.Random) -> Request:
    path = draw.choice(
        [*PATHS, "/v1/templates/" + "x" * 300, "/v1/models/%00", "/v1/models/..%2f..%2fetc", "/v1//images"]
    )
    kind = draw.choice(
        ["text/plain", "application/x-www-form-urlencoded", "", "application/json; charset=x", "x/" * 99]
    )
    headers = {"content-type": kind, "x-request-id": draw.choice(["a\tb", "x" * 500, "é", "ok"])}
    return path, draw.choice([b"", b"prompt=a&n=1", b"{}"]), headers


def foreign_page(draw: random.Random) -> Request:
    """Send what a browser sends for a page of another site, or for a name that was made to point here."""
    path, body, headers = odd_request(draw)
    names = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[::1].evil", "a b", "", "x" * 5000]
    stranger = {draw.choice(["host", "origin"]): draw.choice(names)}
    return path, body, headers | stranger


MAKERS: tuple[Callable[[random.Random], Request], ...] = (
    bad_scalar, broken_picture, wrong_mask, bombs, broken_multipart, many_parts, bad_json, odd_request,
    foreign_page,
)  # fmt: skip


def raw_bytes(draw: random.Random, url: str) -> None:
    """Send bytes that are not HTTP; the server only has to survive them."""
    junk = [
        b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/images/edits HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/images/edits HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n", b"\r\n" * 1000,
        b"GET /health HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", bytes(draw.randrange(256) for _ in range(200)),
    ]  # fmt: skip
    place = urlsplit(url)
    assert place.hostname
    with socket.create_connection((place.hostname, place.port or 80), timeout=10) as connection:
        try:
            connection.sendall(draw.choice(junk))
            if draw.random() < 0.5:
                connection.settimeout(0.05)
                connection.recv(1000)
        except OSError:
            pass


def fuzz(client: httpx.Client, num_requests: int, seed: int) -> Counter[int]:
    """Count the answers by status; raise at the first answer that breaks the rules."""
    draw = random.Random(seed)
    statuses: Counter[int] = Counter()
    for _ in range(num_requests):
        if draw.random() < 0.05:
            raw_bytes(draw, str(client.base_url))
            continue
        path, body, headers = draw.choice(MAKERS)(draw)
        encoded = {name: value.encode("latin-1") for name, value in headers.items()}
        answer = client.post(path, content=body, headers=encoded)
        statuses[answer.status_code] += 1
        check(answer, body)
    return statuses


def check(answer: httpx.Response, body: bytes) -> None:
    about = (answer.status_code, answer.text[:300], body[:300])
    assert answer.status_code < 500, about
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, about
        assert not LEAK.search(answer.json()["error"]["message"]), about


def memory(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("process_resident_memory_bytes")).split()[1]) / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description="Send malformed requests to a running server.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--num-requests", type=int, default=100_000)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--api-key", default="")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    local = threading.local()

    def client() -> httpx.Client:
        if not hasattr(local, "client"):
            local.client = httpx.Client(base_url=options.base_url, headers=headers, timeout=60, trust_env=False)
        found: httpx.Client = local.client
        return found

    wait_for(lambda: client().get("/ready").status_code == 200)
    total: Counter[int] = Counter()
    started, sizes = time.monotonic(), []
    with ThreadPoolExecutor(options.concurrency) as pool:
        for block in range(max(1, options.num_requests // BLOCK)):
            seeds = [options.seed + block * options.concurrency + thread for thread in range(options.concurrency)]
            num = min(BLOCK, options.num_requests) // options.concurrency
            for statuses in pool.map(lambda seed, num=num: fuzz(client(), num, seed), seeds):
                total += statuses
            is_healthy = client().get("/health").status_code == 200
            sizes.append(memory(client()))
            seconds = time.monotonic() - started
            print(f"{(block + 1) * num * options.concurrency:>7} {seconds:>5.0f} s {sizes[-1]:>5.0f} MiB "
                  f"healthy={is_healthy} {dict(sorted(total.items()))}", flush=True)  # fmt: skip
            if not is_healthy:
                return 1
    print(f"growth after the first {BLOCK}: {sizes[-1] - sizes[0]:.1f} MiB")
    return int(sizes[-1] - sizes[0] > GROWTH)


if __name__ == "__main__":
    sys.exit(main())
