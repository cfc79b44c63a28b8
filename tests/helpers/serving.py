"""A real server process for tests, on a free port of this machine, and requests to it."""

import base64
import io
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from openai import OpenAI
from PIL import Image

from instgenie.pictures.mask import box_mask
from instgenie.pictures.picture import open_picture
from instgenie.types import PixelMask, Pixels

ALICE, BOB = "alice-key", "bob-key"
SIZE = (40, 56)  # (height, width)
ORIGIN = "https://page.test"  # the one a narrow server allows
QUICK = {"num_inference_steps": 2, "seed": 5}


@dataclass(frozen=True)
class Running:
    process: subprocess.Popen[str]
    url: str
    log: Path
    clients: dict[str, OpenAI] = field(default_factory=dict)

    def openai(self, key: str = ALICE) -> OpenAI:
        if key not in self.clients:
            self.clients[key] = OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=180)
        return self.clients[key]

    def http(self, key: str | None = ALICE) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=180, trust_env=False)

    def metric(self, name: str) -> float:
        """Return a metric's value, summed over its labels."""
        with self.http() as client:
            lines = client.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        assert found, name
        return sum(float(line.split()[-1]) for line in found)

    def memory(self) -> int:
        """Return the resident bytes of the HTTP process."""
        return int(self.metric("process_resident_memory_bytes"))

    @cached_property
    def pid(self) -> int:
        """The process that listens: a fork server may have forked it in the place of the one that was started."""
        port = httpx.URL(self.url).port
        listening = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        [pid] = {one.pid for one in listening if one.laddr.port == port}
        return pid

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def running_server(folder: Path, *arguments: str, device: str = "cpu", **variables: str) -> Iterator[Running]:
    command = [sys.executable, "-m", "instgenie", "serve", "--port", "0", "--device", device, *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("INSTGENIE_")}
    log = folder / "server.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            env=environment | {"OMP_NUM_THREADS": "1", "INSTGENIE_REGISTER_AFTER": "1"} | variables,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdout
    try:
        first = process.stdout.readline()
        assert "http://" in first, log.read_text()
        server = Running(process, first.split()[-1].removesuffix("/v1"), log)
        wait_until_ready(server)
        yield server
        for client in server.clients.values():
            client.close()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
        process.stdout.close()


def wait_for(holds: Callable[[], Any]) -> None:
    for _ in range(600):
        if holds():
            return
        time.sleep(0.1)
    raise AssertionError("the condition did not become true within 60 s")


def register(server: Running, image: bytes, key: str = ALICE, **fields: str) -> str:
    """Register a template, wait until it is ready, and return its id."""
    with server.http(key) as client:
        made = client.post("/v1/templates", files={"image": image}, data=fields)
        assert made.status_code == 201, made.text
        name = str(made.json()["id"])
        wait_for(lambda: client.get(f"/v1/templates/{name}").json()["state"] == "ready")
    return name


def edit(server: Running, key: str = ALICE, **fields: Any) -> Any:
    """Edit the sample picture through the openai client; `fields` override its arguments."""
    extra = QUICK | fields.pop("extra_body", {})
    return server.openai(key).images.edit(
        **({"image": PICTURE, "mask": MASK, "prompt": "a red cat"} | fields), extra_body=extra
    )


def pixels(answer: Any, index: int = 0) -> Pixels:
    return open_picture(base64.b64decode(answer.data[index].b64_json))


def pixels_of(answer: httpx.Response, index: int = 0) -> Pixels:
    return open_picture(base64.b64decode(answer.json()["data"][index]["b64_json"]))


def alike(one: Pixels, other: Pixels) -> bool:
    """True if the pictures are equal up to the rounding differences between batches."""
    return int(np.abs(one.astype(int) - other).max()) <= 1


def wait_until_ready(server: Running) -> None:
    with server.http() as client:
        for _ in range(1200):
            with suppress(httpx.TransportError):  # a server that has ended is found out below
                if client.get("/ready").status_code == 200:
                    return
            assert server.process.poll() is None, server.log.read_text()
            time.sleep(0.1)
    raise AssertionError("not ready: " + server.log.read_text())


def picture(seed: int = 0, size: tuple[int, int] = SIZE) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)


def mask(size: tuple[int, int] = SIZE) -> PixelMask:
    return box_mask((8, 8, size[1] // 2, size[0] // 2), size)


def png(pixels: Pixels) -> bytes:
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "PNG")
    return encoded.getvalue()


def alpha_png(masked: PixelMask) -> bytes:
    """Encode a mask with alpha 0 where it is masked."""
    grey = np.full((*masked.shape, 4), 128, np.uint8)
    grey[..., 3] = np.where(masked, 0, 255)
    return png(grey)


def bomb(side: int) -> bytes:
    """Make a PNG of a few KB that decodes to side x side pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((side // 8 + 1) * side), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


PICTURE, MASK = png(picture()), alpha_png(mask())
