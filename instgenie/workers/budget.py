"""The memory that a denoise process takes for activations, once all processes on its device have loaded."""

import math
from dataclasses import replace
from pathlib import Path

import torch

from instgenie.adapters.controlnets import open_controlnet
from instgenie.adapters.files import open_lora
from instgenie.cluster.config import ProcessConfig
from instgenie.machine.device_memory import available_bytes

WIDENED = 2  # a file in 16 bits may be computed in 32


def control_bytes(config: ProcessConfig) -> int:
    """Bytes of the ControlNets that may run in this process."""
    if config.control_addresses:
        return 0
    sizes = (open_controlnet(name, Path(path)).num_bytes for name, path in config.controls.modules)
    return min(sum(sizes), config.controls.max_bytes)


def lora_bytes(config: ProcessConfig, device: torch.device) -> int:
    """Bytes that LoRAs may take on the device, or in main memory if it is a CPU."""
    limit = config.loras.gpu_bytes if device.type == "cuda" else config.loras.host_bytes
    if config.loras.folder:
        return limit
    sizes = (WIDENED * open_lora(Path(path)).header.num_bytes for _, path in config.loras.modules)
    return min(sum(sizes), limit)


def copied_bytes(config: ProcessConfig) -> int:
    """Bytes of weights with LoRAs merged into them, on the device that computes."""
    return config.loras.weights_bytes if config.loras.is_on else 0


def with_budget(config: ProcessConfig, host_bytes: int, device: torch.device) -> ProcessConfig:
    """The configuration with a size for each tier in memory. A GPU tier that was left open gets half of the device's
    free memory, what running edits keep for themselves a quarter, divided among the workers on the device; the rest is
    for the steps. On a CPU these edits get an eighth of the main memory. Memory for LoRAs and for weights with LoRAs
    is set aside first, if edits may name any, and for ControlNets that run in this process."""
    adapters = lora_bytes(config, device) + copied_bytes(config) + control_bytes(config)
    available = max(available_bytes(device) - adapters * config.num_sharing, 0)
    gpu_bytes, own_bytes = config.cache.gpu_bytes, config.cache.own_bytes
    if own_bytes is None:
        share = 4 if device.type == "cuda" else 8
        own_bytes = int(available / share / config.num_sharing) if math.isfinite(available) else host_bytes
    if gpu_bytes is None and device.type == "cuda":
        gpu_bytes = int(available / 2 / config.num_sharing)
    return replace(config, cache=replace(config.cache, gpu_bytes=gpu_bytes, own_bytes=own_bytes, host_bytes=host_bytes))
