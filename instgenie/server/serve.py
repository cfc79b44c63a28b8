"""Runs the server from start to SIGTERM: listen, load, serve, drain, stop. Knows sockets and signals."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from instgenie.cluster.cluster import Cluster
from instgenie.cluster.config import ClusterConfig, ResolvedCache, ResolvedConfig
from instgenie.cluster.ray.names import RayConfig
from instgenie.errors import ServeError
from instgenie.server.app import make_app
from instgenie.server.config import HttpConfig, ServeConfig
from instgenie.server.guard.connection import HEAD_TIMEOUT, Connection
from instgenie.server.guard.keys import PUBLIC, ApiKey
from instgenie.server.loading import showing
from instgenie.server.monitoring.log import say, set_up_log
from instgenie.server.service import HttpService
from instgenie.telemetry import traces

if TYPE_CHECKING:
    from instgenie.cluster.ray.launcher import RayLauncher
    from instgenie.cluster.ray.ledger import RayLedger
    from instgenie.cluster.ray.liaison import Liaison

KEEP_ALIVE = 65
SECONDS_TO_ANSWER = 5.0  # for requests that are not refused and not yet answered when all edits are done, at most
SECONDS_TO_SEND = 1.0  # for the last answers, at least
SECONDS_TO_EXIT = 3.0  # beyond the shutdown timeout, before the process is ended by force
SECONDS_TO_JOIN = 0.5  # for threads, at the very end
SECONDS_BETWEEN_LOOKS = 0.05
LOOPBACK = ("127.", "::1", "localhost")


class Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: our handlers drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(config: ServeConfig, version: str) -> int:
    set_up_log(config.http.log_format)
    set_up_traces(config.http)
    listener = listen(config.http)
    try:
        launcher = join_cluster(config.ray) if config.ray else None  # it may take seconds, and no loop runs yet
        return asyncio.run(run(config, listener, version, launcher))
    finally:
        listener.close()


def join_cluster(config: RayConfig) -> "RayLauncher":
    from instgenie.cluster.ray.connect import connect  # Ray is an extra

    return connect(config)


def set_up_traces(config: HttpConfig) -> None:
    """Configure traces through the environment, which the worker processes inherit."""
    if config.traces_endpoint:
        os.environ[traces.ENDPOINT] = config.traces_endpoint
    if traces.are_wanted(os.environ):
        traces.check()


def listen(config: HttpConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio asks for the protocol
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as failed:
        listener.close()
        raise ServeError(f"cannot listen on {config.host}:{config.port}: {failed.strerror}") from None
    return listener


def make_server(app: ASGIApp, config: HttpConfig) -> Server:
    return Server(
        uvicorn.Config(
            app,
            http=partial(Connection, head_timeout=min(HEAD_TIMEOUT, config.body_timeout)),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
        )
    )


async def run(config: ServeConfig, listener: socket.socket, version: str, launcher: "RayLauncher | None" = None) -> int:
    cluster = Cluster(config.cluster, launcher, make_ledger(config.cluster) if launcher else None)
    liaison = make_liaison(launcher, cluster) if launcher else None
    service = HttpService(config.http, cluster, with_traces=traces.are_wanted(os.environ))
    server = make_server(make_app(service, version), config.http)
    signalled = catch_signals()
    timeout = 0.0  # nothing is waited for after a failure
    serving = asyncio.create_task(server.serve([listener]))
    address = f"{f'[{host}]' if ':' in (host := config.http.host) else host}:{listener.getsockname()[1]}"
    print_plan(config.http, cluster.config, address, version)
    try:
        await cluster.start()
        if liaison:
            liaison.start()
        with showing(cluster):
            is_ready = await unless_signalled(cluster.until_ready(), signalled)
        if is_ready:
            say("ready", address=address)
            if not config.http.api_keys:
                service.warming.start(PUBLIC)
            await signalled.wait()
        say("draining", running=service.num_watches)
        timeout = config.http.shutdown_timeout
        end_by_force(timeout + SECONDS_TO_EXIT)
    finally:
        end = time.monotonic() + timeout
        service.draining = True
        service.warming.stop()
        # edits that are not done in time fail here, and their clients get an error
        finished = await cluster.stop(timeout)
        await stop_answering(service, server, end - time.monotonic())
        await serving
        if liaison:
            await liaison.stop(max(end - time.monotonic(), SECONDS_TO_SEND))
        service.decoder.close()
        service.admission.close()
        traces.close()
    say("stopped", finished=finished)
    code = 0 if finished else 1
    end_by_force(SECONDS_TO_JOIN, code)  # threads that still decode are not waited for
    return code


def make_ledger(config: ClusterConfig) -> "RayLedger":
    from instgenie.cluster.ray.ledger import RayLedger

    return RayLedger(config.hold_seconds)


def make_liaison(launcher: "RayLauncher", cluster: Cluster) -> "Liaison":
    from instgenie.cluster.ray.liaison import Liaison

    return Liaison(launcher, cluster)


async def stop_answering(service: HttpService, server: Server, timeout: float) -> None:
    """Close all connections once their answers are sent. Requests that have no answer by then are refused: their bodies
    have not arrived, or their answers are still being made."""
    server.config.timeout_graceful_shutdown = max(timeout, SECONDS_TO_SEND)  # type: ignore[assignment]
    server.should_exit = True
    end = time.monotonic() + min(timeout, SECONDS_TO_ANSWER)
    while service.requests and time.monotonic() < end:
        await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
    service.refuse_rest()


def end_by_force(seconds: float, code: int = 1) -> None:
    """End the process after this time, whatever still holds it up: a thread, a collector of traces. Worker processes
    end with it."""
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()


async def unless_signalled(work: Coroutine[Any, Any, None], signalled: asyncio.Event) -> bool:
    """Run the work until it is done or a signal arrives; return whether it is done."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(signalled.wait())
    done, _ = await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    for task in (working, stopping):
        task.cancel()
    if working in done:
        working.result()
    return working in done


