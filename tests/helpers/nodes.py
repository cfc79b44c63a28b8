"""Breaks a server whose workers are on the nodes of a Ray cluster, and checks that nothing is lost. The nodes are
started by `ray start` on this machine. From the root of the repository:

    PYTHONPATH=tests python -m helpers.nodes [--model builtin] [--edits 60]

Each row says what happened, and `held` or `BROKEN`. Pictures are compared with those of undisturbed edits.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from helpers.faults import Answer, Edits, codes, say, worst
from helpers.serving import Running, running_server, wait_for
from instgenie.cluster.ray.local import LocalRay

SECONDS_TO_JOIN = 30.0
FLAGS = ("--max-queue", "200", "--no-register-examples")


def num_ready(server: Running) -> int:
    """Workers that take edits, as the metrics count them."""
    with server.http() as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(line.endswith(" 1.0") for line in lines if "worker_state{" in line and 'state="ready"' in line)


def wait_long(holds: Callable[[], bool]) -> float:
    """Wait for up to five minutes; return the seconds it took."""
    began = time.monotonic()
    for _ in range(5):
        with suppress(AssertionError):
            wait_for(holds)
            break
    assert holds(), "not within five minutes"
    return time.monotonic() - began


def kill(pid: int) -> int:
    """Kill a process and all below it; return their number."""
    found = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return len(found)


def answered(answers: list[Answer]) -> bool:
    return all(one.status == 200 for one in answers)


def node_dies(server: Running, ray: LocalRay, numbers: range) -> bool:
    """A node is killed with all its processes while the edits run; another one joins."""
    edits = Edits(server)
    edits.register()
    undisturbed = edits.run_all(numbers)
    finished = server.metric("instgenie:request_success_total")
    killed = 0

    def disturb() -> None:
        nonlocal killed
        wait_for(lambda: server.metric("instgenie:num_requests_running") > 0)
        time.sleep(1)
        killed = kill(ray.nodes[1].pid)

    disturbed = edits.run_all(numbers, disturb)
    num_answers = server.metric("instgenie:request_success_total") - finished
    difference = worst(disturbed, undisturbed)
    held = answered(undisturbed) and answered(disturbed) and difference <= 1 and num_answers == len(numbers)
    text = f"{killed} processes killed: {codes(disturbed)}, {num_answers:g} finished; "
    return say("node dies", held, text + f"pixels differ by {difference} at most")


def node_joins(server: Running, ray: LocalRay) -> bool:
    """A node joins in place of the dead one, and takes work."""
    num_before = num_ready(server)
    began = time.monotonic()
    ray.add()
    joined = time.monotonic() - began
    ready = wait_long(lambda: num_ready(server) == 2)
    held = num_before == 1 and joined + ready <= SECONDS_TO_JOIN
    return say("node joins", held, f"Ray took {joined:.1f} s, the worker takes edits after {ready:.1f} s more")


def scales(ray: LocalRay, model: str, numbers: range) -> bool:
    """A server grows under load and shrinks when idle, while single edits go on."""
    flags = ["--cluster", ray.address, "--cluster-name", "scales", "--min-workers", "1", "--max-workers", "2"]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(
            Path(folder), model, *flags, "--scale-up-seconds", "1", "--scale-down-seconds", "5", *FLAGS
        ) as server,
    ):
        edits = Edits(server)
        before, most = num_ready(server), 0
        answers: list[Answer] = []
        end = time.monotonic() + 300
        while most < 2 and time.monotonic() < end:
            answers += edits.run_all(range(0, 2 * len(numbers), 2))
            most = max(most, num_ready(server))
        while num_ready(server) > 1 and time.monotonic() < end:
            answers.append(edits.run(0))
            time.sleep(0.5)
        held = (before, most, num_ready(server)) == (1, 2, 1) and answered(answers)
        return say("scales", held, f"{before} worker, then {most}, then {num_ready(server)}: {codes(answers)}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Break a server on Ray and check that nothing is lost.")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--edits", type=int, default=60)
    options = parser.parse_args()
    os.environ.pop("INSTGENIE_CONFIG", None)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # nothing is left behind
    numbers = range(options.edits)
    with LocalRay(num_nodes=2, num_cores=1) as ray:
        with (
            tempfile.TemporaryDirectory() as folder,
            running_server(Path(folder), options.model, "--cluster", ray.address, "--workers", "2", *FLAGS) as server,
        ):
            say("starts", True, f"both workers are ready after {wait_long(lambda: num_ready(server) == 2):.1f} s more")
            results = [node_dies(server, ray, numbers), node_joins(server, ray)]
            code = server.stop()
            results.append(say("stops", code == 0, f"exit code {code}"))
        results.append(scales(ray, options.model, numbers))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
