"""Everything `instgenie serve` can be told, and the one frozen tree it becomes. Knows names, ranges and what "auto"
stands for on this machine; nothing changes a tree once it is made."""

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from instgenie.cache.folder import make_folder
from instgenie.cluster.config import CacheConfig, ClusterConfig
from instgenie.errors import ConfigError
from instgenie.pictures.decode import MAX_PIXELS
from instgenie.scheduling.names import Batching
from instgenie.scheduling.router import Policy
from instgenie.server.monitoring.log import LogFormat
from instgenie.server.options import AUTO, PREFIX, Option, auto_or, flag, one_of, read_options, real, text, whole
from instgenie.types import CacheDtype

GIB = 2**30


@dataclass(frozen=True)
class HttpConfig:
    host: str
    port: int
    api_keys: tuple[str, ...]
    served_model_names: tuple[str, ...]
    allowed_origins: tuple[str, ...]
    max_body_bytes: int
    max_pixels: int
    decode_threads: int
    body_timeout: float
    shutdown_timeout: float
    log_format: LogFormat
    traces_endpoint: str | None  # None: that of OpenTelemetry's variables, if any


@dataclass(frozen=True)
class ServeConfig:
    http: HttpConfig
    cluster: ClusterConfig


OPTIONS = (
    Option("host", text, "127.0.0.1", "address to listen on (default 127.0.0.1; 0.0.0.0 = all)", "ADDRESS"),
    Option("port", whole(0, 65535), 8000, "port to listen on (default 8000; 0 = a free one)"),
    Option("api-key", text, (), "key that clients must send; may be given several times", "KEY", True, True),
    Option("api-key-file", text, None, "file with one key per line", "FILE"),
    Option("served-model-name", text, (), "name of the model to clients; may be given several times", "NAME", True),
    Option("allowed-origins", text, (), "web origins whose pages may call this server, * = all", "ORIGIN", True),
    Option("workers", auto_or(whole(1, 64)), AUTO, "number of workers (default: one for each GPU, or one)"),
    Option("device", text, AUTO, "cpu, cuda, cuda:1, ... (default: the best there is)", "DEVICE"),
    Option("dtype", text, AUTO, "numbers the model computes in (default: what suits the device)", "DTYPE"),
    Option("max-batch-size", whole(1, 256), 8, "edits that take a step together on one worker (default 8)"),
    Option("max-queue", whole(1, 100_000), 64, "edits that may wait; one more is refused (default 64)"),
    Option("batching", one_of(*get_args(Batching)), "continuous",
           "continuous: edits join and leave at every step; to compare with: static and static-pipelined, batch after "
           "batch, and naive, everything between steps", "HOW"),
    Option("graphs", flag, True, "run small batches as CUDA graphs, where the device has them (default yes)"),
    Option("reuse", flag, True, "register templates, so that edits compute the masked tokens alone (default yes)"),
    Option("routing", one_of(*get_args(Policy)), "mask_aware",
           "what a worker is chosen by (default mask_aware)", "HOW"),
    Option("gpu-cache-gib", auto_or(real(0, 65536)), AUTO,
           "GPU memory for activations, each worker (default: half of what is free beside the model)", "GIB"),
    Option("host-cache-gib", auto_or(real(0, 65536)), AUTO,
           "memory for activations, each worker (default: half of what is available, shared among the workers)", "GIB"),
    Option("cache-dir", text, None, "folder for activations that outlive the server (default: none)", "FOLDER"),
    Option("disk-cache-gib", real(0.001, 2**20), 100.0, "most that folder may hold (default 100)", "GIB"),
    Option("remote-cache", text, None, "the same for several machines: s3://bucket/folder, ... (default: none)", "URL"),
    Option("remote-cache-gib", real(0.001, 2**30), 1000.0, "most it may hold (default 1000)", "GIB"),
    Option("cache-dtype", one_of(AUTO, "model", "fp8"), AUTO,
           "what activations are kept in: what the model computes in (model; default on a CPU), or half of bfloat16 "
           "(fp8; default where there is a GPU)", "DTYPE"),
    Option("plan", one_of("cached", "greedy", "exact"), "cached",
           "blocks that are computed in full though they are cached: none, so that pictures do not depend on the load "
           "(default cached), or where loading is slow", "HOW"),
    Option("max-body-mib", whole(1, 4096), 64, "largest request body (default 64)", "MIB"),
    Option("max-megapixels", real(0.1, MAX_PIXELS / 1e6), 16.8, "largest picture (default 16.8)"),
    Option("body-timeout", real(0.1, 3600), 60.0,
           "seconds for a request body to arrive (default 60), and for its head, at most 20"),
    Option("shutdown-timeout", real(0, 86400), 30.0,
           "seconds after SIGTERM to finish accepted edits, and to write what is worth keeping (default 30)"),
    Option("log-format", one_of("json", "text"), "json", "lines of JSON, or text for people (default json)", "FORM"),
    Option("otlp-traces-endpoint", text, None,
           "collector of OpenTelemetry that gets a trace of each edit (default: none)", "URL"),
)  # fmt: skip
MODEL = Option("model", text, "builtin", "a pipeline folder, a hub id, builtin (the default), or dummy:NAME", "MODEL")


