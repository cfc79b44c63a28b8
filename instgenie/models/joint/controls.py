"""Residuals of ControlNets in a packed batch: rows that are added to image tokens behind blocks.

A ControlNet has fewer blocks than the transformer; each of its residuals serves several blocks. Jobs of a batch may
have ControlNets of different depths, or none, so the rows of a batch are put together per block.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from instgenie.jobs.job import Job
from instgenie.jobs.tokens import JobTokens
from instgenie.kernels.roles import Column, Static

Depth = tuple[int, int]  # double and single blocks


@dataclass(frozen=True, eq=False)
class BlockResiduals:
    numbers: Static[tuple[int | None, ...]]  # per block, which of the rows are added behind it; None: none
    rows: Column[tuple[Tensor, ...]]  # [image tokens, width] each

    def behind(self, block: int) -> Tensor | None:
        number = self.numbers[block]
        return None if number is None else self.rows[number]


def pack_residuals(
    jobs: Sequence[Job], tokens: Sequence[JobTokens], cached: Sequence[tuple[bool, ...]], depth: Depth
) -> BlockResiduals | None:
    """Waits for the residuals of the jobs. `cached` says per block and job whether masked tokens are computed alone."""
    found = [list(job.residuals.result()) if job.residuals else [] for job in jobs]
    if not any(found):
        return None
    made: dict[object, int] = {}
    rows: list[Tensor] = []
    numbers: list[int | None] = []
    for block in range(sum(depth)):
        pairs = zip(jobs, found, strict=True)
        serving = tuple(residual_behind(block, job, depth) if own else None for job, own in pairs)
        narrow = cached[min(block, len(cached) - 1)]
        if all(number is None for number in serving):
            numbers.append(None)
            continue
        if (serving, narrow) not in made:
            made[serving, narrow] = len(rows)
            chosen = [None if number is None else own[number] for own, number in zip(found, serving, strict=True)]
            rows.append(join_rows(jobs, tokens, narrow, chosen))
        numbers.append(made[serving, narrow])
    return BlockResiduals(tuple(numbers), tuple(rows))


def residual_behind(block: int, job: Job, depth: Depth) -> int | None:
    """The number of the residual that is added behind a block of the transformer, as diffusers spreads them."""
    use = job.controls[0].use
    num_doubles, num_singles = use.places
    if block < depth[0]:
        if not num_doubles:
            return None
        return block // math.ceil(depth[0] / num_doubles) if use.reads_latents else block % num_doubles
    return num_doubles + (block - depth[0]) // math.ceil(depth[1] / num_singles) if num_singles else None


def join_rows(
    jobs: Sequence[Job], tokens: Sequence[JobTokens], narrow: Sequence[bool], residuals: Sequence[Tensor | None]
) -> Tensor:
    """The rows of all branches [image tokens, width]; zeros for jobs without residuals."""
    like = next(residual for residual in residuals if residual is not None)
    parts = []
    for job, own, alone, residual in zip(jobs, tokens, narrow, residuals, strict=True):
        if residual is None:
            parts.append(like.new_zeros(len(job.branches) * own.num_image(alone), like.shape[2]))
        else:
            parts.append(lay_out_rows(job, own, alone, residual).flatten(0, 1))
    return torch.cat(parts)


def lay_out_rows(job: Job, tokens: JobTokens, alone: bool, residual: Tensor) -> Tensor:
    """Residuals [branches, all tokens or the masked ones, width] at the tokens that a block computes. Tokens that come
    back from the activations of a template have none."""
    is_narrow = job.is_cached(0)
    if alone and is_narrow:
        padding = residual[:, -1:].expand(-1, len(tokens.inside) - residual.shape[1], -1)
        return torch.cat([residual, padding], dim=1)
    if alone:
        return residual[:, tokens.inside]
    if not is_narrow:
        num_beside = tokens.num_all - residual.shape[1]  # tokens of references, which have none
        return F.pad(residual, (0, 0, 0, num_beside)) if num_beside else residual
    whole = residual.new_zeros(len(residual), tokens.num_all, residual.shape[2])
    return whole.index_copy_(1, job.inside, residual)
