"""The options of `instgenie serve`, and the frozen configuration they become. Knows their names and ranges, and
resolves "auto" for this machine. To add an option, add one entry to `OPTIONS` and use its value in `make_config`."""

import ctypes
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from instgenie.cache.folder import make_folder
from instgenie.cluster.config import CacheConfig, ClusterConfig
from instgenie.cluster.ray.names import RayConfig
from instgenie.errors import ConfigError
from instgenie.machine.memory import available_memory
from instgenie.pictures.decode import MAX_PIXELS
from instgenie.pictures.picture import MAX_STEPS
from instgenie.scheduling.names import DEFAULT_SCHEDULING, Batching, RoutingPolicy, Scheduling
from instgenie.server.bodies.fields import MAX_EDITS
from instgenie.server.control_options import CONTROL_OPTIONS, make_controls
from instgenie.server.guard.hosts import ANY, HOST
from instgenie.server.guard.keys import ApiKey, check_keys, parse_key_file
from instgenie.server.guidance_options import GUIDANCE_OPTIONS, pair_devices
from instgenie.server.lora_options import LORA_OPTIONS, make_loras
from instgenie.server.monitoring.log import LogFormat
from instgenie.server.nodes import NODE_OPTIONS, choose_slots, make_ray_config
from instgenie.server.options import (
    AUTO,
    PREFIX,
    Option,
    auto_or,
    flag,
    number,
    one_of,
    read_options,
    text,
    whole_number,
)
from instgenie.types import CacheDtype, Convolutions, Quantization, TextPadding, WeightsDtype

GIB = 2**30


@dataclass(frozen=True)
class HttpConfig:
    host: str
    port: int
    api_keys: tuple[ApiKey, ...]
    served_model_names: tuple[str, ...]
    allowed_hosts: tuple[str, ...]
    strict_model: bool
    allowed_origins: tuple[str, ...]
    max_body_bytes: int
    max_pixels: int
    max_steps: int
    max_n: int
    default_deadline: float | None  # seconds; of requests that give none
    slo_scale: float | None  # the same, as a multiple of what the edit takes alone
    register_examples: bool
    decode_threads: int
    max_decoded_bytes: int
    keep_bytes: int  # for answers to requests with an idempotency key
    body_timeout: float
    shutdown_timeout: float
    log_format: LogFormat
    traces_endpoint: str | None  # None: taken from OpenTelemetry's environment variables, if set


@dataclass(frozen=True)
class ServeConfig:
    http: HttpConfig
    cluster: ClusterConfig
    ray: RayConfig | None = None  # None: the workers are on this machine


def host_name(given: str) -> str:
    parts = HOST.fullmatch(given.removeprefix("*."))
    if given != ANY and (parts is None or parts[2]):
        raise ValueError("a host name without scheme and port is expected, or *")
    return given


def weight(given: str) -> tuple[str, float]:
    name, _, value = given.partition("=")
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not name or not 0.01 <= share <= 100:
        raise ValueError("NAME=WEIGHT with a weight from 0.01 to 100 is expected")
    return name, share


