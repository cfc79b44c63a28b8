"""Breaks a running server in every way an operator will see, and checks that nothing is lost. From the root of the
repository:

    PYTHONPATH=tests python -m helpers.faults [--device cuda] [--only storm,sigterm]

Each fault prints one row: what happened, and `held` or `BROKEN`. Pictures are compared with those of undisturbed edits:
no pixel may differ by more than one level inside the mask, and none outside it.
"""

import argparse
import base64
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil

from helpers.serving import Running, alpha_png, mask, picture, png, register, running_server, wait_for
from instgenie.pictures.picture import open_picture
from instgenie.types import Pixels

SIZE = (96, 128)
STEPS = "4"
MASKED = mask(SIZE)


@dataclass(frozen=True)
class Answer:
    status: int
    code: str
    pixels: Pixels | None = None
    tier: str | None = None


class Edits:
    """Numbered edits of one server: an even number has a picture of its own, an odd one a registered picture."""

    def __init__(self, server: Running) -> None:
        self.server = server

    def picture(self, number: int) -> Pixels:
        return picture(number if number % 2 == 0 else 1 + number % 8, SIZE)

    def register(self) -> None:
        for number in (1, 3, 5, 7):
            register(self.server, png(self.picture(number)), num_inference_steps=STEPS)

    def run(self, number: int, **fields: str) -> Answer:
        reuse = "off" if number % 2 == 0 else "template"
        files = {"image": png(self.picture(number)), "mask": alpha_png(MASKED)}
        data = {"prompt": "a red cat", "num_inference_steps": STEPS, "seed": str(number), "reuse": reuse} | fields
        try:
            with self.server.http(None) as client:
                answer = client.post("/v1/images/edits", files=files, data=data, timeout=600)
        except httpx.HTTPError as broken:
            return Answer(0, type(broken).__name__)
        return read(answer)

    def run_all(self, numbers: Sequence[int], meanwhile: Callable[[], None] = lambda: None) -> list[Answer]:
        with ThreadPoolExecutor(len(numbers)) as pool:
            answers = [pool.submit(self.run, number) for number in numbers]
            meanwhile()
            return [answer.result() for answer in answers]


def read(answer: httpx.Response) -> Answer:
    if answer.status_code != 200:
        return Answer(answer.status_code, answer.json()["error"]["code"])
    [made] = answer.json()["data"]
    return Answer(200, "ok", open_picture(base64.b64decode(made["b64_json"])), made["cache_tier"])


def worst(answers: Sequence[Answer], others: Sequence[Answer]) -> int:
    """The largest difference of a pixel between two runs of the same edits."""
    return max(int(np.abs(a.pixels.astype(int) - b.pixels).max()) for a, b in zip(answers, others, strict=True)
               if a.pixels is not None and b.pixels is not None)  # fmt: skip


def codes(answers: Sequence[Answer]) -> str:
    return ", ".join(f"{num}x {code}" for code, num in Counter(f"{one.status} {one.code}" for one in answers).items())


def children(server: Running) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def say(fault: str, held: bool, text: str) -> bool:
    print(f"{fault:<14} {'held' if held else 'BROKEN':<7} {text}", flush=True)
    return held


# faults


def storm(start: "Start") -> bool:
    """Two workers, thirty edits in flight, twelve random processes killed."""
    with start("--workers", "2", "--cache-dir", "{}/cache", "--max-queue", "64") as server:
        edits, numbers, chance = Edits(server), range(30), random.Random(3)
        edits.register()
        undisturbed = edits.run_all(numbers)
        killed: list[int] = []

        def kill() -> None:
            for _ in range(12):
                time.sleep(chance.uniform(0.2, 1.5))
                if alive := children(server):
                    victim = chance.choice(alive)
                    killed.append(victim.pid)
                    victim.kill()

        disturbed = edits.run_all(numbers, kill)
        difference = worst(disturbed, undisturbed)
        held = all(one.status == 200 for one in disturbed) and difference <= 1
        held &= [one.tier is None for one in disturbed] == [one.tier is None for one in undisturbed]
        return say("storm", held, f"{len(killed)} kills: {codes(disturbed)}; pixels differ by {difference} at most")


def sigterm(start: "Start") -> bool:
    """SIGTERM under load: each edit is finished or told that the server stops, in time."""
    with start("--workers", "1", "--shutdown-timeout", "8") as server:
        edits, ended = Edits(server), 0.0

        def stop() -> None:
            nonlocal ended
            wait_for(lambda: server.metric("instgenie:num_requests_running") > 0)
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(60)
            ended = time.monotonic() - began

        answers = edits.run_all(range(0, 60, 2), stop)
        held = all(one.status in (200, 503) for one in answers) and ended < 10
        return say("sigterm", held, f"{codes(answers)}; ended after {ended:.1f} s, code {server.process.returncode}")


