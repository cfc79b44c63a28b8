"""ControlNets: what they see of a step, and batches of them. Knows no family and no process.

A ControlNet runs over branches of one size, whichever jobs they belong to. Its scale is a column.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from instgenie.adapters.controlnets import NO_SHAPE, ControlShape
from instgenie.jobs.job import Job


class ControlInput(NamedTuple):
    """What a ControlNet sees of one branch of one job at one step."""

    sample: Tensor  # latents as the network sees them: [channels, rows, columns], or tokens [tokens, channels]
    timestep: Tensor  # []
    guidance: Tensor  # []
    text: Tensor  # [text tokens, channels]
    pooled: Tensor  # [pooled channels]
    hint: Tensor  # as `ControlNet.embed` returned it
    size: tuple[int, int]  # (height, width) in pixels
    scale: float
    mode: int | None


class ControlNet(ABC):
    """A ControlNet on a device."""

    max_jobs: ClassVar[int] = 16  # of one pass
    network: Any  # one of diffusers' modules
    device: torch.device
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        tensors: tuple[Tensor, ...] = (*self.network.parameters(), *self.network.buffers())
        return sum(tensor.nbytes for tensor in tensors)

    def to_device(self, numbers: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
        """Numbers on the device, in the network's dtype if none is given; nothing waits for the copy."""
        column = torch.tensor(numbers, dtype=dtype or self.dtype)
        is_cuda = self.device.type == "cuda"
        return column.pin_memory().to(self.device, non_blocking=True) if is_cuda else column

    @abstractmethod
    def embed(self, hint: Tensor) -> Tensor:
        """What every step reads of a control image; it depends on no step."""

    @abstractmethod
    def run(self, inputs: Sequence[ControlInput], scales: Tensor) -> list[Tensor]:
        """Per place, residuals [branches, ...] times the scales [branches]."""


class GuidedFamily(ABC):
    """What the ControlNets of a family of models see, and need."""

    signed: bool  # True if they see pixels from -1 to 1; False: from 0 to 1

    @abstractmethod
    def shape(self, config: Any, latent_channels: int) -> ControlShape:
        """What ControlNets have in common with a network of this config."""

    @abstractmethod
    def sample(self, job: Job) -> Tensor:
        """What they see of a job's latents at its present step."""

    def rows(self, job: Job) -> Tensor | None:
        """Indices of the tokens whose residuals a job's present step needs; None: all."""
        return None


class Unguided(GuidedFamily):
    """A family without ControlNets."""

    signed = False

    def shape(self, config: Any, latent_channels: int) -> ControlShape:
        return NO_SHAPE

    def sample(self, job: Job) -> Tensor:
        raise NotImplementedError("no ControlNet fits this family")


@dataclass(frozen=True, eq=False)
class ControlledJob:
    """What ControlNets read of a job at every step."""

    nets: tuple[ControlNet, ...]
    hints: tuple[Tensor, ...]  # one per ControlNet, embedded
    modes: tuple[int | None, ...]
    size: tuple[int, int]  # (height, width) in pixels
    texts: tuple[Tensor, ...]  # per branch
    pooled: tuple[Tensor, ...]  # per branch


@dataclass(frozen=True, eq=False)
class ControlStep:
    """What ControlNets read of a job at one step."""

    sample: Tensor
    timestep: Tensor
    guidance: Tensor
    scales: tuple[float, ...]  # one per ControlNet; 0: it does not guide this step
    rows: Tensor | None = None  # indices of the tokens whose residuals are needed; None: all


Beside = Callable[[ControlNet], AbstractContextManager[object]]
Asked = tuple[ControlledJob, ControlStep]


def compute_parts(asked: Sequence[Asked], beside: Beside = lambda net: nullcontext()) -> list[list[list[Tensor]]]:
    """Residuals of each job, per ControlNet that guides its step and place [branches, ...]. Jobs that use a ControlNet
    share its passes, where they have one size; `beside` is entered for each ControlNet."""
    parts: list[list[list[Tensor]]] = [[] for _ in asked]
    for net, passes in group(asked).items():
        with beside(net):
            for members in passes:
                found = run_together(net, [(*asked[number], control) for number, control in members])
                for (number, _), residuals in zip(members, found, strict=True):
                    parts[number].append(residuals)
    return parts


def compute(asked: Sequence[Asked]) -> list[list[Tensor]]:
    """Residuals of each job, per place [branches, ...]: sums over its ControlNets, at the tokens that are needed."""
    return [add_up(parts, step.rows) for parts, (_, step) in zip(compute_parts(asked), asked, strict=True)]


def add_up(parts: Sequence[Sequence[Tensor]], rows: Tensor | None) -> list[Tensor]:
    first, *others = parts
    summed = [sum(each[1:], each[0]) for each in zip(first, *others, strict=True)] if others else list(first)
    return summed if rows is None else [place[:, rows] for place in summed]


def group(asked: Sequence[Asked]) -> dict[ControlNet, list[list[tuple[int, int]]]]:
    """Per ControlNet, passes: jobs by their numbers, each with the number of the ControlNet among its own."""
    found: dict[ControlNet, dict[object, list[tuple[int, int]]]] = {}
    for number, (job, step) in enumerate(asked):
        shape = step.sample.shape, job.texts[0].shape
        for control, (net, scale) in enumerate(zip(job.nets, step.scales, strict=True)):
            if scale:
                found.setdefault(net, {}).setdefault(shape, []).append((number, control))
    return {
        net: [some for members in shapes.values() for some in cut(members, net.max_jobs)]
        for net, shapes in found.items()
    }


def cut(members: list[tuple[int, int]], length: int) -> list[list[tuple[int, int]]]:
    return [members[first : first + length] for first in range(0, len(members), length)]


def run_together(net: ControlNet, members: Sequence[tuple[ControlledJob, ControlStep, int]]) -> list[list[Tensor]]:
    """One pass. Returns per member and place [branches, ...]."""
    inputs = [one for member in members for one in inputs_of(*member)]
    places = net.run(inputs, net.to_device([one.scale for one in inputs]))
    counts = [len(job.texts) for job, _, _ in members]
    return [list(of_one) for of_one in zip(*(place.split(counts) for place in places), strict=True)]


def inputs_of(job: ControlledJob, step: ControlStep, control: int) -> list[ControlInput]:
    """One input per branch."""
    told = job.hints[control], job.size, step.scales[control], job.modes[control]
    return [
        ControlInput(step.sample, step.timestep, step.guidance, text, pooled, *told)
        for text, pooled in zip(job.texts, job.pooled, strict=True)
    ]
