"""One API key floods a server with long requests while another sends an edit every second. From the root of the
repository:

    PYTHONPATH=tests python -m helpers.flood --seconds 60 [--model builtin] [--device cpu]

Prints the P95 of the quiet key on the quiet server and beside the flood, and the time after which a template that is
posted beside the flood is ready.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import openai

from helpers.serving import ALICE, BOB, PICTURE, Running, edit, running_server

FLOOD = {"num_inference_steps": 1000}  # of each of ten pictures
QUIET = {"num_inference_steps": 4}
PATIENCE = 900.0  # seconds


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        keys = Path(name) / "keys"
        keys.write_text(f"noisy:{ALICE}\nquiet:{BOB}\n")
        flags = ("--api-key-file", str(keys))
        with running_server(Path(name), options.model, *flags, device=options.device) as server:
            edit(server, key=BOB, extra_body=QUIET)  # warms up
            alone = quiet_latencies(server, options.seconds // 3)
            stop = threading.Event()
            noisy = threading.Thread(target=flood, args=(server, stop), daemon=True)
            noisy.start()
            time.sleep(5)
            beside = quiet_latencies(server, options.seconds)
            ready = seconds_to_ready(server)
            stop.set()
    quiet, loud = p95(alone), p95(beside)
    print(f"P95 of the quiet key: {quiet:.2f} s on a quiet server, {loud:.2f} s beside the flood ({loud / quiet:.2f}x)")
    print(f"a template posted beside the flood was ready after {ready:.1f} s")


def quiet_latencies(server: Running, num_edits: int) -> list[float]:
    """Send an edit every second, or as soon as the last is answered."""
    latencies = []
    for _ in range(max(num_edits, 2)):
        start = time.perf_counter()
        edit(server, key=BOB, extra_body=QUIET)
        latencies.append(time.perf_counter() - start)
        time.sleep(max(1 - latencies[-1], 0))
    return latencies


def flood(server: Running, stop: threading.Event) -> None:
    """Send long requests without pause. They end with the server."""
    while not stop.is_set():
        try:
            edit(server, key=ALICE, n=10, extra_body=FLOOD)
        except openai.OpenAIError:
            time.sleep(0.1)


def seconds_to_ready(server: Running) -> float:
    start = time.perf_counter()
    headers = {"authorization": f"Bearer {BOB}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60, trust_env=False) as client:
        posted = client.post("/v1/templates", files={"image": PICTURE}, data={"num_inference_steps": "4"})
        while time.perf_counter() - start < PATIENCE:
            if client.get(f"/v1/templates/{posted.json()['id']}").json()["state"] == "ready":
                return time.perf_counter() - start
            time.sleep(0.2)
    return float("inf")


def p95(latencies: Sequence[float]) -> float:
    return statistics.quantiles(latencies, n=20)[-1]


if __name__ == "__main__":
    main(sys.argv[1:])
