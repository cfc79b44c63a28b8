"""How a UNet's convolutions are tiled: which jobs share a pass, and what is kept for convolutions. Knows a UNet's
modules; runs nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from diffusers import UNet2DConditionModel

from instgenie.cost.network import ConvolutionShape
from instgenie.jobs.job import Job, keeps_convolutions, reads_convolutions
from instgenie.jobs.tiles import side_at
from instgenie.models.unet.batch import Positions
from instgenie.models.unet.tiled import KeptPlace, KeptPlaces, find_kept, walk_places
from instgenie.types import CacheDtype, Convolutions


def has_more_places(job: Job) -> bool:
    """Return whether the job reads or leaves activations in its present step that have places for convolutions, too.
    All activations of a pass have the same places."""
    cache = job.activations
    return cache is not None and cache.has_convolutions and (any(job.present_plan) or job.keeps_activations)


@dataclass(frozen=True, eq=False)
class Tiling:
    unet: UNet2DConditionModel
    positions: Positions
    how: Convolutions
    tile: int  # side of a tile at the finest level

    def __post_init__(self) -> None:
        assert self.tile.bit_count() == 1  # a power of two: each tile lies in one tile of the finer level

    @cached_property
    def kept(self) -> KeptPlaces:
        """Numbers of what activations keep for convolutions, behind what they keep for transformers."""
        first = max((position.end for position in self.positions.values()), default=-1) + 1
        return {one.module: first + number for number, one in enumerate(find_kept(self.unet))}

    @property
    def shapes(self) -> tuple[ConvolutionShape, ...]:
        """What activations keep for convolutions, as numbers; nothing if these are not reused."""
        return tuple(
            ConvolutionShape(one.width, one.side, side_at(self.tile, one.side), one.rows(self.tile))
            for one in (find_kept(self.unet) if self.how == "reused" else ())
        )

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Per place of activations that have some for convolutions: which in turn a pass reads."""
        order: list[int] = []
        for one in walk_places(self.unet):
            if isinstance(one, KeptPlace):
                order.append(self.kept[one.module])
            else:
                order += range(self.positions[one].place, self.positions[one].end + 1)
        return tuple(sorted(range(len(order)), key=order.__getitem__))

    @cached_property
    def sides(self) -> tuple[int, ...]:
        """Sides of the squares of latents that a token of each level stands for, the finest first."""
        return tuple(2**level for level in range(len(self.unet.down_blocks)))

    def group(self, job: Job) -> tuple[Any, ...]:
        """A key that is equal for jobs that may share a pass. Sizes are mixed, if at all, where no LoRA and no
        ControlNet changes what convolutions compute. Rows that tiles are completed with have one format."""
        is_mixed = self.how != "dense" and not (job.loras or job.controls)
        return None if is_mixed else job.grid, has_more_places(job), self.format_of(job)

    def format_of(self, job: Job) -> CacheDtype | None:
        is_read = self.how != "dense" and job.activations is not None and any(job.present_plan)
        return job.activations.key.cache_dtype if job.activations and is_read else None

    def needs_tiles(self, jobs: Sequence[Job]) -> bool:
        """Return whether the jobs of a pass have several sizes, or convolutions that read or leave activations."""
        return len({job.grid for job in jobs}) > 1 or any(
            keeps_convolutions(job) or reads_convolutions(job) for job in jobs
        )