def catch_signals() -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets; a second signal ends the process at once."""
    signalled = asyncio.Event()

    def on_signal(number: int) -> None:
        if signalled.is_set():
            os._exit(128 + number)
        signalled.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return signalled


def print_plan(http: HttpConfig, cluster: ResolvedConfig, address: str, version: str) -> None:
    names = ", ".join(http.served_model_names)
    lines = {
        f"InstGenIE {version}": f"serves {names} on http://{address}/v1",
        "model": describe_model(cluster),
        "workers": ", ".join(cluster.devices),
        "batching": f"{cluster.batching}, at most {cluster.max_batch_size} per batch and {cluster.max_queue} waiting",
        "activations": describe_cache(cluster.cache) if cluster.reuse else "not cached",
        "API keys": describe_keys(http.api_keys),
        "limits": f"{http.max_body_bytes / 2**20:.0f} MiB per request, {http.max_pixels / 1e6:.1f} megapixels",
        "pages": f"http://{address}/  http://{address}/engine",
        "endpoints": f"http://{address}/ready  http://{address}/metrics  http://{address}/openapi.json",
    }
    for name, value in lines.items():
        print(f"{name:<16} {value}", flush=True)
    if not http.api_keys and not http.host.startswith(LOOPBACK):
        print("anyone who can reach this address may use it: set --api-key to require a key", flush=True)


def describe_model(cluster: ResolvedConfig) -> str:
    products = f", products in {cluster.quantization}" if cluster.quantization else ""
    return cluster.model + products + (f", weights in {cluster.weights_dtype}" if cluster.weights_dtype else "")


def describe_keys(keys: Sequence[ApiKey]) -> str:
    """Count the keys, and name the tenants that have names."""
    if not keys:
        return "none required"
    names = sorted({key.name for key in keys if key.name})
    return f"{len(keys)} accepted" + (f", with tenants {', '.join(names)}" if names else "")


def describe_cache(cache: ResolvedCache) -> str:
    """Describe the tiers, fastest first: those of each worker, then the shared ones."""
    tiers = [f"{cache.dtype}, up to {cache.host_bytes / 2**30:.3g} GiB in main memory per worker"]
    if cache.disk:
        tiers.append(f"{cache.disk_bytes / 2**30:g} GiB in {cache.disk}")
    if cache.remote:
        tiers.append(f"{cache.remote_bytes / 2**30:g} GiB remote")
    return ", ".join(tiers)