OPTIONS = (
    # HTTP
    Option("host", text, "127.0.0.1", "address to listen on; 0.0.0.0 = all", "ADDRESS"),
    Option("port", whole_number(0, 65535), 8000, "port to listen on; 0 = any free port"),
    Option("api-key", text, (), "key that clients must send; repeatable", "KEY", repeatable=True, secret=True),
    Option("api-key-file", text, None, "file with one API key per line: KEY, or NAME:KEY for keys that share templates",
           "FILE"),
    Option("served-model-name", text, (), "model name that clients use; repeatable", "NAME",
           default_text="the model's own name", repeatable=True),
    Option("allowed-hosts", host_name, (),
           "name that clients may call this server by, in the header Host; *.example.com = all below it; * = any; "
           "repeatable", "NAME", default_text="loopback names and the address; with an API key any", repeatable=True),
    Option("strict-model", flag, False, "refuse requests for a model of any other name"),
    Option("allowed-origins", text, (), "web origin whose pages may call this server; * = any; repeatable", "ORIGIN",
           default_text="none", repeatable=True),
    Option("max-body-mib", whole_number(1, 4096), 64, "largest request body", "MIB"),
    Option("max-megapixels", number(0.1, MAX_PIXELS / 1e6), 40.0, "largest picture"),
    Option("max-decoded-gib", auto_or(number(0.001, 65536)), AUTO,
           "main memory for the decoded pictures of accepted edits; further edits are refused", "GIB",
           default_text="an eighth of the available memory"),
    Option("max-steps", whole_number(1, MAX_STEPS), MAX_STEPS,
           "largest number of steps that a request may ask for; the model's own number is always accepted"),
    Option("max-n", whole_number(1, MAX_EDITS), MAX_EDITS, "largest number of pictures that a request may ask for"),
    Option("body-timeout", number(0.1, 3600), 60.0,
           "seconds for a request body to arrive; also for the request's head, but at most 20"),
    Option("shutdown-timeout", number(0, 86400), 30.0,
           "seconds after SIGTERM to finish accepted edits, to write the cache and to end"),
    Option("idempotency-minutes", number(0, 10080), 10.0,
           "minutes for which the answer to a request with an Idempotency-Key is kept for its repetitions", "MINUTES"),
    Option("idempotency-mib", whole_number(0, 2**20), 256,
           "main memory for such answers in the HTTP process; the oldest go first", "MIB"),
    # workers
    Option("workers", auto_or(whole_number(1, 20_000)), AUTO, "number of workers",
           default_text="one per GPU, or one; with --cluster as many as its nodes have room for"),
    Option("device", text, AUTO, "cpu, cuda, cuda:1, ...", "DEVICE", default_text="cuda where available, else cpu"),
    Option("dtype", text, AUTO, "dtype the model computes in", "DTYPE", default_text="chosen by the device"),
    Option("quantization", one_of(*get_args(Quantization)), None,
           "fp8: most products of the network in eight bits: faster, half the memory for their weights, a little less "
           "exact; for GPUs of compute capability 8.9 or more", "HOW", default_text="none"),
    Option("weights-dtype", one_of(*get_args(WeightsDtype)), None,
           "fp8: large weights of the network and of text encoders take one byte each, loaded straight as such; GPUs "
           "of compute capability 8.9 or more multiply most of them in eight bits, other devices turn each into plain "
           "numbers for its product", "DTYPE", default_text="that of --dtype"),
    Option("worker-timeout", number(1, 86400), 120.0, "seconds without a sign of life after which a worker is killed"),
    Option("max-batch-size", whole_number(1, 256), 8, "largest number of edits in one batch of a worker"),
    Option("max-queue", whole_number(1, 100_000), 64, "number of edits that may wait; further ones are refused"),
    Option("max-queue-per-key", whole_number(1, 100_000), None,
           "number of edits of one API key that may wait; further ones are refused", default_text="--max-queue"),
    Option("max-templates", whole_number(1, 1_000_000), 1000, "number of templates that each API key may register"),
    Option("picture-cache-gib", auto_or(number(0, 65536)), AUTO,
           "main memory for the pictures of templates that no client asked for; the least recently used go first",
           "GIB", default_text="a sixteenth of the available memory"),
    Option("batching", one_of(*get_args(Batching)), "continuous",
           "continuous: edits join and leave between steps; for comparison: static and static-pipelined run one batch "
           "after the other, naive does all other work between steps", "HOW"),
    Option("scheduling", one_of(*get_args(Scheduling)), DEFAULT_SCHEDULING,
           "who goes first: preemptive = the least slack, within fair shares and priorities, and running edits wait "
           "for urgent ones; slack = the least slack, nobody leaves a batch; edf = the earliest deadline; fcfs = the "
           "oldest", "HOW"),
    Option("default-deadline", number(0.001, 86400), None,
           "seconds within which edits whose requests give no deadline should be done; later ones are finished all the "
           "same", "SECONDS", default_text="none"),
    Option("slo-scale", number(1, 1000), None,
           "the same as a multiple of what the edit is predicted to take on an idle worker", "FACTOR",
           default_text="none"),
    Option("tenant-weight", weight, (),
           "share of the steps that the keys of a name get beside others, NAME=2 for twice as much; repeatable",
           "NAME=WEIGHT", default_text="1 each", repeatable=True),
    Option("graphs", flag, True, "run small batches as CUDA graphs, on devices that support them"),
    Option("routing", one_of(*get_args(RoutingPolicy)), "mask_aware",
           f"how the worker of an edit is chosen: {', '.join(get_args(RoutingPolicy))}", "HOW"),
    # reuse of activations
    Option("reuse", flag, True,
           "let edits read activations, of templates or of their own dense steps; no: every edit computes every token"),
    Option("register-examples", flag, True,
           "register the page's example pictures in idle time after the start; with the built-in model only"),
    Option("auto-register", flag, True,
           "register pictures that come back; no: only those that clients register with POST /v1/templates"),
    Option("register-after", whole_number(1, 1_000_000), 2,
           "requests that edit one picture with the same settings before it is registered; 1: every picture is"),
    Option("register-window", number(0.001, 87600), 1.0, "hours within which these requests must come", "HOURS"),
    Option("own-cache-gib", auto_or(number(0, 65536)), AUTO,
           "memory of the device for what running edits without a template keep for themselves, per worker", "GIB",
           default_text="a quarter of the GPU memory left beside the model, or an eighth of the main memory"),
    Option("plan", one_of("cached", "greedy", "exact"), "cached",
           "cached: use the cache for every block, so that pictures do not depend on the load; greedy, exact: compute "
           "the blocks in full that would load too slowly", "HOW"),
    Option("cache-dtype", one_of(AUTO, "model", "fp8", "int4"), AUTO,
           "dtype of cached activations: model = the model's dtype; fp8 = half the size of bfloat16; int4 = 5/16 of it",
           "DTYPE", default_text="int4 with a GPU, else model"),
    Option("cache-stride", auto_or(whole_number(1, 1000)), AUTO,
           "keep the activations of every N-th step, which serve the steps around it: an N-th of the bytes and of "
           "the work of a registration", "N", default_text="a quarter of the steps of a template: four are kept"),
    Option("convolutions", one_of(*get_args(Convolutions)), "dense",
           "convolutions of a UNet: dense = over whole pictures of one size; tiled = over tiles of pictures of all "
           "sizes at once; reused = the same, and edits that read activations compute masked tiles alone", "HOW"),
    Option("reuse-changed", number(0, 1), 0.0,
           "do not compute steps whose predictions can be guessed from those before: the probability of a wrong guess "
           "from which a step is computed; 0: all steps are", "SHARE"),
    Option("text-padding", one_of(*get_args(TextPadding)), "computed",
           "padding of prompts: computed at every step; reused = read from activations, like unmasked tokens, so that "
           "only the tokens of the prompt are computed", "HOW"),
    Option("gpu-cache-gib", auto_or(number(0, 65536)), AUTO, "GPU memory for activations, per worker", "GIB",
           default_text="half of the memory left beside the model"),
    Option("host-cache-gib", auto_or(number(0, 65536)), AUTO, "main memory for activations, per worker", "GIB",
           default_text="half of the available memory, divided among the workers"),
    Option("cache-dir", text, None, "folder for activations that outlive the server", "FOLDER", default_text="none"),
    Option("disk-cache-gib", number(0.001, 2**20), 100.0, "largest size of the cache folder", "GIB"),
    Option("remote-cache", text, None, "URL of a cache that several machines share: s3://bucket/folder, ...", "URL",
           default_text="none"),
    Option("remote-cache-gib", number(0.001, 2**30), 1000.0, "largest size of the remote cache", "GIB"),
    Option("peer-bandwidth", number(0.001, 1000), 1.0,
           "GB that a worker sends in a second of its templates to workers that lack them", "GB"),
    Option("cache-ttl", number(0.0001, 87600), None,
           "hours after which an unused template is deleted that no client registered", "HOURS", default_text="never"),
    *LORA_OPTIONS,
    *GUIDANCE_OPTIONS,
    *CONTROL_OPTIONS,
    # logs and traces
    Option("log-format", one_of("json", "text"), "json", "format of log lines: json or text", "FORMAT"),
    Option("otlp-traces-endpoint", text, None,
           "URL of an OpenTelemetry collector that receives a trace of each edit", "URL", default_text="none"),
    *NODE_OPTIONS,
)  # fmt: skip
MODEL = Option("model", text, "builtin", "a pipeline folder, a hub id, builtin (the default), or dummy:NAME", "MODEL")


