"""The device a model runs on: chosen by the name a user gives, and what it calls itself."""

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from instgenie.errors import ModelError
from instgenie.machine.cores import cores_near

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_device(name: str) -> torch.device:
    """The device of that name; `auto` is the current CUDA device if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ModelError(f"unknown device {name!r}: auto, cpu, cuda or cuda:N is expected")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"device {name!r} does not exist: this machine has {torch.cuda.device_count()} CUDA devices")
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # kernels are launched on the current device
    return device


def stay_near(device: torch.device) -> None:
    """Run this process on the cores near its GPU, on whose side of the machine the memory it locks for the GPU then is.
    Nothing changes where the system does not say which cores those are."""
    if device.type != "cuda":
        return
    facts: Any = torch.cuda.get_device_properties(device)
    near = cores_near(f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0")
    if near:
        os.sched_setaffinity(0, near)
        torch.set_num_threads(min(torch.get_num_threads(), len(near)))


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of that name; `auto` is float32 on a CPU and bfloat16 elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ModelError(f"unknown dtype {name!r}: auto, {' or '.join(DTYPES)} is expected")
    return DTYPES[name]


def device_name(device: torch.device) -> str:
    """The name of the hardware, as in NVIDIA H200."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
