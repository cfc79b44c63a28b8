"""Which tiles of pictures the blocks of a UNet compute in a pass. Knows pictures of one size; knows no weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor

from instgenie.jobs.blocks import BlockPass, KeptUnits, per_job
from instgenie.jobs.job import Job, block_units, chooses, reads_others
from instgenie.jobs.tiles import side_at
from instgenie.models.layers.resnet import is_plain

TILE = 8  # side of the tiles in latents, where the whole picture is reused or none of it


class ChosenShape(NamedTuple):
    """A block that can choose what it computes, as numbers."""

    factor: int  # side of the square of latents that one of its tokens stands for
    channels: int  # that go into it
    added_channels: int
    middle_channels: int = 0  # between the convolutions of a resnet

    def kept_units(self, job: Job, side: int) -> list[KeptUnits]:
        tiles = grid_of(job, side, self.factor)
        chooses_masked = not self.middle_channels and reads_others(job)  # resnets see whole pictures
        num_tiles = len(masked_tiles_of(job, tiles)) if chooses_masked else tiles.num
        num, num_tokens = len(job.branches) * num_tiles, tiles.side**2
        own = KeptUnits(num, num_tokens * self.channels, num_tokens * self.added_channels)
        return [own, KeptUnits(num, 1, num_tokens * self.middle_channels)] if self.middle_channels else [own]


@dataclass(frozen=True, eq=False)
class TileUnits:
    """The tiles of a level among which a block chooses."""

    index: Tensor | None  # [units], among the tiles of all pictures; None: all of them
    owners: Tensor  # [units], their branches
    sizes: tuple[int, ...]  # units per job

    def narrow(self, rows: Tensor) -> Tensor:
        """Rows of all tiles -> those of the units"""
        return rows if self.index is None else rows[self.index]

    def widen(self, rows: Tensor, num: int) -> Tensor:
        """The other way, with zeros for the other tiles."""
        return rows if self.index is None else rows.new_zeros(num, rows.shape[1]).index_copy(0, self.index, rows)


@dataclass(eq=False)
class UnetChoices:
    """The choices of one pass over pictures of one size."""

    blocks: BlockPass
    jobs: Sequence[Job]
    next_block: int = 0
    units: "dict[tuple[TileGrid, bool], TileUnits]" = field(default_factory=dict)  # by tiles of a level; masked ones

    @property
    def num_branches(self) -> list[int]:
        return [len(job.branches) for job in self.jobs]

    def choose(self, x: Tensor, masked: bool = False) -> "ChosenTiles":
        """What the next block computes of the pictures that go into it [branches, channels, rows, columns]; if it sees
        `masked` tokens alone, of the tiles that have any."""
        number, self.next_block = self.next_block, self.next_block + 1
        tiles = grid_of(self.jobs[0], self.blocks.rule.side, self.jobs[0].grid[0] // x.shape[2])
        key = tiles, masked
        if key not in self.units:
            self.units[key] = self.find_units(tiles, masked)
        units = self.units[key]
        rows = units.narrow(tiles.cut(x))
        asked = self.blocks.choose(number, rows, units.owners, units.sizes, lambda values: self.pool(values, units))
        nums = torch.bincount(units.owners[asked], minlength=len(x)).tolist()
        self.blocks.count(number, per_job(nums, self.num_branches))
        index = None if sum(nums) == len(rows) else asked.nonzero()[:, 0]
        return ChosenTiles(self.blocks, number, tiles, rows, units, index, nums)

    def find_units(self, tiles: "TileGrid", masked: bool) -> TileUnits:
        device = self.jobs[0].device
        every = torch.arange(tiles.num, device=device)
        own = [masked_tiles_of(job, tiles) if masked and reads_others(job) else every for job in self.jobs]
        members = [one for job, one in zip(self.jobs, own, strict=True) for _ in job.branches]
        index = torch.cat([branch * tiles.num + one for branch, one in enumerate(members)])
        sizes = tuple(len(job.branches) * len(one) for job, one in zip(self.jobs, own, strict=True))
        return TileUnits(index if masked else None, index.div(tiles.num, rounding_mode="floor"), sizes)

    def pool(self, values: Tensor, units: TileUnits) -> Tensor:
        if self.blocks.rule.side:
            return values
        pictures = values.new_full((sum(self.num_branches),), -math.inf)
        return pictures.scatter_reduce(0, units.owners, values, "amax")[units.owners]


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


def grid_of(job: Job, side: int, factor: int) -> TileGrid:
    """The tiles of a job's picture where a token stands for `factor` by `factor` latents; with the side 0, those of a
    picture that is reused as a whole."""
    return TileGrid(side_at(side or TILE, factor), (job.grid[0] // factor, job.grid[1] // factor))


def masked_tiles_of(job: Job, tiles: TileGrid) -> Tensor:
    """The tiles of a job's picture that have any masked token [tiles], their numbers."""
    return job.level(tiles.grid[0] * tiles.grid[1]).tiles(tiles.grid, tiles.side).active


@dataclass(frozen=True, eq=False)
class ChosenTiles:
    """The tiles that a block computes."""

    blocks: BlockPass
    number: int
    tiles: TileGrid
    rows: Tensor  # [units, side * side * channels], what goes into the block
    units: TileUnits
    chosen: Tensor | None  # [chosen units], among the units; None: all
    nums: Sequence[int]  # chosen tiles per branch

    @cached_property
    def index(self) -> Tensor | None:
        """The chosen tiles among those of all pictures [chosen tiles]; None: all units."""
        return (
            None if self.chosen is None else self.chosen if self.units.index is None else self.units.index[self.chosen]
        )

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
        none = rows.new_zeros(len(self.rows), 1).expand(-1, width)
        facts = self.rows[:, :1]
        whole = self.blocks.complete(key, facts, rows, index, self.units.owners, self.units.sizes, none)
        return inner if inner is not None else self.tiles.join(whole, width // self.tiles.side**2)

    def complete(self, out: Tensor, around: Tensor) -> Tensor:
        """The pictures behind the block, zero in tiles that are no units. With all units chosen `out` is those
        pictures, otherwise what the block adds to the chosen tiles [tiles, channels, side, side] around it."""
        every, given = self.tiles.cut(around), (self.units.owners, self.units.sizes)
        beside = self.units.narrow(every)
        if self.index is None:
            self.blocks.complete(self.number, self.rows, self.units.narrow(self.tiles.cut(out)), None, *given, beside)
            return out
        rows = every[self.index] + self.tiles.clip(out, self.index)
        whole = self.blocks.complete(self.number, self.rows, rows, self.chosen, *given, beside)
        return self.tiles.join(self.units.widen(whole, len(every)), around.shape[1])


def choices_of(unet: UNet2DConditionModel, jobs: Sequence[Job]) -> UnetChoices | None:
    """The choices of a pass of jobs whose blocks choose; None if they do not, or cannot."""
    if not jobs or not chooses(jobs[0]) or not count_blocks(unet):
        return None
    return UnetChoices(BlockPass([block_units(job) for job in jobs], count_blocks(unet), jobs[0].device), jobs)


COUNTS: WeakKeyDictionary[UNet2DConditionModel, int] = WeakKeyDictionary()


def count_blocks(unet: UNet2DConditionModel) -> int:
    """The blocks that can choose; none in a UNet with resnets that are not plain."""
    if unet not in COUNTS:
        blocks = [module for module in unet.modules() if isinstance(module, ResnetBlock2D | BasicTransformerBlock)]
        COUNTS[unet] = len(blocks) if all(is_plain(one) for one in blocks if isinstance(one, ResnetBlock2D)) else 0
    return COUNTS[unet]
