"""Batches of a UNet: jobs of one size, whose branches are pictures of their own. Knows no weights.

Convolutions see whole pictures of one size, so a batch has one size; transformers see packed tokens, so masks and plans
differ freely.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import torch
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor

from instgenie.adapters.applied import BatchLoras
from instgenie.jobs.activations import Kind
from instgenie.jobs.job import Branch, Job
from instgenie.jobs.rows import OWN_ROWS, JobRows, RowReader, StepRows
from instgenie.kernels.roles import Column, Static
from instgenie.models.packed import PackedBatch, loras_of, residuals_of
from instgenie.models.unet.layout import LevelKey, LevelLayout, bounds_of_keys, lay_out_levels

# K and V of the prompts of a batch, which its LoRAs change; see `UnetBatch.crossed`
Cross: TypeAlias = Callable[[tuple[Branch, ...], BatchLoras | None, Hashable], tuple[Tensor, ...]]


@dataclass(frozen=True)
class TransformerPosition:
    """The position of a transformer in the pass."""

    block: int  # number of its first block, as plans count
    place: int  # number of that block among what activations keep
    num_blocks: int
    side: int  # of the square of full-resolution tokens that one of its tokens stands for

    @property
    def end(self) -> int:
        """The number of its output among what activations keep."""
        return self.place + self.num_blocks


Positions: TypeAlias = dict[Transformer2DModel, TransformerPosition]


@dataclass(frozen=True, eq=False)
class UnetBatch(PackedBatch):
    """One step of jobs of one size; every branch is a picture of its own."""

    kinds: Static[tuple[Kind | None, ...]]  # per branch, of the activations it reads
    kept_kinds: Static[tuple[Kind | None, ...]]  # per branch: what is kept of it for later steps; None: nothing
    cached: Static[tuple[tuple[bool, ...], ...]]  # per block, per branch
    sample: Column[Tensor]  # [branches, latent + conditioning channels, rows, columns]
    timestep: Column[Tensor]  # [branches]
    pooled: Column[Tensor]  # [branches, pooled channels]
    sizes: Column[Tensor]  # [branches, 6]: original height and width, crop from top and left, target height and width
    crossed: Column[tuple[Tensor, ...]]  # per block, K and V of the text [2, branches, text tokens, width]
    layouts: Column[dict[LevelKey, LevelLayout]]
    key_bounds: Column[dict[int, Tensor]]  # by the number of keys of a branch [branches + 1]

    def layout(self, block: int, num_all: int) -> LevelLayout:
        return self.layouts[num_all, self.cached[block]]

    @property
    def readers(self) -> Sequence[RowReader]:
        return readers_of(self.jobs)

    def deal(self, predicted: Tensor) -> list[list[Tensor]]:
        """[branches, channels, rows, columns] -> per job and branch [tokens, channels]"""
        branches = iter(predicted.permute(0, 2, 3, 1).flatten(1, 2))
        return [[next(branches) for _ in job.branches] for job in self.jobs]


def pack(
    jobs: Sequence[Job],
    positions: Positions,
    cross: Cross,
    pixels_per_latent: int,
    pads: bool = False,
    step_rows: StepRows = OWN_ROWS,
) -> UnetBatch:
    """Pack jobs of one size. With `pads`, as many tokens are computed as for many other masks."""
    members = readers_of(jobs)
    branches = tuple(job.branches[branch] for job, branch in members)
    device, dtype = branches[0].text.device, branches[0].text.dtype
    height, width = (side * pixels_per_latent for side in jobs[0].grid)
    num_blocks = sum(position.num_blocks for position in positions.values())
    plans = [job.present_plan or (False,) * num_blocks for job, _ in members]
    cached = tuple(zip(*plans, strict=True))
    layouts = lay_out_levels([job for job, _ in members], level_keys(positions, cached, len(jobs[0].masked)), pads)
    loras = loras_of(jobs)
    if loras:
        layouts = {key: replace(layout, loras=loras) for key, layout in layouts.items()}
    key_counts = sorted({len(branches[0].text), *(num_all for num_all, _ in layouts)})
    return UnetBatch(
        jobs=tuple(jobs),
        rows=JobRows(members, step_rows),
        loras=loras,
        residuals=residuals_of(jobs),
        kinds=tuple(
            job.activations.kind if job.activations and any(plan) else None
            for (job, _), plan in zip(members, plans, strict=True)
        ),
        kept_kinds=tuple(job.kept_kind for job, _ in members),
        cached=cached,
        sample=torch.stack([seen for job in jobs for seen in [see(job)] * len(job.branches)])
        .to(dtype)
        .permute(0, 3, 1, 2),
        timestep=torch.stack([job.timestep for job, _ in members]),
        pooled=torch.stack([branch.pooled for branch in branches]),
        sizes=size_numbers(height, width, device, dtype).expand(len(members), 6),
        crossed=cross(branches, loras, tuple(job.loras and job.loras.token for job, _ in members)),
        layouts=layouts,
        key_bounds={num_keys: bounds_of_keys(len(members), num_keys, device) for num_keys in key_counts},
    )


def readers_of(jobs: Sequence[Job]) -> tuple[RowReader, ...]:
    """One reader per branch."""
    return tuple((job, branch) for job in jobs for branch in range(len(job.branches)))


@lru_cache(maxsize=16)  # making them copies to the device, which the host waits for
def size_numbers(height: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:  # [1, 6]
    return torch.tensor([[height, width, 0, 0, height, width]], device=device, dtype=dtype)


def see(job: Job) -> Tensor:  # [rows, columns, latent + conditioning channels]
    tokens = torch.cat([job.schedule.scaled(job.latents, job.step), job.conditioning], dim=1)
    return tokens.view(*job.grid, -1)


def level_keys(positions: Positions, cached: tuple[tuple[bool, ...], ...], num_tokens: int) -> list[LevelKey]:
    """The keys of all blocks' layouts, each once."""
    return list(
        dict.fromkeys(
            (num_tokens // position.side**2, cached[block])
            for position in positions.values()
            for block in range(position.block, position.block + position.num_blocks)
        )
    )
