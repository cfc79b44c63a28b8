"""Runs the server from start to SIGTERM. Knows sockets, signals and the order of things: listen, load, serve, drain,
stop."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Coroutine, Iterator
from functools import partial
from typing import Any

import uvicorn

from instgenie.cluster.config import CacheConfig, ClusterConfig
from instgenie.cluster.local import Cluster
from instgenie.errors import ServeError
from instgenie.server.app import make_app
from instgenie.server.config import HttpConfig, ServeConfig
from instgenie.server.guard.connection import HEAD_TIMEOUT, Connection
from instgenie.server.monitoring.log import say, set_up_log
from instgenie.server.service import Service
from instgenie.telemetry import traces

KEEP_ALIVE = 65
SECONDS_TO_SEND = 5  # the last answers, once their edits are finished
LOOPBACK = ("127.", "::1", "localhost")


class Server(uvicorn.Server):
    """uvicorn's, without its signal handlers: a signal means drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(config: ServeConfig, version: str) -> int:
    set_up_log(config.http.log_format)
    set_up_traces(config.http)
    listener = listen(config.http)
    try:
        return asyncio.run(run(config, listener, version))
    finally:
        listener.close()


def set_up_traces(config: HttpConfig) -> None:
    """The processes of the cluster read the same variables."""
    if config.traces_endpoint:
        os.environ[traces.ENDPOINT] = config.traces_endpoint
    if traces.are_wanted(os.environ):
        traces.check()


def listen(config: HttpConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as failed:
        listener.close()
        raise ServeError(f"cannot listen on {config.host}:{config.port}: {failed.strerror}") from None
    return listener


async def run(config: ServeConfig, listener: socket.socket, version: str) -> int:
    cluster = Cluster(config.cluster)
    service = Service(config.http, cluster, with_traces=traces.are_wanted(os.environ))
    server = Server(
        uvicorn.Config(
            make_app(service, version),
            http=partial(Connection, head_timeout=min(HEAD_TIMEOUT, config.http.body_timeout)),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=SECONDS_TO_SEND,
        )
    )
    signalled = catch_signals()
    end = 0.0  # of the time in which the server has to stop
    serving = asyncio.create_task(server.serve([listener]))
    address = f"{config.http.host}:{listener.getsockname()[1]}"
    print_plan(config.http, cluster.config, address, version)
    try:
        await cluster.start()
        if await unless_signalled(cluster.until_ready(), signalled):
            say("ready", address=address)
            await signalled.wait()
        say("draining", running=service.num_watches)
        end = time.monotonic() + config.http.shutdown_timeout
        finished = await service.drain(config.http.shutdown_timeout)
    finally:
        service.draining = True
        # what is not finished by now fails, and its clients hear so
        await cluster.stop(max(end - time.monotonic(), 0.0))
        server.should_exit = True
        await serving
        service.pictures.close()
        traces.close()
    say("stopped", finished=finished)
    return 0 if finished else 1


async def unless_signalled(work: Coroutine[Any, Any, None], signalled: asyncio.Event) -> bool:
    """Whether the work is done; a signal goes first."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(signalled.wait())
    done, _ = await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    for task in (working, stopping):
        task.cancel()
    if working in done:
        working.result()
    return working in done


def catch_signals() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; the second ends the process at once."""
    signalled = asyncio.Event()

    def on_signal(number: int) -> None:
        if signalled.is_set():
            os._exit(128 + number)
        signalled.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return signalled


def print_plan(http: HttpConfig, cluster: ClusterConfig, address: str, version: str) -> None:
    names = ", ".join(http.served_model_names)
    lines = {
        f"InstGenIE {version}": f"serves {names} on http://{address}/v1",
        "model": cluster.model,
        "workers": ", ".join(cluster.devices),
        "batches": f"{cluster.batching}, up to {cluster.max_batch_size} edits; up to {cluster.max_queue} wait",
        "activations": describe_cache(cluster.cache) if cluster.reuse else "not kept",
        "keys": f"{len(http.api_keys)} accepted" if http.api_keys else "none asked for",
        "limits": f"{http.max_body_bytes / 2**20:.0f} MiB a request, {http.max_pixels / 1e6:.1f} megapixels a picture",
        "pages": f"http://{address}/  http://{address}/engine",
        "look at": f"http://{address}/ready  http://{address}/metrics  http://{address}/openapi.json",
    }
    for name, value in lines.items():
        print(f"{name:<16} {value}", flush=True)
    if not http.api_keys and not http.host.startswith(LOOPBACK):
        print("everyone who reaches this address may use it: --api-key asks for a key", flush=True)


def describe_cache(cache: CacheConfig) -> str:
    """From the top; what each worker has, then what they share."""
    assert cache.host_bytes is not None  # the cluster has chosen it
    tiers = [f"{cache.dtype}, up to {cache.host_bytes / 2**30:.3g} GiB in memory"]
    if cache.disk:
        tiers.append(f"{cache.disk_bytes / 2**30:g} GiB in {cache.disk}")
    if cache.remote:
        tiers.append(f"{cache.remote_bytes / 2**30:g} GiB remote")
    return ", ".join(tiers)
