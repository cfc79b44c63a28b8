"""ControlNets: what they see of a step, and batches of them. Knows no family and no process.

A ControlNet runs over branches of one size, whichever jobs they belong to. Its scale is a column. What depends on no
step is put together once for jobs that stay together, and is on the device from then on: each step brings no more than
latents and times.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from instgenie.adapters.controlnets import NO_SHAPE, ControlShape
from instgenie.jobs.job import Job
from instgenie.kernels.roles import Column
from instgenie.machine.pages import to_device

MAX_BATCHES = 4  # of a ControlNet, whose facts are kept


class BranchFacts(NamedTuple):
    """What a ControlNet sees of one branch of a job at every step."""

    text: Tensor  # [text tokens, channels]
    pooled: Tensor  # [pooled channels]
    hint: Tensor  # as `ControlNet.embed` returned it
    num_tokens: int
    size: tuple[int, int]  # (height, width) in pixels, the same for all branches of a pass
    guidance: float
    scale: float
    mode: int | None


Facts: TypeAlias = dict[str, Tensor]  # of all branches of a pass, by names that the kind of ControlNet chooses


@dataclass(frozen=True, eq=False)
class ControlBatch:
    """What a ControlNet reads in one pass: nothing but tensors, so that a captured pass may read others."""

    sample: Column[Tensor]  # latents as the network sees them [branches, ...], see `GuidedFamily.sample`
    timestep: Column[Tensor]  # [branches]
    facts: Column[Facts]


class ControlNet(ABC):
    """A ControlNet on a device."""

    max_jobs: ClassVar[int] = 16  # of one pass
    max_captured: ClassVar[int]  # branches of a pass up to which capturing pays, see `Model.max_captured`
    network: Any  # one of diffusers' modules
    device: torch.device
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        tensors: tuple[Tensor, ...] = (*self.network.parameters(), *self.network.buffers())
        return sum(tensor.nbytes for tensor in tensors)

    def to_device(self, numbers: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
        """Numbers on the device, in the network's dtype if none is given; nothing waits for the copy."""
        return to_device(torch.tensor(numbers, dtype=dtype or self.dtype), self.device)

    @abstractmethod
    def embed(self, hint: Tensor) -> Tensor:
        """What every step reads of a control image; it depends on no step."""

    @abstractmethod
    def collect(self, branches: Sequence[BranchFacts]) -> Facts:
        """What every step reads of the branches of a pass, with their scales."""

    @abstractmethod
    def run(self, batch: ControlBatch) -> list[Tensor]:
        """Per place, residuals [branches, ...] times the scales."""

    def pack(self, members: "Sequence[Member]") -> ControlBatch:
        """One step of jobs of one size."""
        counts = [len(job.texts) for job, _, _ in members]
        steps = [step for (_, step, _), num in zip(members, counts, strict=True) for _ in range(num)]
        return ControlBatch(
            torch.stack([step.sample for step in steps]).to(self.dtype),
            torch.stack([step.timestep for step in steps]),
            self._facts(members),
        )

    def _facts(self, members: "Sequence[Member]") -> Facts:
        """Those of the batches that ran last are kept."""
        key = tuple((job.token, control, step.scales[control], step.guidance) for job, step, control in members)
        if key not in self._kept:
            self._kept[key] = self.collect([one for member in members for one in facts_of(*member)])
        self._kept.move_to_end(key)
        if len(self._kept) > MAX_BATCHES:
            self._kept.popitem(last=False)
        return self._kept[key]

    @cached_property
    def _kept(self) -> OrderedDict[Hashable, Facts]:
        return OrderedDict()


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
    token: object = field(default_factory=object)  # tells it from all others in keys of caches, and holds no tensors


@dataclass(frozen=True, eq=False)
class ControlStep:
    """What ControlNets read of a job at one step."""

    sample: Tensor
    timestep: Tensor  # []
    guidance: float  # the same at every step
    scales: tuple[float, ...]  # one per ControlNet; 0: it does not guide this step
    rows: Tensor | None = None  # indices of the tokens whose residuals are needed; None: all


Beside = Callable[[ControlNet], AbstractContextManager[object]]
Run = Callable[[ControlNet, ControlBatch], Sequence[Tensor]]
Asked = tuple[ControlledJob, ControlStep]
Member = tuple[ControlledJob, ControlStep, int]  # of a pass, with the number of the ControlNet among the job's own


def run_uncaptured(net: ControlNet, batch: ControlBatch) -> Sequence[Tensor]:
    return net.run(batch)


def compute_parts(
    asked: Sequence[Asked], run: Run = run_uncaptured, beside: Beside = lambda net: nullcontext()
) -> list[list[list[Tensor]]]:
    """Residuals of each job, per ControlNet that guides its step and place [branches, ...]. Jobs that use a ControlNet
    share its passes, where they have one size; `beside` is entered for each ControlNet, and `run` makes its passes,
    whose results do not change when others run."""
    parts: list[list[list[Tensor]]] = [[] for _ in asked]
    for net, passes in group(asked).items():
        with beside(net):
            for members in passes:
                found = run_together(net, [(*asked[number], control) for number, control in members], run)
                for (number, _), residuals in zip(members, found, strict=True):
                    parts[number].append(residuals)
    return parts


def compute(asked: Sequence[Asked], run: Run = run_uncaptured) -> list[list[Tensor]]:
    """Residuals of each job, per place [branches, ...]: sums over its ControlNets, at the tokens that are needed."""
    return [add_up(parts, step.rows) for parts, (_, step) in zip(compute_parts(asked, run), asked, strict=True)]


def add_up(parts: Sequence[Sequence[Tensor]], rows: Tensor | None) -> list[Tensor]:
    first, *others = parts
    summed = [sum(each[1:], each[0]) for each in zip(first, *others, strict=True)] if others else list(first)
    return summed if rows is None else [place[:, rows] for place in summed]


def group(asked: Sequence[Asked]) -> dict[ControlNet, list[list[tuple[int, int]]]]:
    """Per ControlNet, passes: jobs by their numbers, each with the number of the ControlNet among its own."""
    found: dict[ControlNet, dict[object, list[tuple[int, int]]]] = {}
    for number, (job, step) in enumerate(asked):
        shape = step.sample.shape, job.size, job.texts[0].shape
        for control, (net, scale) in enumerate(zip(job.nets, step.scales, strict=True)):
            if scale:
                found.setdefault(net, {}).setdefault(shape, []).append((number, control))
    return {
        net: [some for members in shapes.values() for some in cut(members, net.max_jobs)]
        for net, shapes in found.items()
    }


def cut(members: list[tuple[int, int]], length: int) -> list[list[tuple[int, int]]]:
    return [members[first : first + length] for first in range(0, len(members), length)]


def run_together(net: ControlNet, members: Sequence[Member], run: Run) -> list[list[Tensor]]:
    """One pass. Returns per member and place [branches, ...]."""
    places = run(net, net.pack(members))
    counts = [len(job.texts) for job, _, _ in members]
    return [list(of_one) for of_one in zip(*(place.split(counts) for place in places), strict=True)]


def facts_of(job: ControlledJob, step: ControlStep, control: int) -> list[BranchFacts]:
    told = job.hints[control], len(step.sample), job.size, step.guidance, step.scales[control], job.modes[control]
    return [BranchFacts(text, pooled, *told) for text, pooled in zip(job.texts, job.pooled, strict=True)]