def kill_http(start: "Start") -> bool:
    """kill -9 of the HTTP process while its workers load, and while they run: no orphan stays."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "instgenie", "serve", start.model, "--port", "0", "--device", start.device]
        for is_loading in (True, False):
            with (Path(folder) / "log").open("w") as log:
                server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
            assert server.stdout
            url = server.stdout.readline().split()[-1].removesuffix("/v1")
            wait_for(lambda url=url: httpx.get(f"{url}/ready", trust_env=False).status_code in (200, 503))
            if not is_loading:
                wait_for(lambda url=url: httpx.get(f"{url}/ready", trust_env=False).status_code == 200)
            workers = psutil.Process(server.pid).children(recursive=True)
            server.kill()
            began = time.monotonic()
            _, left = psutil.wait_procs(workers, timeout=30)
            found.append((len(workers), len(left), time.monotonic() - began))
    held = all(not left for _, left, _ in found)
    rows = "; ".join(f"{num} workers, {left} left after {seconds:.1f} s" for num, left, seconds in found)
    return say("kill http", held, f"while loading and while ready: {rows}")


def full_disk(start: "Start") -> bool:
    """A cache folder on a file system of 1 MiB."""
    with tempfile.TemporaryDirectory() as folder:
        mounted = (
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False).returncode == 0
        )
        if not mounted:
            return say("full disk", False, "no file system could be mounted: run it as root")
        try:
            with start("--workers", "1", "--cache-dir", folder) as server:
                answers = Edits(server).run_all(range(0, 24, 2))
                again = [Edits(server).run(number, reuse="auto") for number in range(0, 24, 2)]
                held = all(one.status == 200 for one in (*answers, *again))
                return say(
                    "full disk",
                    held,
                    f"{codes([*answers, *again])}; {sum(map(size_of, Path(folder).rglob('*')))} bytes",
                )
        finally:
            subprocess.run(["umount", "-l", folder], check=False)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def flipped_bytes(start: "Start") -> bool:
    """A byte flipped in every cache file between two runs of the server: found, never painted."""
    with tempfile.TemporaryDirectory() as folder:
        with start("--workers", "1", "--cache-dir", folder) as server:
            edits, numbers = Edits(server), range(1, 9, 2)
            edits.register()
            before = edits.run_all(numbers)
            server.stop()
        files = [path for path in Path(folder).rglob("*") if path.is_file() and path.stat().st_size]
        for path in files:
            data = bytearray(path.read_bytes())
            data[len(data) * 2 // 3] ^= 0x10
            path.write_bytes(data)
        with start("--workers", "1", "--cache-dir", folder) as server:
            after = Edits(server).run_all(numbers)
        difference = worst(after, before)
        held = all(one.status == 200 for one in (*before, *after)) and difference <= 1
        return say("flipped bytes", held, f"{len(files)} files: {codes(after)}; pixels differ by {difference} at most")


def remote_gone(start: "Start") -> bool:
    """The remote store fails at every touch: edits go on."""
    with start("--workers", "1", "--remote-cache", "s3://nowhere/x", AWS_ENDPOINT_URL="http://127.0.0.1:9",
               AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x") as server:  # fmt: skip
        answers = Edits(server).run_all(range(0, 16, 2))
        again = [Edits(server).run(number, reuse="auto") for number in range(0, 16, 2)]
        held = all(one.status == 200 for one in (*answers, *again))
        with server.http(None) as client:
            names = [one["id"] for one in client.get("/v1/templates").json()["data"]]
            deleted = [client.delete(f"/v1/templates/{name}").status_code for name in names]
        return say("remote gone", held, f"{codes([*answers, *again])}; DELETE answered {dict(Counter(deleted))}")


def idle(start: "Start") -> bool:
    """200 idle, half-open and stalled connections: others are served."""
    with start("--workers", "1") as server:
        place = urlsplit(server.url)
        connections = [socket.create_connection((place.hostname, place.port), timeout=30) for _ in range(200)]
        for number, connection in enumerate(connections):
            if number % 3:
                connection.sendall(b"POST /v1/images/edits HTTP/1.1\r\nHost: 127.0.0.1\r\n")
            if number % 3 == 2:
                connection.sendall(b"Content-Type: application/json\r\nContent-Length: 999\r\n\r\n{")
        answers = Edits(server).run_all(range(0, 16, 2))
        for connection in connections:
            connection.close()
        return say("idle", all(one.status == 200 for one in answers), f"200 connections: {codes(answers)}")


FAULTS = {
    "storm": storm, "sigterm": sigterm, "kill_http": kill_http, "full_disk": full_disk,
    "flipped_bytes": flipped_bytes, "remote_gone": remote_gone, "idle": idle,
}  # fmt: skip


@dataclass(frozen=True)
class Start:
    model: str
    device: str

    @contextmanager
    def __call__(self, *flags: str, **variables: Any) -> Iterator[Running]:
        with tempfile.TemporaryDirectory() as folder:
            named = [flag.format(folder) for flag in flags]
            with running_server(Path(folder), self.model, *named, device=self.device, **variables) as server:
                yield server


def main() -> int:
    parser = argparse.ArgumentParser(description="Break a server and check that nothing is lost.")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", help="faults, separated by commas")
    options = parser.parse_args()
    os.environ.pop("INSTGENIE_CONFIG", None)
    names = options.only.split(",") if options.only else list(FAULTS)
    results = [FAULTS[name](Start(options.model, options.device)) for name in names]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
