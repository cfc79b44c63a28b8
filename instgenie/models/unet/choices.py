"""Which tiles of pictures the blocks of a UNet compute in a pass. Knows pictures of one size; knows no weights."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor

from instgenie.jobs.blocks import BlockPass, KeptUnits, per_job
from instgenie.jobs.job import Job, block_units, chooses
from instgenie.jobs.tiles import side_at
from instgenie.models.layers.resnet import is_plain

TILE = 8  # side of the tiles in latents, where the whole picture is reused or none of it


class ChosenShape(NamedTuple):
    """A block that can choose what it computes, as numbers."""

    factor: int  # side of the square of latents that one of its tokens stands for
    channels: int  # that go into it
    added_channels: int
    middle_channels: int = 0  # between the convolutions of a resnet

    def kept_units(self, grid: tuple[int, int], side: int, num_branches: int) -> list[KeptUnits]:
        tiles = TileGrid(side_at(side or TILE, self.factor), (grid[0] // self.factor, grid[1] // self.factor))
        num, num_tokens = num_branches * tiles.num, tiles.side**2
        own = KeptUnits(num, num_tokens * self.channels, num_tokens * self.added_channels)
        return [own, KeptUnits(num, 1, num_tokens * self.middle_channels)] if self.middle_channels else [own]


@dataclass(eq=False)
class UnetChoices:
    """The choices of one pass over pictures of one size."""

    blocks: BlockPass
    num_branches: tuple[int, ...]  # per job
    grid: tuple[int, int]  # of latents
    next_block: int = 0
    owners: dict[int, Tensor] = field(default_factory=dict)  # by the number of tiles of a picture [tiles of all]

    def choose(self, x: Tensor) -> "ChosenTiles":
        """What the next block computes of the pictures that go into it [branches, channels, rows, columns]."""
        number, self.next_block = self.next_block, self.next_block + 1
        side = side_at(self.blocks.rule.side or TILE, self.grid[0] // x.shape[2])
        tiles = TileGrid(side, (x.shape[2], x.shape[3]))
        if tiles.num not in self.owners:
            numbers = torch.arange(len(x), device=x.device)
            self.owners[tiles.num] = numbers.repeat_interleave(tiles.num)
        units, owners = tiles.cut(x), self.owners[tiles.num]
        sizes = tuple(num * tiles.num for num in self.num_branches)
        asked = self.blocks.choose(number, units, owners, sizes, self.pool)
        nums = asked.view(-1, tiles.num).sum(1).tolist()
        self.blocks.count(number, per_job(nums, self.num_branches))
        index = None if all(num == tiles.num for num in nums) else asked.nonzero()[:, 0]
        return ChosenTiles(self.blocks, number, tiles, units, owners, sizes, index, nums)

    def pool(self, values: Tensor) -> Tensor:
        if self.blocks.rule.side:
            return values
        pictures = values.view(sum(self.num_branches), -1)
        return pictures.amax(1, keepdim=True).expand_as(pictures).flatten()


@dataclass(frozen=True)
class TileGrid:
    """Pictures as tiles of one side. The last tiles of a row or a column may reach over the edge."""

    side: int
    grid: tuple[int, int]  # rows and columns of tokens

    @property
    def shape(self) -> tuple[int, int]:
        return -(-self.grid[0] // self.side), -(-self.grid[1] // self.side)

    @property
    def num(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def over(self) -> tuple[int, int]:
        """Rows and columns over the edge."""
        return self.shape[0] * self.side - self.grid[0], self.shape[1] * self.side - self.grid[1]

    def cut(self, x: Tensor) -> Tensor:
        """[branches, channels, rows, columns] -> [tiles of all, side * side * channels]"""
        down, across = self.over
        wide = F.pad(x.permute(0, 2, 3, 1), (0, 0, 0, across, 0, down))
        tiles: Tensor = wide.unflatten(2, (-1, self.side)).unflatten(1, (-1, self.side)).transpose(2, 3)
        return tiles.reshape(len(x) * self.num, -1)

    def join(self, tiles: Tensor, channels: int) -> Tensor:
        """[tiles of all, side * side * channels] -> [branches, channels, rows, columns], channels last in memory"""
        parts = tiles.view(-1, *self.shape, self.side, self.side, channels).transpose(2, 3)
        whole = parts.flatten(3, 4).flatten(1, 2)[:, : self.grid[0], : self.grid[1]]
        return whole.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)

    def clip(self, tiles: Tensor, index: Tensor) -> Tensor:
        """[tiles, channels, side, side] -> [tiles, side * side * channels], zero over the edge"""
        rows = tiles.permute(0, 2, 3, 1).flatten(1, 2)
        if any(self.over):
            rows = rows * self.cut(rows.new_ones(1, 1, *self.grid))[index % self.num][:, :, None]
        return rows.flatten(1)

    def squares(self, rows: Tensor) -> Tensor:
        """[tiles, side * side * channels] -> [tiles, channels, side, side]"""
        return rows.view(len(rows), self.side, self.side, -1).permute(0, 3, 1, 2)

    def windows(self, x: Tensor, index: Tensor) -> Tensor:
        """The tiles at the index, each with a halo of one token [tiles, channels, side + 2, side + 2], of pictures that
        are padded with zeros."""
        down, across = self.over
        wide = F.pad(x.permute(0, 2, 3, 1), (0, 0, 1, across + 1, 1, down + 1))
        rows, columns = wide.shape[1:3]
        near = torch.arange(self.side + 2, device=x.device)
        picture, tile = index.div(self.num, rounding_mode="floor"), index % self.num
        top = self.side * tile.div(self.shape[1], rounding_mode="floor")[:, None] + near
        left = self.side * (tile % self.shape[1])[:, None] + near
        places = ((picture[:, None] * rows + top) * columns)[:, :, None] + left[:, None, :]
        return wide.reshape(-1, x.shape[1])[places].permute(0, 3, 1, 2)

    def tokens(self, index: Tensor) -> Tensor:
        """The tokens of the tiles at the index, among those of all pictures, in their order."""
        count = len(index) and int(index.max()) // self.num + 1
        marked = torch.zeros(count * self.num, self.side**2, device=index.device)
        marked[index] = 1
        return self.join(marked, 1).flatten().nonzero()[:, 0]


@dataclass(frozen=True, eq=False)
class ChosenTiles:
    """The tiles that a block computes."""

    blocks: BlockPass
    number: int
    tiles: TileGrid
    units: Tensor  # [tiles of all, side * side * channels], what goes into the block
    owners: Tensor  # [tiles of all], their branches
    sizes: tuple[int, ...]
    index: Tensor | None  # [chosen tiles]; None: all
    nums: Sequence[int]  # chosen tiles per branch

    def middle(self, inner: Tensor | None, tiles: Tensor | None) -> Tensor:
        """The pictures between the two convolutions of a resnet, from all of them or from the chosen tiles."""
        key = "middle", self.number
        if inner is not None:
            rows, index = self.tiles.cut(inner), None
        else:
            assert tiles is not None
            assert self.index is not None
            rows, index = self.tiles.clip(tiles, self.index), self.index
        width = rows.shape[1]
        none = rows.new_zeros(len(self.units), 1).expand(-1, width)
        facts = self.units[:, :1]
        whole = self.blocks.complete(key, facts, rows, index, self.owners, self.sizes, none)
        return inner if inner is not None else self.tiles.join(whole, width // self.tiles.side**2)

    def complete(self, out: Tensor, around: Tensor) -> Tensor:
        """The pictures behind the block. With all tiles chosen `out` is those pictures, otherwise what the block adds
        to the chosen tiles [tiles, channels, side, side] around it."""
        beside, given = self.tiles.cut(around), (self.owners, self.sizes)
        if self.index is None:
            self.blocks.complete(self.number, self.units, self.tiles.cut(out), None, *given, beside)
            return out
        rows = beside[self.index] + self.tiles.clip(out, self.index)
        whole = self.blocks.complete(self.number, self.units, rows, self.index, *given, beside)
        return self.tiles.join(whole, around.shape[1])


def choices_of(unet: UNet2DConditionModel, jobs: Sequence[Job]) -> UnetChoices | None:
    """The choices of a pass of jobs whose blocks choose; None if they do not, or cannot."""
    if not jobs or not chooses(jobs[0]) or not count_blocks(unet):
        return None
    blocks = BlockPass([block_units(job) for job in jobs], count_blocks(unet), jobs[0].device)
    return UnetChoices(blocks, tuple(len(job.branches) for job in jobs), jobs[0].grid)


COUNTS: WeakKeyDictionary[UNet2DConditionModel, int] = WeakKeyDictionary()


def count_blocks(unet: UNet2DConditionModel) -> int:
    """The blocks that can choose; none in a UNet with resnets that are not plain."""
    if unet not in COUNTS:
        blocks = [module for module in unet.modules() if isinstance(module, ResnetBlock2D | BasicTransformerBlock)]
        COUNTS[unet] = len(blocks) if all(is_plain(one) for one in blocks if isinstance(one, ResnetBlock2D)) else 0
    return COUNTS[unet]
