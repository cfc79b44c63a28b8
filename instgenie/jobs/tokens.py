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

from instgenie.cost.network import NUM_BUCKETS, NUM_TEXT_BUCKETS
from instgenie.jobs.tiles import Tiles, masked_tiles


@dataclass(frozen=True, eq=False)
class Level:
    """Indices of the masked and of the unmasked tokens at one resolution."""

    num_all: int
    inside: Tensor  # [masked tokens]
    outside: Tensor  # [unmasked tokens]

    def tiles(self, grid: tuple[int, int], side: int) -> Tiles:
        """The tiles of this side that have any masked token; found once."""
        if side not in self._tiles:
            masked = torch.zeros(self.num_all, device=self.inside.device).index_fill(0, self.inside, 1)
            self._tiles[side] = masked_tiles(masked, grid, side)
        return self._tiles[side]

    @cached_property
    def _tiles(self) -> dict[int, Tiles]:
        return {}


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
    num_prompt: int = 0  # text tokens that are computed, in all branches, where padding is read from activations
    num_facts: int = 0  # last text tokens of every branch, which alone are read where there are any
    num_references: int = 0  # last image tokens, which show references

    def num_computed_text(self, reads_padding: bool) -> tuple[int, ...]:
        """Per branch, the number of text tokens that a block computes: the first ones."""
        if not reads_padding:
            return self.num_text
        return tuple(num - self.num_facts if self.num_facts else min(num, self.num_prompt) for num in self.num_text)

    def num_image(self, cached: bool) -> int:
        """Number of image tokens that a block computes."""
        return len(self.inside) if cached else self.num_all

    def computed(self, cached: bool) -> Tensor:
        """Indices of the image tokens that a block computes."""
        return self.inside if cached else self.every

    @cached_property
    def every(self) -> Tensor:  # [image tokens]
        return torch.arange(self.num_all, device=self.inside.device)

    def padded(self, reads_padding: bool = False) -> "JobTokens":
        """The same tokens with padded lists. `rest` may overlap `inside`: its keys are written first, and those of
        computed tokens replace them."""
        if not len(self.inside):  # there is no token to pad an empty list with
            return self
        count = bucket(len(self.inside), self.num_all, self.num_prompt if reads_padding else 0)
        num_rest = min(self.num_all - count + bucket(1, self.num_all), self.num_all)
        rest = self.rest if len(self.rest) else self.inside[:1]
        return replace(self, inside=pad(self.inside, count), rest=pad(rest, num_rest))

    def tables(self, cached: bool, reads_padding: bool = False) -> tuple[Tensor, ...]:
        """Per branch, the rotary table of the tokens that a block computes."""
        if not cached:
            return self.rotary
        return self.prompt_rotary if reads_padding else self.masked_rotary

    @cached_property
    def masked_rotary(self) -> tuple[Tensor, ...]:  # per branch [text tokens + masked tokens, head channels / 2]
        return self.narrow_rotary(self.num_text)

    @cached_property
    def prompt_rotary(self) -> tuple[Tensor, ...]:  # per branch [prompt's tokens + masked tokens, head channels / 2]
        return self.narrow_rotary(self.num_computed_text(reads_padding=True))

    def narrow_rotary(self, num_computed: Sequence[int]) -> tuple[Tensor, ...]:
        sizes = zip(self.rotary, self.num_text, num_computed, strict=True)
        return tuple(torch.cat([table[:num], table[num_text:][self.inside]]) for table, num_text, num in sizes)

    def read(self, num_text: int) -> Tensor:
        """Indices of what is not computed, in activations that keep rows of `num_text` text tokens before those of the
        image; 0 if they keep none."""
        return self.rest_with_padding if num_text else self.rest

    def read_references(self, num_text: int) -> Tensor:
        """For each of the tokens that `read` returns, 1 if it shows a reference, else 0."""
        return (self.read(num_text) >= num_text + self.num_all - self.num_references).long()

    @cached_property
    def rest_with_padding(self) -> Tensor:
        return with_padding(self.rest, self.num_facts or self.num_text[0], 0 if self.num_facts else self.num_prompt)


def with_padding(rest: Tensor, num_text: int, num_prompt: int) -> Tensor:
    """Indices of the padding of a text and of image tokens, where the text lies before the image."""
    return torch.cat([torch.arange(num_prompt, num_text, device=rest.device), num_text + rest])


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


def bucket(count: int, num_all: int, num_prompt: int = 0) -> int:
    """Round `count` up to a multiple of a thirty-second of all tokens: the length that a list is padded to. Products
    work in tiles of rows, and blocks that multiply text and image together would begin a tile for a short prompt alone.
    So the list is shorter by the prompt's tokens if there is room for them."""
    step = max(num_all // NUM_BUCKETS, 1)
    padded = min(-(-count // step) * step, num_all)
    fewer = padded - num_prompt % step
    return fewer if fewer >= count else padded


def text_bucket(count: int, num_text: int) -> int:
    """Round `count` up to a sixteenth of the text, an eighth, a quarter, a half or all of it."""
    sizes = (num_text * share // NUM_TEXT_BUCKETS for share in (1, 2, 4, 8))
    return next((size for size in sizes if size >= max(count, 1)), num_text)


def concat(parts: Sequence[Tensor]) -> Tensor:
    """Like `torch.cat`, without a copy where there is a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