def read_config(flags: Mapping[str, Any], environment: Mapping[str, str]) -> ServeConfig:
    named = flags.get("config") or environment.get(PREFIX + "CONFIG")
    return make_config(read_options((MODEL, *OPTIONS), flags, environment, Path(named) if named else None))


def make_config(values: Mapping[str, Any]) -> ServeConfig:
    """Resolve every "auto" except the sizes of caches, which the cluster resolves when it is created."""
    devices = choose_slots(values) if values["cluster"] else choose_devices(values["device"], values["workers"])
    devices, guidance_devices = pair_devices(values, devices)
    cluster = ClusterConfig(
        model=values["model"],
        devices=devices,
        dtype=values["dtype"],
        quantization=check_quantization(values["quantization"], devices),
        weights_dtype=values["weights_dtype"],
        convolutions=values["convolutions"],
        reuse_changed=values["reuse_changed"],
        max_batch_size=values["max_batch_size"],
        max_queue=values["max_queue"],
        max_templates=values["max_templates"],
        picture_bytes=share_of_memory(values["picture_cache_gib"], 16),
        batching=values["batching"],
        scheduling=values["scheduling"],
        weights=values["tenant_weight"],
        max_queue_per_tenant=values["max_queue_per_key"],
        graphs=values["graphs"],
        plan=values["plan"],
        reuse=values["reuse"],
        auto_register=values["auto_register"],
        register_after=values["register_after"],
        register_window=3600 * values["register_window"],
        worker_timeout=values["worker_timeout"],
        policy=values["routing"],
        hold_seconds=60.0 * values["idempotency_minutes"],
        cache=make_cache(values, devices),
        loras=make_loras(values),
        controls=make_controls(values, devices),
        guidance_devices=guidance_devices,
    )
    return ServeConfig(
        HttpConfig(
            host=values["host"],
            port=values["port"],
            api_keys=collect_keys(values["api_key"], values["api_key_file"]),
            served_model_names=values["served_model_name"] or (short_name(values["model"]),),
            allowed_hosts=values["allowed_hosts"],
            strict_model=values["strict_model"],
            allowed_origins=values["allowed_origins"],
            max_body_bytes=values["max_body_mib"] * 2**20,
            max_pixels=round(values["max_megapixels"] * 1e6),
            max_steps=values["max_steps"],
            max_n=values["max_n"],
            default_deadline=values["default_deadline"],
            slo_scale=values["slo_scale"],
            register_examples=values["register_examples"],
            decode_threads=min(4, os.cpu_count() or 1),
            max_decoded_bytes=share_of_memory(values["max_decoded_gib"], 8),
            keep_bytes=values["idempotency_mib"] * 2**20,
            body_timeout=values["body_timeout"],
            shutdown_timeout=values["shutdown_timeout"],
            log_format=values["log_format"],
            traces_endpoint=values["otlp_traces_endpoint"],
        ),
        cluster,
        make_ray_config(values, cluster),
    )


