"""What a worker on another machine costs: the messages at the boundaries of steps, over encrypted TCP as between the
nodes of a cluster, and over a local socket as on one machine. Both ends use the real sockets, lines and messages; the
worker's process takes no steps in between. Imports no torch.

Run as a module, it is the process at the worker's end.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import zmq
import zmq.asyncio
from rich.console import Console
from rich.table import Table

from instgenie.bench.files import check_folder, write_json
from instgenie.cluster import wire
from instgenie.cluster.config import ProcessConfig, ResolvedCache
from instgenie.cluster.environment import process_environment
from instgenie.machine.curve import SECRET, Doorkeeper, make_secret, secure_server
from instgenie.workers.fronts import SharedLine
from instgenie.workers.line import Line

Wire = Literal["local", "remote"]
NAMES = {"local": "a local socket", "remote": "TCP, encrypted"}
NAME = "0.denoise.1"
BATCH_SIZE = 8
JOB_BYTES = {"small": 2**18, "large": 4 * 2**20 + 2**19}  # tensors of an edit: the built-in model's, FLUX.1-dev's
LATENT_BYTES = 2**16
SECONDS_TO_ANSWER = 60.0
HEAD = wire.JobHead({}, (64, 64), 1.0, "FlowSchedule", msgspec.Raw(b"\x90"), (None,), ())
LATENTS = wire.TensorHead("float32", (1,))


@dataclass(frozen=True)
class BoundaryTimes:
    """Milliseconds; medians."""

    wire: Wire
    step_cpu_ms: float  # of the worker's loop: looking for messages and sending that a step was taken
    step_ms: float  # until the front knows of a step
    small_ms: float  # a small job's tensors to the worker, and its answer
    large_ms: float  # the same with a large job
    leave_ms: float  # latents of a finished job to the front
    large_cpu_ms: float  # of the front's process, all threads, for a large job


# the worker's end


def play_worker(endpoint: str, kind: Wire) -> None:
    """Answer each job at once: it joins, takes a step, and is done."""
    config = ProcessConfig(NAME, endpoint, "", "cpu", "auto", BATCH_SIZE, "continuous", ResolvedCache(host_bytes=0))
    line = Line(config) if kind == "local" else SharedLine(replace(config, front="bench"), True)
    line.send(wire.Loaded())
    latents, sending = bytes(LATENT_BYTES), 0  # nanoseconds
    while (received := line.receive(wait=True)) is None or not isinstance(received[0], wire.Stop):
        if received is None or not isinstance(received[0], wire.Denoise):
            continue
        steps = tuple(wire.JobStep(job.id, job.attempt, 1) for job in received[0].jobs)
        line.send(wire.Joined(steps, ((),) * len(steps)))
        start = time.thread_time()
        line.receive(wait=False)
        spent = time.thread_time() - start
        now = time.monotonic()
        start = time.thread_time()
        line.send(wire.BatchStepped(now, spent, sending, steps))  # whose fields carry what is measured here
        sending = round(1e9 * (time.thread_time() - start))  # told with the next step
        for job in steps:
            line.send(wire.Denoised(job.id, job.attempt, LATENTS, 0, time.monotonic()), [latents])
    line.close()


# the front's end


async def measure(kind: Wire, repeats: int) -> BoundaryTimes:
    with tempfile.TemporaryDirectory() as folder:
        secret = make_secret() if kind == "remote" else ""
        context = zmq.asyncio.Context()
        keeper = Doorkeeper(context, secret)
        socket = context.socket(zmq.ROUTER)
        secure_server(socket, secret)
        socket.bind(f"ipc://{folder}/bench" if kind == "local" else "tcp://127.0.0.1:*")
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        command = [sys.executable, "-m", "instgenie.bench.remote", endpoint, kind]
        child = subprocess.Popen(command, env=process_environment() | {SECRET: secret}, stdin=subprocess.PIPE)
        try:
            async with asyncio.timeout(SECONDS_TO_ANSWER):
                return await exchange(socket, kind, repeats)
        finally:
            with suppress(zmq.ZMQError):
                await socket.send_multipart([NAME.encode(), wire.encode(wire.Stop())])
            if child.stdin:
                child.stdin.close()
            child.wait(SECONDS_TO_ANSWER)
            socket.close(linger=0)
            keeper.close()
            context.term()


async def exchange(socket: Any, kind: Wire, repeats: int) -> BoundaryTimes:
    """Send jobs one by one, and time what comes back."""
    times = dict[str, list[float]](cpu=[], step=[], small=[], large=[], leave=[], spent=[])
    tensors = {size: bytes(num_bytes) for size, num_bytes in JOB_BYTES.items()}
    while not isinstance((await hear(socket))[0], wire.Loaded):
        pass
    looking = 0.0
    for number, size in enumerate(["small", "large"] * (repeats + 1)):
        job = wire.Denoising(f"job {number}", 1, HEAD, None, must_reuse=False, num_partials=0)
        start, worked = time.monotonic(), time.process_time()
        await socket.send_multipart([NAME.encode(), wire.encode(wire.Denoise((job,))), tensors[size]], copy=False)
        is_done = False
        while not is_done:
            message, now = await hear(socket)
            match message:
                case wire.Joined():
                    times[size].append(now - start)
                case wire.BatchStepped(sent, spent, sending):  # sending the step before took so long
                    times["step"].append(now - sent)
                    times["cpu"].append(looking + 1e-9 * sending)
                    looking = spent
                case wire.Denoised(seconds=sent):
                    times["leave"].append(now - sent)
                    is_done = True
        if size == "large":
            times["spent"].append(time.process_time() - worked)
    typical = {name: 1000 * statistics.median(values[1:]) for name, values in times.items()}
    return BoundaryTimes(
        wire=kind,
        step_cpu_ms=round(typical["cpu"], 4),
        step_ms=round(typical["step"], 3),
        small_ms=round(typical["small"], 3),
        large_ms=round(typical["large"], 3),
        leave_ms=round(typical["leave"], 3),
        large_cpu_ms=round(typical["spent"], 3),
    )


async def hear(socket: Any) -> tuple[wire.AnyMessage, float]:
    _, head, *_ = await socket.recv_multipart(copy=False)
    return wire.decode(head.buffer), time.monotonic()


def bench_remote(repeats: int, json_path: Path | None = None) -> None:
    check_folder(json_path)
    local, remote = (asyncio.run(measure(kind, repeats)) for kind in ("local", "remote"))
    table = Table(title=f"milliseconds, {repeats} jobs each", title_justify="left")
    table.add_column("")
    for heading in (NAMES["local"], NAMES["remote"], "difference"):
        table.add_column(heading, justify="right")
    rows = {
        "a step: CPU of the worker's loop": "step_cpu_ms",
        "a step: until the front knows": "step_ms",
        f"a job joins, {JOB_BYTES['small'] / 2**20:g} MiB": "small_ms",
        f"a job joins, {JOB_BYTES['large'] / 2**20:g} MiB": "large_ms",
        "the same: CPU of the front": "large_cpu_ms",
        f"a job leaves, {LATENT_BYTES / 2**10:g} KiB": "leave_ms",
    }
    for name, field in rows.items():
        one, other = getattr(local, field), getattr(remote, field)
        table.add_row(name, f"{one:.3f}", f"{other:.3f}", f"{other - one:+.3f}")
    Console().print(table)
    if json_path:
        write_json({"repeats": repeats, "rows": [asdict(local), asdict(remote)]}, json_path)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    play_worker(sys.argv[1], "local" if sys.argv[2] == "local" else "remote")
