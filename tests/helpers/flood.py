"""What others feel of a flood, of load, and of too little memory, on real servers. From the root of the repository:

    PYTHONPATH=tests python -m helpers.flood [flood templates memory] [--seconds 60] [--model builtin] [--device cpu]

Prints three figures:

- the P95 of a key that sends an edit every second, beside one that sends requests of ten pictures and 1000 steps
  without pause, against that on a quiet server (at most 2);
- the time after which a template is ready that is posted under 90 % of the load which the server sustains, against
  that on a quiet server (at most 4);
- the edits of two templates that do not fit into memory together, each sent without pause (both above 0).
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path

import httpx
import numpy as np
import openai

from helpers.serving import ALICE, BOB, Running, alpha_png, edit, mask, picture, png, running_server, wait_for

QUIET = {"num_inference_steps": 4}
PARTS = ("flood", "templates", "memory")
SIDE = 256
LOAD = 0.9
NUM_BURST = 16
NUM_TEMPLATES = 3  # posted on the quiet server, and as many under load
PATIENCE = 900.0  # seconds
MASK = alpha_png(mask((SIDE, SIDE)))

Start = Callable[..., AbstractContextManager[Running]]


def photo(seed: int) -> bytes:
    return png(picture(seed, (SIDE, SIDE)))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=PARTS, help="what to measure")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=1000, help="of each of the ten pictures of the flood")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        keys = Path(name) / "keys"
        keys.write_text(f"noisy:{ALICE}\nquiet:{BOB}\n")

        def start(*flags: str) -> AbstractContextManager[Running]:
            common = ("--api-key-file", str(keys), "--no-register-examples", "--no-auto-register")
            return running_server(Path(name), options.model, *common, *flags, device=options.device)

        if "flood" in options.parts:
            with start() as server:
                flood_test(server, options.seconds, options.steps)
        if "templates" in options.parts:
            with start("--max-queue", "1000") as server:
                template_test(server)
        if "memory" in options.parts:
            memory_test(start, Path(name) / "cache", options.seconds)


def flood_test(server: Running, seconds: int, steps: int) -> None:
    ready_after(server, 0)
    quiet_edit(server)  # warms up
    alone = quiet_latencies(server, seconds // 3)
    stop = threading.Event()
    threading.Thread(target=flood, args=(server, steps, stop), daemon=True).start()
    wait_for(lambda: server.metric("instgenie:num_requests_running") >= 2)
    time.sleep(5)
    beside = quiet_latencies(server, seconds)
    stop.set()
    quiet, loud = p95(alone), p95(beside)
    print(f"P95 of the quiet key: {quiet:.2f} s on a quiet server, {loud:.2f} s beside the flood ({loud / quiet:.2f}x)")
    means = statistics.fmean(alone), statistics.fmean(beside)
    print(f"its mean: {means[0]:.2f} s and {means[1]:.2f} s ({means[1] / means[0]:.2f}x)", flush=True)


def quiet_edit(server: Running, seed: int = 0) -> None:
    edit(server, key=BOB, image=photo(seed), mask=MASK, extra_body=QUIET)


def quiet_latencies(server: Running, num_edits: int) -> list[float]:
    """Send an edit every second, or as soon as the last is answered."""
    latencies = []
    for _ in range(max(num_edits, 2)):
        start = time.perf_counter()
        quiet_edit(server)
        latencies.append(time.perf_counter() - start)
        time.sleep(max(1 - latencies[-1], 0))
    return latencies


def flood(server: Running, steps: int, stop: threading.Event) -> None:
    """Send long requests without pause. They end with the server."""
    while not stop.is_set():
        try:
            patient = server.openai(ALICE).with_options(timeout=PATIENCE)
            fields = {"image": photo(0), "mask": MASK, "prompt": "a red cat", "n": 10}
            patient.images.edit(**fields, extra_body={"num_inference_steps": steps})  # type: ignore[call-overload]
        except openai.OpenAIError as refused:
            if not stop.is_set():
                print(f"the flood was refused: {refused}")
            time.sleep(1)


def template_test(server: Running) -> None:
    ready_after(server, 0)
    quiet_edit(server)
    with ThreadPoolExecutor(64) as pool:
        start = time.perf_counter()
        for burst in [pool.submit(quiet_edit, server) for _ in range(NUM_BURST)]:
            burst.result()
        rate = LOAD * NUM_BURST / (time.perf_counter() - start)
        alone = [ready_after(server, seed) for seed in range(1, 1 + NUM_TEMPLATES)]
        stop = threading.Event()
        sending = pool.submit(send_at, rate, server, stop, pool)
        time.sleep(10)
        loaded = [ready_after(server, seed) for seed in range(11, 11 + NUM_TEMPLATES)]
        stop.set()
        num_sent = sending.result()
    ratio = statistics.fmean(loaded) / statistics.fmean(alone)
    print(
        f"a template is ready after {statistics.fmean(alone):.2f} s on a quiet server, "
        f"{statistics.fmean(loaded):.2f} s "
        f"(at most {max(loaded):.2f}) under {LOAD:.0%} load, {rate:.2f} edits/s, {num_sent} sent ({ratio:.2f}x)",
        flush=True,
    )


def send_at(rate: float, server: Running, stop: threading.Event, pool: ThreadPoolExecutor) -> int:
    """Send edits with random gaps until told to stop, and return their number."""
    gaps = np.random.default_rng(0)
    for number in count():
        if stop.wait(gaps.exponential(1 / rate)):
            return number
        pool.submit(quiet_edit, server)
    raise AssertionError


def ready_after(server: Running, seed: int) -> float:
    """Register a picture and return the seconds until it is ready."""
    start = time.perf_counter()
    with server.http(BOB) as client:
        fields = {key: str(value) for key, value in QUIET.items()}
        posted = client.post("/v1/templates", files={"image": photo(seed)}, data=fields)
        assert posted.status_code == 201, posted.text
        while time.perf_counter() - start < PATIENCE:
            if client.get(f"/v1/templates/{posted.json()['id']}").json()["state"] == "ready":
                return time.perf_counter() - start
            time.sleep(0.02)
    return float("inf")


def memory_test(start: Start, folder: Path, seconds: int) -> None:
    with start() as server:
        ready_after(server, 0)
        with server.http(BOB) as client:
            [template] = client.get("/v1/templates").json()["data"]
    room = 1.5 * max(template["tier_bytes"].values()) / 2**30
    with start("--cache-dir", str(folder), "--host-cache-gib", f"{room:.6f}", "--gpu-cache-gib", "0") as server:
        for seed in (0, 1):
            ready_after(server, seed)
        until = time.perf_counter() + seconds
        with ThreadPoolExecutor(8) as pool:
            senders = [pool.submit(send_until, until, server, seed) for seed in (0, 1) for _ in range(4)]
            done = [latencies for sender in senders for latencies in [sender.result()]]
    for seed in (0, 1):
        own = [latency for latencies in done[4 * seed : 4 * seed + 4] for latency in latencies]
        print(
            f"template {seed + 1} of two, of which one fits into memory: {len(own)} edits in {seconds} s, "
            f"the slowest {max(own):.2f} s",
            flush=True,
        )


def send_until(until: float, server: Running, seed: int) -> list[float]:
    latencies = []
    while time.perf_counter() < until:
        start = time.perf_counter()
        try:
            quiet_edit(server, seed)
        except httpx.HTTPError as failed:
            print(f"an edit failed: {failed}")
        latencies.append(time.perf_counter() - start)
    return latencies


def p95(latencies: Sequence[float]) -> float:
    return float(np.quantile(latencies, 0.95))


if __name__ == "__main__":
    main(sys.argv[1:])
