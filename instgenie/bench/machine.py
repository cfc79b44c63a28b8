"""A description of the machine and the software that a measurement ran on."""

import platform
from importlib.metadata import version

import torch

from instgenie.kernels import switch
from instgenie.machine.device import device_name
from instgenie.models.model import Model

Machine = dict[str, str | int | float]


def describe_machine(model: Model) -> Machine:
    is_cuda = model.device.type == "cuda"
    return {
        "device": device_name(model.device),
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "python": platform.python_version(),
        "torch": version("torch"),
        "cuda": (torch.version.cuda or "none") if is_cuda else "none",
        "kernels": "on" if switch.runs_fused(torch.empty(0, device=model.device)) else "off",
        "diffusers": version("diffusers"),
    }


def machine_text(machine: Machine) -> str:
    return ", ".join(f"{name} {value}" for name, value in machine.items())
