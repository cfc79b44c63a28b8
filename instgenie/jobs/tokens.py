"""Lists of a job's tokens: which are masked, at the picture's own resolution and at coarser ones. Knows masks; knows no
model.

Lists may be padded, so that many masks give lists of one length and a captured pass serves them all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from instgenie.cost.network import NUM_BUCKETS


@dataclass(frozen=True, eq=False)
class Level:
    """Indices of the masked and of the unmasked tokens at one resolution."""

    num_all: int
    inside: Tensor  # [masked tokens]
    outside: Tensor  # [unmasked tokens]


@dataclass(frozen=True, eq=False)
class JobTokens:
    """The text and image tokens of a job.

    Layouts are made from these and not from jobs, so that a layout that is kept does not keep a job alive.
    """

    num_all: int  # image tokens
    inside: Tensor  # [masked tokens], their indices; padding repeats one of them
    rest: Tensor  # [the other tokens], their indices; padding may be any token
    num_text: tuple[int, ...]  # per branch
    rotary: tuple[Tensor, ...]  # per branch

    def num_image(self, cached: bool) -> int:
        """Number of image tokens that a block computes."""
        return len(self.inside) if cached else self.num_all

    def computed(self, cached: bool) -> Tensor:
        """Indices of the image tokens that a block computes."""
        return self.inside if cached else self.every

    @cached_property
    def every(self) -> Tensor:  # [image tokens]
        return torch.arange(self.num_all, device=self.inside.device)

    @property
    def padded(self) -> "JobTokens":
        """The same tokens with padded lists. `rest` may overlap `inside`: its keys are written first, and those of
        computed tokens replace them."""
        if not len(self.inside):  # there is no token to pad an empty list with
            return self
        count = bucket(len(self.inside), self.num_all)
        num_rest = min(self.num_all - count + bucket(1, self.num_all), self.num_all)
        rest = self.rest if len(self.rest) else self.inside[:1]
        return replace(self, inside=pad(self.inside, count), rest=pad(rest, num_rest))

    def tables(self, cached: bool) -> tuple[Tensor, ...]:
        """Per branch, the rotary table of the tokens that a block computes."""
        return self.masked_rotary if cached else self.rotary

    @cached_property
    def masked_rotary(self) -> tuple[Tensor, ...]:  # per branch [text tokens + masked tokens, head channels / 2]
        return tuple(
            torch.cat([table[:num_text], table[num_text:][self.inside]])
            for table, num_text in zip(self.rotary, self.num_text, strict=True)
        )


def spread(masked: Tensor, grid: tuple[int, int], halo: int) -> Tensor:
    """Grow a mask [tokens, 1] by `halo` tokens in every direction, corners included."""
    wide = F.max_pool2d(masked.view(1, 1, *grid).float(), 2 * halo + 1, stride=1, padding=halo)
    return wide.view(-1, 1) > 0


def pool(masked: Tensor, grid: tuple[int, int], num_tokens: int) -> Level:
    """The level with `num_tokens` tokens: a coarse token is masked if any of the tokens under it is."""
    side = math.isqrt(len(masked) // num_tokens)
    pooled = F.max_pool2d(masked.view(1, 1, *grid).float(), side).flatten() > 0
    assert len(pooled) == num_tokens, (grid, num_tokens)
    return Level(num_tokens, inside=pooled.nonzero()[:, 0], outside=(~pooled).nonzero()[:, 0])


def pad(index: Tensor, count: int) -> Tensor:
    """Pad `index` to `count` by repeating its last entry; duplicates are identical or unread."""
    return torch.cat([index, index[-1:].expand(count - len(index))])


def bucket(count: int, num_all: int) -> int:
    """Round `count` up to a multiple of a thirty-second of all tokens: the length that a list is padded to."""
    step = max(num_all // NUM_BUCKETS, 1)
    return min(-(-count // step) * step, num_all)


def concat(parts: Sequence[Tensor]) -> Tensor:
    """Like `torch.cat`, without a copy where there is a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
