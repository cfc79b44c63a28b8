"""Shifts, scales and gates of all blocks. They depend on the time, the guidance and the pooled prompt, and on no token.

The layers that compute them hold a quarter of the weights of a Flux. A step that multiplied by them would read all of
these for one row per branch. So a job computes the columns of many steps at once, in one product per layer, and a step
reads its row.

Some networks modulate the tokens of references as at time 0, at every step. The rows of time 0, one per branch, then
follow the rows of the step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from instgenie.adapters.applied import AppliedLoras
from instgenie.jobs.job import Job
from instgenie.jobs.tokens import concat
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

    @property
    def clean_references(self) -> bool: ...

    def embed(
        self, sigma: Tensor, guidance: Tensor, pooled: Tensor, dtype: torch.dtype, owners: Owners = EACH_BRANCH
    ) -> Tensor: ...

    def modulate(self, layer: nn.Linear, time: Tensor, owners: Owners | None) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Modulation:
    """What modulates a step, per branch: computed block by block from the time, or read from columns. A template's own
    has no owners."""

    time: Tensor | None = None  # [branches, width], the input of every layer; that of time 0 may lie beside it
    columns: Tensor | None = None  # [rows, outputs of all layers]
    firsts: Mapping[nn.Module, int] = field(default_factory=dict)  # the first column of each layer
    owners: Owners | None = EACH_BRANCH
    modulate: Modulate = modulate

    def of(self, layer: nn.Linear, width: int | None = None) -> Sequence[Tensor]:
        """The outputs of a layer, each [rows, width]: shifts, scales and gates. Most layers have inputs of that
        width."""
        if self.time is not None:
            times = self.time.split(layer.in_features, dim=1)
            out = concat([self.modulate(layer, time, self.owners) for time in times])
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
    clean: Tensor  # [branches, 1 or 0, outputs of all layers], at time 0
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

    def at(self, jobs: Sequence[Job]) -> Tensor:  # [rows, outputs of all layers]
        """The columns of each job's present step, and then those of time 0."""
        missing = [job for job in jobs if job not in self._tables or not self._tables[job].serves(job)]
        if missing:
            self._tables |= compute(self.network, missing)
        rows = [self._tables[job].at(job.step) for job in jobs]
        if self.network.clean_references:
            rows += [self._tables[job].clean.flatten(0, 1) for job in jobs]
        return torch.cat(rows)


def compute(network: Modulated, jobs: Sequence[Job]) -> dict[Job, StepColumns]:
    """The columns of the next steps of the jobs, with one product per layer for all of them."""
    ranges = [range(job.step, min(job.step + MAX_STEPS, job.num_steps)) for job in jobs]
    clean = jobs[0].timesteps.new_zeros(int(network.clean_references))
    sigmas = [
        torch.cat([job.timesteps[steps.start : steps.stop], clean]) for job, steps in zip(jobs, ranges, strict=True)
    ]
    members = [(job, branch, sigma) for job, sigma in zip(jobs, sigmas, strict=True) for branch in job.branches]
    sigma = torch.cat([own for _, _, own in members])
    guidance = torch.cat([job.guidance.expand(len(own)) for job, _, own in members])
    pooled = torch.cat([branch.pooled.expand(len(own), -1) for _, branch, own in members])
    index = [sigma.new_full((len(own),), branch, dtype=torch.int64) for branch, (_, _, own) in enumerate(members)]
    owners = Owners(torch.cat(index), loras=loras_of(jobs))  # made on the device, which no copy keeps waiting
    time = network.embed(sigma, guidance, pooled, members[0][1].text.dtype, owners)
    columns = torch.cat([network.modulate(layer, time, owners) for layer in network.modulation_layers], dim=1)
    parts = columns.split([len(job.branches) * len(own) for job, own in zip(jobs, sigmas, strict=True)])
    tables = {}
    for job, steps, part in zip(jobs, ranges, parts, strict=True):
        of_steps, at_zero = part.unflatten(0, (len(job.branches), -1)).split([len(steps), len(clean)], dim=1)
        tables[job] = StepColumns(steps.start, of_steps, at_zero, job.loras)
    return tables