def read_config(flags: Mapping[str, Any], environment: Mapping[str, str]) -> ServeConfig:
    named = flags.get("config") or environment.get(PREFIX + "CONFIG")
    return make_config(read_options((MODEL, *OPTIONS), flags, environment, Path(named) if named else None))


def make_config(values: Mapping[str, Any]) -> ServeConfig:
    """Resolves what is auto, but for memory: how much there is to share, a cluster finds out when it is made."""
    devices = choose_devices(values["device"], values["workers"])
    return ServeConfig(
        HttpConfig(
            host=values["host"],
            port=values["port"],
            api_keys=values["api_key"] + read_keys(values["api_key_file"]),
            served_model_names=values["served_model_name"] or (short_name(values["model"]),),
            allowed_origins=values["allowed_origins"],
            max_body_bytes=values["max_body_mib"] * 2**20,
            max_pixels=round(values["max_megapixels"] * 1e6),
            decode_threads=min(4, os.cpu_count() or 1),
            body_timeout=values["body_timeout"],
            shutdown_timeout=values["shutdown_timeout"],
            log_format=values["log_format"],
            traces_endpoint=values["otlp_traces_endpoint"],
        ),
        ClusterConfig(
            model=values["model"],
            devices=devices,
            dtype=values["dtype"],
            max_batch_size=values["max_batch_size"],
            max_queue=values["max_queue"],
            batching=values["batching"],
            graphs=values["graphs"],
            plan=values["plan"],
            reuse=values["reuse"],
            policy=values["routing"],
            cache=make_cache(values, devices),
        ),
    )


def make_cache(values: Mapping[str, Any], devices: Sequence[str]) -> CacheConfig:
    gpu, host = values["gpu_cache_gib"], values["host_cache_gib"]
    return CacheConfig(
        gpu_bytes=None if gpu == AUTO else round(gpu * GIB),
        host_bytes=None if host == AUTO else round(host * GIB),
        disk=values["cache_dir"] and str(make_folder(Path(values["cache_dir"]).resolve())),
        disk_bytes=round(values["disk_cache_gib"] * GIB),
        remote=values["remote_cache"],
        remote_bytes=round(values["remote_cache_gib"] * GIB),
        dtype=choose_cache_dtype(values["cache_dtype"], devices),
    )


def read_keys(path: str | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"the file of keys {path} cannot be read") from None
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ConfigError(f"the file of keys {path} is empty: one key per line is expected")
    return keys


def short_name(model: str) -> str:
    """A folder is not shown to clients, its name is."""
    return Path(model).name if os.path.isdir(model) else model


def choose_devices(device: str, num_workers: int | str) -> tuple[str, ...]:
    """One for each worker."""
    num_gpus = count_gpus() if device in (AUTO, "cuda") else 0
    if device == AUTO:
        device = "cuda" if num_gpus else "cpu"
    if isinstance(num_workers, str):
        num_workers = max(num_gpus, 1)
    if device == "cuda" and num_gpus:
        return tuple(f"cuda:{index % num_gpus}" for index in range(num_workers))
    return (device,) * num_workers


def choose_cache_dtype(dtype: CacheDtype | Literal["auto"], devices: Sequence[str]) -> CacheDtype:
    """One for all workers: they share templates. A CPU reads rows where they are, unless they are packed."""
    if dtype != "auto":
        return dtype
    return "fp8" if any(device.startswith("cuda") for device in devices) else "model"


def count_gpus() -> int:
    """Asks the driver, which takes milliseconds where torch takes seconds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    num_gpus = ctypes.c_int(0)
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(num_gpus))
    return 0 if failed else num_gpus.value
