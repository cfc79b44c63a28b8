"""The options of `instgenie serve` for workers on the nodes of a Ray cluster, and what they become. Ray is imported
only if `--cluster` is given."""

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from instgenie.cluster.config import ClusterConfig
from instgenie.cluster.ray.names import ClusterSettings, RayConfig
from instgenie.errors import ConfigError
from instgenie.scheduling.autoscaler import ScalingConfig
from instgenie.server.options import AUTO, Option, auto_or, number, whole_number

MAX_SLOTS = 20_000
SECONDS_TO_LINGER = 120.0  # workers outlive the last front that died, so that a new one finds them
AGREED = (  # by all fronts
    "dtype", "quantization", "weights_dtype", "convolutions", "reuse_changed", "max_batch_size", "batching", "graphs",
    "plan", "worker_timeout", "hold_seconds", "register_after", "register_window", "scheduling", "weights",
)  # fmt: skip


def address(given: str) -> str:
    if given not in ("ray", AUTO) and not re.fullmatch(r"(ray://)?[^\s/:]+:\d+", given):
        raise ValueError("ray, auto, HOST:PORT or ray://HOST:PORT is expected")
    return given


def name(given: str) -> str:
    if not re.fullmatch(r"[\w.-]{1,64}", given):
        raise ValueError("1 to 64 letters, digits, dots, dashes and underscores are expected")
    return given


def resources(given: str) -> dict[str, float]:
    """Parse a list like GPU=1,CPU=4."""
    found: dict[str, float] = {}
    for part in given.split(","):
        key, _, amount = part.strip().partition("=")
        try:
            found[key] = float(amount)
        except ValueError:
            found[key] = 0.0
        if not key or not found[key] > 0:
            raise ValueError("a list like GPU=1,CPU=4 is expected")
    return found


NODE_OPTIONS = (
    Option("cluster", address, None,
           "run the workers on the nodes of a Ray cluster: ray = join the one on this machine or start one, auto, "
           "HOST:PORT or ray://HOST:PORT = join", "WHERE", default_text="workers on this machine"),
    Option("cluster-name", name, "default", "name of the cluster on Ray; servers with the same name share workers",
           "NAME"),
    Option("min-workers", auto_or(whole_number(1, MAX_SLOTS)), AUTO, "workers to keep when idle; with --cluster",
           default_text="as --workers"),
    Option("max-workers", auto_or(whole_number(1, MAX_SLOTS)), AUTO,
           "workers to have when the queue is long; with --cluster", default_text="as --workers"),
    Option("worker-resources", resources, None, "resources that Ray reserves for each worker", "LIST",
           default_text="GPU=1, or CPU=1 with --device cpu"),
    Option("scale-up-seconds", number(0.1, 86400), 10.0,
           "predicted seconds of work per worker above which a worker is added"),
    Option("scale-down-seconds", number(0.1, 86400), 60.0,
           "seconds for which fewer workers must suffice before one is given up"),
)  # fmt: skip


def choose_slots(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The device of each slot. Joins Ray, because what is left open depends on its nodes."""
    try:
        from instgenie.cluster.ray import connect
    except ImportError:
        raise ConfigError("--cluster needs Ray, which is not installed: pip install 'instgenie[ray]'") from None
    connect.join_ray(values["cluster"], values["cluster_name"])
    device = values["device"]
    if device == AUTO:
        device = "cuda" if connect.has_gpus() else "cpu"
    num_slots = connect.agreed_slots() or connect.count_slots(reserved(values, device))  # nodes may have come or gone
    _, most = limits(values, num_slots)
    return ("cuda:0" if device == "cuda" else device,) * most  # a process sees its own GPU alone


def limits(values: Mapping[str, Any], num_slots: int) -> tuple[int, int]:
    """The least and the greatest number of workers: those that are given, else what `--workers` says, else the slots
    that the nodes have room for, and one at least if only the greatest is given."""
    told, low, high = values["workers"], values["min_workers"], values["max_workers"]
    if low == AUTO:
        low = 1 if told == AUTO and high != AUTO else max(num_slots, 1) if told == AUTO else told
    if high == AUTO:
        high = max(low, num_slots if told == AUTO else told)
    if low > high:
        raise ConfigError(f"--min-workers is {low}: at most --max-workers, {high}, is expected")
    return low, high


def reserved(values: Mapping[str, Any], device: str) -> dict[str, float]:
    return values["worker_resources"] or {"GPU" if device.startswith("cuda") else "CPU": 1.0}


def make_ray_config(values: Mapping[str, Any], cluster: ClusterConfig) -> RayConfig | None:
    """None: the workers are on this machine."""
    if values["cluster"] is None:
        for key in ("min_workers", "max_workers"):
            if values[key] != AUTO:
                raise ConfigError(f"--{key.replace('_', '-')} needs --cluster: on one machine there are --workers")
        return None
    most = len(cluster.devices)
    agreed = {key: getattr(cluster, key) for key in AGREED} | asdict(cluster.cache)
    settings = ClusterSettings(
        model=cluster.model,
        config={key: str(value) for key, value in agreed.items()},
        resources=reserved(values, cluster.devices[0]),
        scaling=ScalingConfig(limits(values, most)[0], most, values["scale_up_seconds"], values["scale_down_seconds"]),
        front_timeout=cluster.worker_timeout,
        linger=SECONDS_TO_LINGER,
    )
    return RayConfig(values["cluster"], values["cluster_name"], settings)
