"""Shifts, scales and gates of all blocks. They depend on the time, the guidance and the pooled prompt, and on no token.

The layers that compute them hold a quarter of the weights of a Flux. A step that multiplied by them would read all of
these for one row per branch. So a job computes the columns of many steps at once, in one product per layer, and a step
reads its row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from instgenie.adapters.applied import AppliedLoras
from instgenie.jobs.job import Job
from instgenie.models.layers.linear import EACH_BRANCH, Owners, linear
from instgenie.models.packed import loras_of

MAX_STEPS = 32  # whose columns a job keeps: for FLUX.1-dev 2 MB each

Modulate = Callable[[nn.Linear, Tensor, Owners | None], Tensor]  # a layer, its input and owners to its columns


def modulate(layer: nn.Linear, time: Tensor, owners: Owners | None) -> Tensor:
    """The columns of a modulation layer [rows, outputs]."""
    return linear(layer, time, owners)


class Modulated(Protocol):
    """A network whose blocks are modulated."""

    @property
    def modulation_layers(self) -> list[nn.Linear]: ...

    def embed(
        self, sigma: Tensor, guidance: Tensor, pooled: Tensor, dtype: torch.dtype, owners: Owners = EACH_BRANCH
    ) -> Tensor: ...

    def modulate(self, layer: nn.Linear, time: Tensor, owners: Owners | None) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Modulation:
    """What modulates a step, per branch: computed block by block from the time, or read from columns. A template's own
    has no owners."""

    time: Tensor | None = None  # [branches, width], the input of every modulation layer
    columns: Tensor | None = None  # [branches, outputs of all layers]
    firsts: Mapping[nn.Module, int] = field(default_factory=dict)  # the first column of each layer
    owners: Owners | None = EACH_BRANCH
    modulate: Modulate = modulate

    def of(self, layer: nn.Linear, width: int | None = None) -> Sequence[Tensor]:
        """The outputs of a layer, each [branches, width]: shifts, scales and gates. Most layers have inputs of that
        width."""
        if self.time is not None:
            out = self.modulate(layer, self.time, self.owners)
        else:
            assert self.columns is not None
            first = self.firsts[layer]
            out = self.columns[:, first : first + layer.out_features]
        parts: Sequence[Tensor] = out.split(width or layer.in_features, dim=1)
        return parts


@dataclass(frozen=True, eq=False)
class StepColumns:
    """The columns of consecutive steps of a job."""

    first_step: int
    columns: Tensor  # [branches, steps, outputs of all layers]
    loras: AppliedLoras | None  # with which they were computed

    def serves(self, job: Job) -> bool:
        return job.loras is self.loras and 0 <= job.step - self.first_step < self.columns.shape[1]

    def at(self, step: int) -> Tensor:  # [branches, outputs of all layers]
        return self.columns[:, step - self.first_step]


class ModulationTables:
    """The columns of the jobs at hand; those of a job go with it."""

    def __init__(self, network: Modulated) -> None:
        self.network = network
        self._tables: WeakKeyDictionary[Job, StepColumns] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._tables)

    def at(self, jobs: Sequence[Job]) -> Tensor:  # [branches, outputs of all layers]
        """The columns of each job's present step."""
        missing = [job for job in jobs if job not in self._tables or not self._tables[job].serves(job)]
        if missing:
            self._tables |= compute(self.network, missing)
        return torch.cat([self._tables[job].at(job.step) for job in jobs])


def compute(network: Modulated, jobs: Sequence[Job]) -> dict[Job, StepColumns]:
    """The columns of the next steps of the jobs, with one product per layer for all of them."""
    ranges = [range(job.step, min(job.step + MAX_STEPS, job.num_steps)) for job in jobs]
    members = [(job, branch, steps) for job, steps in zip(jobs, ranges, strict=True) for branch in job.branches]
    sigma = torch.cat([job.timesteps[steps.start : steps.stop] for job, _, steps in members])
    guidance = torch.cat([job.guidance.expand(len(steps)) for job, _, steps in members])
    pooled = torch.cat([branch.pooled.expand(len(steps), -1) for _, branch, steps in members])
    index = [sigma.new_full((len(steps),), branch, dtype=torch.int64) for branch, (_, _, steps) in enumerate(members)]
    owners = Owners(torch.cat(index), loras=loras_of(jobs))  # made on the device, which no copy keeps waiting
    time = network.embed(sigma, guidance, pooled, members[0][1].text.dtype, owners)
    columns = torch.cat([network.modulate(layer, time, owners) for layer in network.modulation_layers], dim=1)
    parts = columns.split([len(job.branches) * len(steps) for job, steps in zip(jobs, ranges, strict=True)])
    return {
        job: StepColumns(steps.start, part.unflatten(0, (len(job.branches), len(steps))), job.loras)
        for job, steps, part in zip(jobs, ranges, parts, strict=True)
    }