def make_cache(values: Mapping[str, Any], devices: Sequence[str]) -> CacheConfig:
    gpu, host, own = values["gpu_cache_gib"], values["host_cache_gib"], values["own_cache_gib"]
    return CacheConfig(
        own_bytes=None if own == AUTO else round(own * GIB),
        gpu_bytes=None if gpu == AUTO else round(gpu * GIB),
        host_bytes=None if host == AUTO else round(host * GIB),
        disk=values["cache_dir"] and str(make_folder(Path(values["cache_dir"]).resolve())),
        disk_bytes=round(values["disk_cache_gib"] * GIB),
        remote=values["remote_cache"],
        remote_bytes=round(values["remote_cache_gib"] * GIB),
        peer_bytes_per_second=1e9 * values["peer_bandwidth"],
        dtype=choose_cache_dtype(values["cache_dtype"], devices),
        stride=0 if values["cache_stride"] == AUTO else values["cache_stride"],
        text_padding=values["text_padding"],
        seconds_to_live=None if values["cache_ttl"] is None else 3600 * values["cache_ttl"],
    )


def collect_keys(given: Sequence[str], path: str | None) -> tuple[ApiKey, ...]:
    """Return the keys of the option, which have no names, and those of the file."""
    keys = (*map(ApiKey, given), *read_keys(path))
    check_keys(keys)
    return keys


