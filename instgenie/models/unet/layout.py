"""Which tokens the transformers of a UNet compute, level by level. Knows masks and plans; knows no weights.

Tokens of all branches are packed, one branch after the other. A captured pass serves many masks: where lists are
padded, it fixes only the total token count, and which branch a token belongs to is an input.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, compress
from typing import TypeAlias

import torch
from torch import Tensor

from instgenie.adapters.applied import BatchLoras
from instgenie.cost.network import common_share, padded_count
from instgenie.jobs.job import Job
from instgenie.jobs.tokens import Level, pad
from instgenie.kernels.roles import Column, Static
from instgenie.machine.pages import to_device
from instgenie.models.layers.linear import Owners

LevelKey: TypeAlias = tuple[int, tuple[bool, ...]]  # tokens of a whole picture; per branch, whether it is cached


@dataclass(frozen=True, eq=False)
class LevelLayout:
    """The tokens of one level that a block computes: per branch all, or the masked ones alone."""

    num_computed: Static[int]  # in all branches, padding included
    num_all: Static[int]  # tokens of a whole picture at this level
    cached: Static[tuple[bool, ...]]  # per branch: True if its masked tokens are computed alone
    index: Column[Tensor | None] = None  # [computed tokens], among the tokens of all branches; None: all are computed
    origin: Column[Tensor | None] = None  # [branches, all tokens], which computed token each is; -1: not computed
    bounds: Column[Tensor | None] = None  # [branches + 1], between the branches; None if all are equally long
    loras: Column[BatchLoras | None] = None

    @property
    def num_branches(self) -> int:
        return len(self.cached)

    @cached_property
    def owners(self) -> Owners:
        return Owners(self.index, self.num_all, self.loras, self.bounds)

    @cached_property
    def whole_owners(self) -> Owners:
        """Owners of all tokens of every picture."""
        return Owners(per_branch=self.num_all, loras=self.loras)


def lay_out_levels(members: Sequence[Job], keys: Sequence[LevelKey], pads: bool) -> dict[LevelKey, LevelLayout]:
    """Lay out one job per branch. With `pads`, as many tokens are computed as for many other masks: lists of one length
    are padded each, others together."""
    levels = {num_all: tuple(job.level(num_all) for job in members) for num_all, _ in keys}
    counts = {key: count_masked(levels[key[0]], key[1]) for key in keys if any(key[1])}
    share = common_share((sum(own), len(own) * num_all) for (num_all, _), own in counts.items()) if pads else None
    pads_each = all(len(set(own)) == 1 for own in counts.values())
    return {(num_all, narrow): lay_out(levels[num_all], narrow, share, pads_each) for num_all, narrow in keys}


def count_masked(levels: Sequence[Level], cached: Sequence[bool]) -> list[int]:
    """Count the masked tokens of each cached branch."""
    return [len(level.inside) for level in compress(levels, cached)]


@lru_cache(maxsize=32)  # jobs that stay together keep their layouts from step to step
def lay_out(levels: tuple[Level, ...], cached: tuple[bool, ...], share: int | None, pads_each: bool) -> LevelLayout:
    num_all = levels[0].num_all
    if not any(cached):
        return LevelLayout(len(levels) * num_all, num_all, cached)
    device = levels[0].inside.device
    every = torch.arange(num_all, device=device)
    chosen = [level.inside if narrow else every for level, narrow in zip(levels, cached, strict=True)]
    if share and pads_each:
        count = padded_count(share, num_all)
        chosen = [pad(tokens, count) if narrow else tokens for tokens, narrow in zip(chosen, cached, strict=True)]
    index = torch.cat([tokens + branch * num_all for branch, tokens in enumerate(chosen)])
    if share and not pads_each:
        num_padding = padded_count(share, sum(cached) * num_all) - sum(count_masked(levels, cached))
        index = pad(index, len(index) + num_padding)
    computed = torch.arange(len(index), device=device)
    none = torch.full((len(levels) * num_all,), len(index), device=device)
    first = none.scatter_reduce(0, index, computed, "amin")  # the first of a token's duplicates
    origin = torch.where(first == len(index), -1, first).view(len(levels), num_all)
    counts = [len(tokens) for tokens in chosen]
    bounds = None if pads_each and len(set(counts)) == 1 else place_bounds(counts, device)
    return LevelLayout(len(index), num_all, cached, index, origin, bounds)


def place_bounds(counts: Sequence[int], device: torch.device) -> Tensor:  # [branches + 1]
    bounds = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    return to_device(bounds, device)


@lru_cache(maxsize=32)
def bounds_of_keys(num_branches: int, num_keys: int, device: torch.device) -> Tensor:  # [branches + 1]
    return place_bounds([num_keys] * num_branches, device)
