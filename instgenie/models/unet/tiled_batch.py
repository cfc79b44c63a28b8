"""Batches of a UNet whose convolutions see tiles: jobs of any sizes, some of which compute the masked tiles alone.
Knows no weights.

Jobs of one size are a part, packed as for a pass of their own: transformers see the parts one after the other. The
tiles of all parts lie in one list per level, which convolutions see at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from instgenie.jobs.activations import Kind
from instgenie.jobs.job import Job, keeps_convolutions, reads_convolutions
from instgenie.jobs.rows import OWN_ROWS, BatchRows, JobRows, RowReader, StepRows
from instgenie.jobs.tiles import Tiles, every_tile, side_at
from instgenie.kernels.addresses import Addresses, RowSources
from instgenie.kernels.roles import Column, Static
from instgenie.models.model import TakeRows
from instgenie.models.packed import PackedBatch
from instgenie.models.unet.batch import Cross, Positions, UnetBatch, pack
from instgenie.models.unet.tiles import TileLevel, lay_out_tiles


@dataclass(frozen=True, eq=False)
class TiledBatch(PackedBatch):
    parts: Column[tuple[UnetBatch, ...]]
    levels: Column[tuple[TileLevel, ...]]  # the finest first
    reads: Static[tuple[bool, ...]]  # per branch: True if its convolutions compute masked tiles alone
    keeps: Static[tuple[bool, ...]]  # per branch: True if what its convolutions read is kept for later steps

    @property
    def readers(self) -> Sequence[RowReader]:
        return [reader for part in self.parts for reader in part.readers]

    def over(self, columns: Sequence[Tensor], rows: BatchRows) -> Self:
        twin = super().over(columns, rows)
        return replace(twin, parts=tuple(replace(part, jobs=()) for part in twin.reading(rows).parts))

    def reading(self, rows: BatchRows) -> Self:
        """The same batch over other rows, of which each part reads its share."""
        nums = [len(part.sample) for part in self.parts]
        ends = list(accumulate(nums))
        shares = [PartRows(rows, slice(end - num, end), ends[-1]) for end, num in zip(ends, nums, strict=True)]
        return replace(super().reading(rows), parts=tuple(map(UnetBatch.reading, self.parts, shares)))

    def recording(self, kind: Kind, keep: TakeRows) -> Self:
        """The same pass over all tiles, of which everything is kept."""
        parts = tuple(replace(part, kept_kinds=(kind,) * len(part.sample)) for part in self.parts)
        everyone = replace(self, parts=parts, keeps=(True,) * len(self.keeps))
        return everyone.reading(ObservedRows(len(self.keeps), keep))

    def deal(self, predicted: Tensor) -> list[list[Tensor]]:
        """[tokens of all pictures, channels] -> per job and branch [tokens, channels]"""
        together = [job for part in self.parts for job in part.jobs]
        pictures = iter(predicted.split([len(job.masked) for job in together for _ in job.branches]))
        dealt = {job: [next(pictures) for _ in job.branches] for job in together}
        return [dealt[job] for job in self.jobs]


@dataclass(frozen=True, eq=False)
class ObservedRows:
    """Hands over what a pass keeps, place by place, for all readers together."""

    num_readers: int
    hand_over: TakeRows
    waiting: list[Tensor] = field(default_factory=list)  # of one place

    def at(self, place: int, wanted: Sequence[bool]) -> RowSources:
        raise AssertionError(f"a pass that is recorded reads nothing: place {place}")

    def keep(self, place: int, reader: int, parts: Sequence[Tensor]) -> None:
        assert reader == len(self.waiting)
        self.waiting.append(torch.stack(list(parts)))
        if len(self.waiting) == self.num_readers:
            self.hand_over(torch.stack(self.waiting), place)
            self.waiting.clear()


@dataclass(frozen=True, eq=False)
class PartRows:
    """The rows of some of the readers of a batch."""

    rows: BatchRows
    readers: slice
    num_readers: int  # of the batch

    def at(self, place: int, wanted: Sequence[bool]) -> RowSources:
        every = [False] * self.num_readers
        every[self.readers] = wanted
        found = self.rows.at(place, every)
        if isinstance(found, Addresses):
            return Addresses(found.table[self.readers], found.dtypes[self.readers])
        return found[self.readers]

    def keep(self, place: int, reader: int, parts: Sequence[Tensor]) -> None:
        self.rows.keep(place, self.readers.start + reader, parts)


def pack_tiles(
    jobs: Sequence[Job],
    positions: Positions,
    cross: Cross,
    pixels_per_latent: int,
    tile: int,
    sides: Sequence[int],
    max_listed: int,
    pads: bool = False,
    step_rows: StepRows = OWN_ROWS,
) -> TiledBatch:
    """Pack jobs of any sizes. `tile` is the side of a tile at the finest level, `sides` those of the levels' tokens;
    `max_listed` is as for `lay_out_tiles`."""
    sizes: dict[tuple[int, int], list[Job]] = {}
    for job in jobs:
        sizes.setdefault(job.grid, []).append(job)
    parts = tuple(pack(part, positions, cross, pixels_per_latent, pads, step_rows) for part in sizes.values())
    members = [reader for part in parts for reader in part.readers]
    reads = {job: reads_convolutions(job) for job in jobs}
    levels = tuple(
        tuple(
            tuple(tiles_of(job, tile, side, reads[job]) for job in part for _ in job.branches)
            for part in sizes.values()
        )
        for side in sides
    )
    return TiledBatch(
        jobs=tuple(jobs),
        rows=JobRows(tuple(members), step_rows),
        loras=None,
        residuals=(),
        parts=parts,
        levels=lay_out_tiles(levels, pads, max_listed),
        reads=tuple(reads[job] for job, _ in members),
        keeps=tuple(keeps_convolutions(job) for job, _ in members),
    )


def tiles_of(job: Job, tile: int, side: int, masked: bool) -> Tiles:
    """The active tiles of a job at the level at which a token stands for `side` by `side`: the masked ones, or all."""
    rows, columns = job.grid
    tile_side = side_at(tile, side)
    if masked:
        return job.level(len(job.masked) // side**2).tiles((rows // side, columns // side), tile_side)
    return every_tile((rows // side, columns // side), tile_side, job.device)