def read_keys(path: str | None) -> list[ApiKey]:
    if path is None:
        return []
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"the API key file {path} cannot be read") from None
    try:
        keys = parse_key_file(text)
    except ConfigError as wrong:
        raise ConfigError(f"the API key file {path}, {wrong}") from None
    if not keys:
        raise ConfigError(f"the API key file {path} is empty: one key per line is expected")
    return keys


def short_name(model: str) -> str:
    """Return the name clients see: of a folder only its last part."""
    return Path(model).name if os.path.isdir(model) else model


def share_of_memory(gib: float | str, divisor: int) -> int:
    """Return the bytes of an option. "auto" is a share of the available memory; if that is unknown, of 16 GiB."""
    if isinstance(gib, str):
        available = available_memory()
        return int(available if math.isfinite(available) else 16 * GIB) // divisor
    return round(gib * GIB)


def choose_devices(device: str, num_workers: int | str) -> tuple[str, ...]:
    """Return one device per worker."""
    num_gpus = count_gpus() if device in (AUTO, "cuda") else 0
    if device == AUTO:
        device = "cuda" if num_gpus else "cpu"
    if isinstance(num_workers, str):
        num_workers = max(num_gpus, 1)
    if device == "cuda" and num_gpus:
        return tuple(f"cuda:{index % num_gpus}" for index in range(num_workers))
    return (device,) * num_workers


def check_quantization(quantization: Quantization | None, devices: Sequence[str]) -> Quantization | None:
    """Refuse a quantization on a CPU here, before any process starts; a worker asks its GPU what it can."""
    if quantization is not None and "cpu" in devices:
        raise ConfigError(f"the option quantization is {quantization!r}: it needs a GPU, and the device is cpu")
    return quantization


def choose_cache_dtype(dtype: CacheDtype | Literal["auto"], devices: Sequence[str]) -> CacheDtype:
    """Choose one dtype for all workers, since they share templates. On a CPU unpacked rows are read in place."""
    if dtype != "auto":
        return dtype
    return "int4" if any(device.startswith("cuda") for device in devices) else "model"


def count_gpus() -> int:
    """Ask the driver: this takes milliseconds, while importing torch takes seconds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    num_gpus = ctypes.c_int(0)
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(num_gpus))
    return 0 if failed else num_gpus.value
