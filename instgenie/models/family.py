"""A family: models whose networks share one forward pass. Declares what loading must know about it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from instgenie.errors import ModelError
from instgenie.models.controlnet import ControlNet
from instgenie.models.model import Model
from instgenie.models.recipe import Recipe

ONE_ENCODER = ("vae", "text_encoder", "tokenizer", "scheduler")
TWO_ENCODERS = (*ONE_ENCODER, "text_encoder_2", "tokenizer_2")
THREE_ENCODERS = (*TWO_ENCODERS, "text_encoder_3", "tokenizer_3")
WEIGHTLESS = ("tokenizer", "scheduler", "processor")  # how the names of parts without weights begin

LoadControlNet = Callable[[Path, torch.device, torch.dtype], ControlNet]
PartKind = Literal["text_encoder", "vae", "network"]  # of the parts that have weights


@dataclass(frozen=True)
class LoadedPipeline:
    """The parts of a pipeline on a device, from which a family makes a model."""

    name: str  # as the user gave it
    device: torch.device
    dtype: torch.dtype
    pipeline: str  # diffusers' class
    parts: dict[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)  # the pipeline's settings beside its parts

    @property
    def placement(self) -> dict[str, Any]:
        """Fields that every model has, whatever its family."""
        return {"name": self.name, "device": self.device, "dtype": self.dtype}


@dataclass(frozen=True)
class Family:
    """Pipelines of one architecture and the function that makes models of them."""

    pipelines: Mapping[str, tuple[str, ...]]  # diffusers' class -> the parts it must have
    network_name: str  # the part that denoises
    make: Callable[[LoadedPipeline], Model]  # raises a ModelError if a part is of an unsupported kind
    dummies: Mapping[str, Recipe] = field(default_factory=dict)
    prompt_layers: tuple[str, ...] = ()  # layers and parameters of the network that prompts pass before the first step
    join_layers: Callable[[Any], None] | None = None  # makes layers of the network that read the same rows one product
    fp8_layers: tuple[str, ...] = ()  # patterns of the names of layers that may multiply in fp8; none: not supported
    readers: Mapping[str, Callable[[Path], Any]] = field(
        default_factory=dict
    )  # parts that it reads from folders itself

    controlnets: Mapping[str, LoadControlNet] = field(default_factory=dict)  # by diffusers' class

    def weights_of(self, pipeline: str) -> dict[str, PartKind]:
        """The parts of a pipeline that have weights, and the kind of each."""
        parts = [part for part in self.pipelines[pipeline] if not part.startswith(WEIGHTLESS)]
        return {part: self.kind_of(part) for part in parts}

    def is_of_prompts(self, name: str) -> bool:
        """True if prompts pass a layer or parameter of the network before the first step."""
        return any(name == layer or name.startswith(f"{layer}.") for layer in self.prompt_layers)

    def kind_of(self, part: str) -> PartKind:
        return "network" if part == self.network_name else "vae" if part == "vae" else "text_encoder"


def check_flow_scheduler(name: str, scheduler: object) -> None:
    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        raise ModelError(
            f"the model {name!r} has a {type(scheduler).__name__}: a FlowMatchEulerDiscreteScheduler is expected"
        )
    if scheduler.config.stochastic_sampling or scheduler.config.invert_sigmas:
        raise ModelError(f"the scheduler of {name!r} has stochastic_sampling or invert_sigmas on: both must be off")
