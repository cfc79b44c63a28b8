"""Joins Ray, or starts it, and finds or creates the controller. These calls block: make them before the event loop
runs."""

import logging
import os
import socket
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec
import ray
from ray.exceptions import RayError

from instgenie.cluster.ray.controller import Controller
from instgenie.cluster.ray.launcher import RayLauncher
from instgenie.cluster.ray.names import CONTROLLER, RayConfig, namespace
from instgenie.errors import ServeError
from instgenie.machine.curve import make_secret

NUM_CALLS = 1000  # that the controller takes at once
SECONDS_TO_JOIN = 60.0
SECONDS_BETWEEN_TRIES = 0.5
SECONDS_TO_ANSWER = 10.0
PASSED = ("OMP_NUM_THREADS", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")  # to all workers
STORAGE = "FSSPEC_"  # variables of this prefix, which configure remote caches, are passed to all workers, too
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}


def connect(config: RayConfig) -> RayLauncher:
    """Join the cluster as one more front; the first one creates it."""
    join_ray(config.address, config.name)
    settings = msgspec.json.encode(config.settings)
    environment = {name: os.environ[name] for name in os.environ if name in PASSED or name.startswith(STORAGE)}
    options = {"name": CONTROLLER, "lifetime": "detached", "get_if_exists": True, "max_restarts": -1, "num_cpus": 0}
    arguments = settings, make_secret(), environment
    end = time.monotonic() + SECONDS_TO_JOIN
    while True:
        controller: Any = ray.remote(Controller).options(**options, max_concurrency=NUM_CALLS).remote(*arguments)
        try:
            differences, secret = ray.get(controller.join.remote(settings), timeout=SECONDS_TO_JOIN)
            break
        except RayError as failed:  # it was about to end, or its node died
            if time.monotonic() > end:
                raise ServeError(f"the controller of the cluster {config.name!r} does not answer: {failed}") from None
            time.sleep(SECONDS_BETWEEN_TRIES)
    if differences:
        raise ServeError(
            f"the cluster {config.name!r} runs with other settings: {'; '.join(differences)}. "
            "Use the same options, or another --cluster-name"
        )
    return RayLauncher(controller, secret, own_address(config.address), namespace(config.name))


def agreed_slots() -> int | None:
    """The most workers that the cluster which this process has joined may have; None: it is yet to be created."""
    try:
        controller: Any = ray.get_actor(CONTROLLER)
        return int(ray.get(controller.max_workers.remote(), timeout=SECONDS_TO_ANSWER))
    except (ValueError, RayError):
        return None


def count_slots(resources: Mapping[str, float]) -> int:
    """The slots with these resources that the nodes have room for, if they are empty."""
    offers = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(min(int(offer.get(name, 0) // amount) for name, amount in resources.items()) for offer in offers)


def has_gpus() -> bool:
    """True if a node has a GPU."""
    return bool(ray.cluster_resources().get("GPU", 0))


def join_ray(address: str, cluster: str) -> None:
    """Connect this process to Ray; nothing happens if it is connected."""
    if ray.is_initialized():
        return
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    logging.setLogRecordFactory(logging.LogRecord)  # Ray's own adds a field to every line of the log
    common: dict[str, Any] = {"namespace": namespace(cluster), "log_to_driver": False, "configure_logging": False}
    try:
        if address == "ray":
            try:
                ray.init("auto", **common)
            except ConnectionError:
                ray.init("local", include_dashboard=False, **common)
        else:
            ray.init(address, **common)
    except (ConnectionError, RuntimeError, ValueError) as failed:
        raise ServeError(f"cannot join Ray at {address}: {failed}") from None


def own_address(address: str) -> str:
    """The address of this machine that the nodes can reach: Ray's own, or that of the way to a remote head."""
    if not address.startswith("ray://"):
        return str(ray.util.get_node_ip_address())
    head = urlsplit(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((head.hostname, head.port or 10001))  # sends nothing
        return str(probe.getsockname()[0])
