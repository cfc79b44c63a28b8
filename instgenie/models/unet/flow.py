"""Which tokens flow through the transformers of a UNet, level by level, and how they attend. Knows masks and plans;
knows no weights.

Tokens of all branches are packed, one branch after the other. A pass that is captured serves many masks, so where its
lists are padded, it knows how many tokens flow in all and not how many are whose: that is a column.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, compress, pairwise
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from instgenie.cost.network import common_share, padded_count
from instgenie.jobs.job import Job, Level, pad

FlowKey: TypeAlias = tuple[int, tuple[bool, ...]]  # tokens of a whole picture; of each branch, whether it is cached

FLASH_DTYPES = (torch.float16, torch.bfloat16)
MIN_FLASH_CAPABILITY = (8, 0)
FLASH_UNIT, MAX_FLASH_CHANNELS = 8, 256  # of one head


@dataclass(frozen=True, eq=False)
class Flow:
    """Which tokens of one level flow: of each branch all, or the masked alone."""

    num_flowing: int  # of all branches, with those that fill up the list
    num_all: int  # tokens of a whole picture at this level
    cached: tuple[bool, ...]  # of each branch: whether its masked tokens flow alone
    index: Tensor | None = None  # [flowing tokens], where they are among the tokens of all branches; None: all flow
    origin: Tensor | None = None  # [branches, all tokens], which of the flowing tokens each is; -1: it does not flow
    bounds: Tensor | None = None  # [branches + 1], between the branches; None where all are equally long

    @property
    def num_branches(self) -> int:
        return len(self.cached)

    @property
    def is_even(self) -> bool:
        return self.bounds is None

    @property
    def columns(self) -> dict[str, Tensor]:
        named = {"index": self.index, "origin": self.origin, "bounds": self.bounds}
        return {name: column for name, column in named.items() if column is not None}

    def over(self, columns: Mapping[str, Tensor]) -> "Flow":
        """The same flow over other tensors."""
        own: dict[str, Any] = {name: columns[name] for name in self.columns}
        return replace(self, **own)


def lay_out_all(members: Sequence[Job], keys: Sequence[FlowKey], pads: bool) -> dict[FlowKey, Flow]:
    """Of one job for each branch. Where it pads, as many tokens flow as of many other masks: lists of one length are
    filled up each, others together."""
    levels = {num_all: tuple(job.level(num_all) for job in members) for num_all, _ in keys}
    counts = {key: count_masked(levels[key[0]], key[1]) for key in keys if any(key[1])}
    share = common_share((sum(own), len(own) * num_all) for (num_all, _), own in counts.items()) if pads else None
    fills_each = all(len(set(own)) == 1 for own in counts.values())
    return {(num_all, narrow): lay_out(levels[num_all], narrow, share, fills_each) for num_all, narrow in keys}


def count_masked(levels: Sequence[Level], cached: Sequence[bool]) -> list[int]:
    """Of the branches that are cached."""
    return [len(level.inside) for level in compress(levels, cached)]


@lru_cache(maxsize=32)  # jobs that stay together keep their flows from step to step
def lay_out(levels: tuple[Level, ...], cached: tuple[bool, ...], share: int | None, fills_each: bool) -> Flow:
    num_all = levels[0].num_all
    if not any(cached):
        return Flow(len(levels) * num_all, num_all, cached)
    device = levels[0].inside.device
    every = torch.arange(num_all, device=device)
    chosen = [level.inside if narrow else every for level, narrow in zip(levels, cached, strict=True)]
    if share and fills_each:
        count = padded_count(share, num_all)
        chosen = [pad(tokens, count) if narrow else tokens for tokens, narrow in zip(chosen, cached, strict=True)]
    index = torch.cat([tokens + branch * num_all for branch, tokens in enumerate(chosen)])
    if share and not fills_each:
        num_padding = padded_count(share, sum(cached) * num_all) - sum(count_masked(levels, cached))
        index = pad(index, len(index) + num_padding)
    flowing = torch.arange(len(index), device=device)
    none = torch.full((len(levels) * num_all,), len(index), device=device)
    first = none.scatter_reduce(0, index, flowing, "amin")  # of a token that stands several times in a list
    origin = torch.where(first == len(index), -1, first).view(len(levels), num_all)
    counts = [len(tokens) for tokens in chosen]
    bounds = None if fills_each and len(set(counts)) == 1 else place_bounds(counts, device)
    return Flow(len(index), num_all, cached, index, origin, bounds)


def place_bounds(counts: Sequence[int], device: torch.device) -> Tensor:  # [branches + 1]
    bounds = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    return bounds.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else bounds


@lru_cache(maxsize=32)
def bounds_of_keys(num_branches: int, num_keys: int, device: torch.device) -> Tensor:  # [branches + 1]
    return place_bounds([num_keys] * num_branches, device)


def attend(flow: Flow, q: Tensor, k: Tensor, v: Tensor, key_bounds: Tensor) -> Tensor:
    """Packed tokens [flowing tokens, heads, head channels] to each branch's keys and values [branches, keys, heads,
    head channels], between whose branches the bounds lie. What fills up a list gets anything: nobody reads it."""
    if flow.bounds is None:
        return attend_even(q.unflatten(0, (flow.num_branches, -1)), k, v).flatten(0, 1)
    if runs_flash(q):
        return attend_flash(q, k, v, flow.bounds, key_bounds, flow.num_all)
    if q.is_cuda:  # what may be captured must not ask how long branches are; slower than it is taken to be
        return attend_whole(flow, q, k, v)
    return attend_apart(q, k, v, flow.bounds)


def attend_even(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [branches, tokens, heads, head channels]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def attend_apart(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """One branch after the other."""
    attended = torch.zeros_like(q)
    for branch, (start, end) in enumerate(pairwise(bounds.tolist())):
        attended[start:end] = attend_even(q[None, start:end], k[branch, None], v[branch, None])[0]
    return attended


def attend_whole(flow: Flow, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All tokens of a picture ask, and those that flow are answered."""
    assert flow.origin is not None
    assert flow.index is not None
    return attend_even(q[flow.origin.clamp(min=0)], k, v).flatten(0, 1)[flow.index]


def attend_flash(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, key_bounds: Tensor, max_queries: int) -> Tensor:
    """All branches in one launch, each with as many queries as the bounds say."""
    attended, *_ = torch.ops.aten._flash_attention_forward(
        q, k.flatten(0, 1), v.flatten(0, 1), bounds, key_bounds, max_queries, k.shape[1], 0.0, False, False
    )
    out: Tensor = attended
    return out


def runs_flash(q: Tensor) -> bool:
    channels = q.shape[-1]
    return (
        q.is_cuda
        and torch.backends.cuda.is_flash_attention_available()
        and q.dtype in FLASH_DTYPES
        and torch.cuda.get_device_capability(q.device) >= MIN_FLASH_CAPABILITY
        and channels % FLASH_UNIT == 0
        and channels <= MAX_FLASH_CHANNELS
    )
