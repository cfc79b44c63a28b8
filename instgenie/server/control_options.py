"""The server's options for ControlNets."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from instgenie.adapters.controlnets import ControlNetRegistry
from instgenie.adapters.shipped import shipped_controlnets
from instgenie.cluster.config import ControlConfig
from instgenie.errors import ConfigError, ControlError
from instgenie.server.lora_options import lora_module
from instgenie.server.options import Option, number, text

GIB = 2**30

CONTROL_OPTIONS = (
    Option("controlnet-modules", lora_module, (), "name of a ControlNet and its folder, for all clients; repeatable",
           "NAME=PATH", default_text="none", repeatable=True),
    Option("controlnet-devices", text, "auto",
           "where ControlNets run: worker (in the process of the steps, on streams of its GPU), or the devices of "
           "processes of their own, with commas between, such as cpu or cuda:1,cuda:2; auto: worker on GPUs, else cpu",
           "DEVICES"),
    Option("controlnet-gib", number(0, 65536), 16.0, "memory for ControlNets, in each process that runs them", "GIB"),
)  # fmt: skip


def make_controls(values: Mapping[str, Any], devices: tuple[str, ...]) -> ControlConfig:
    """Check the folders of the named ControlNets, and of those in the model's folder, before any process starts. The
    latter alone get no process of their own unless devices are given."""
    named = {name: str(Path(path).resolve()) for name, path in values["controlnet_modules"]}
    modules = shipped_controlnets(values["model"]) | named
    try:
        ControlNetRegistry(modules)
    except ControlError as error:
        raise ConfigError(str(error)) from None
    given = values["controlnet_devices"]
    if values["cluster"] and given not in ("auto", "worker"):
        raise ConfigError(
            f"the option controlnet-devices is {given!r}: with --cluster, workers run ControlNets themselves"
        )
    if values["cluster"] or (given == "auto" and not named):
        given = "worker"
    return ControlConfig(
        modules=tuple(modules.items()),
        devices=choose_places(given, devices) if modules else (),
        max_bytes=round(values["controlnet_gib"] * GIB),
    )


def choose_places(given: str, devices: tuple[str, ...]) -> tuple[str, ...]:
    """The devices of the processes that run ControlNets; none: the workers do. A GPU runs the kernels of one process at
    a time, so ControlNets that share one with the steps belong into their process."""
    if given == "auto":
        return ("cpu",) if set(devices) == {"cpu"} else ()
    return () if given == "worker" else tuple(part.strip() for part in given.split(",") if part.strip())
