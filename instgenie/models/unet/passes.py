"""The passes through the UNet of a Stable Diffusion: which jobs share one, how it is packed and run. Knows no prompt
and no schedule."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor

from instgenie.adapters.applied import BatchLoras
from instgenie.errors import ModelError
from instgenie.jobs.activations import Kind
from instgenie.jobs.blocks import KeptUnits
from instgenie.jobs.job import Branch, Job, chooses
from instgenie.jobs.rows import OWN_ROWS, StepRows
from instgenie.models.model import KeptConvolutions, Model, TakeRows
from instgenie.models.packed import PackedBatch
from instgenie.models.unet.batch import Cross, Positions, UnetBatch, pack
from instgenie.models.unet.choices import ChosenShape
from instgenie.models.unet.flow import Recorder
from instgenie.models.unet.network import Encoded, chosen_shapes, cross, encode, find_positions, predict
from instgenie.models.unet.tiled import can_tile, predict_tiles
from instgenie.models.unet.tiled_batch import TiledBatch, pack_tiles
from instgenie.models.unet.tiling import Tiling
from instgenie.types import Convolutions

TILE = 8
# With few tokens a GPU multiplies faster than it convolves, though all that tokens read is gathered for each of them.
MAX_LISTED = 2048
MAX_CROSSED = 4  # batches


class CrossedPrompts:
    """K and V of the prompts of the batches that ran last."""

    def __init__(self, unet: UNet2DConditionModel) -> None:
        self.unet = unet
        self._found: OrderedDict[Hashable, tuple[Tensor, ...]] = OrderedDict()

    def __call__(self, branches: tuple[Branch, ...], loras: BatchLoras | None, token: Hashable) -> tuple[Tensor, ...]:
        """The token tells the LoRAs of the branches, merged or not, and holds none of their tensors."""
        key = branches, token
        if key not in self._found:
            self._found[key] = cross(self.unet, branches, loras)
        self._found.move_to_end(key)
        if len(self._found) > MAX_CROSSED:
            self._found.popitem(last=False)
        return self._found[key]


@dataclass(frozen=True, eq=False)
class UnetPasses(Model):
    """A model with a UNet."""

    unet: UNet2DConditionModel
    convolutions: Convolutions = field(default="dense", kw_only=True)
    tile: int = field(default=TILE, kw_only=True)  # side of the tiles of convolutions, in latents

    def with_convolutions(self, how: Convolutions) -> Self:
        if how != "dense" and not can_tile(self.unet):
            raise ModelError(f"the UNet of {self.name!r} has blocks that see whole pictures: no convolutions are {how}")
        return self if how == self.convolutions else replace(self, convolutions=how)

    @cached_property
    def positions(self) -> Positions:
        return find_positions(self.unet)

    @cached_property
    def cross(self) -> Cross:
        """K and V of the prompts of a batch, cached: the same jobs usually stay together for many steps."""
        return CrossedPrompts(self.unet)

    @cached_property
    def tiling(self) -> Tiling:
        return Tiling(self.unet, self.positions, self.convolutions, self.tile)

    @property
    def max_listed(self) -> int:
        """Tokens of a level up to which a convolution of its tiles is a product."""
        return MAX_LISTED if self.device.type == "cuda" else 0

    @cached_property
    def chosen_shapes(self) -> list[ChosenShape]:
        return chosen_shapes(self.unet)

    def kept_units(self, job: Job, side: int) -> list[KeptUnits]:
        return [one for block in self.chosen_shapes for one in block.kept_units(job, side)]

    def passes(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Jobs of one size, unless sizes are mixed, those that compute every token apart, so that few captured passes
        serve all batches."""
        groups: dict[Hashable, list[Job]] = {}
        for job in jobs:
            own_size = chooses(job) and job.grid  # its blocks see pictures of one size
            groups.setdefault((own_size, any(job.present_plan), *self.tiling.group(job)), []).append(job)
        return list(groups.values())

    def pack(self, jobs: Sequence[Job], pads: bool = False, rows: StepRows = OWN_ROWS) -> UnetBatch | TiledBatch:
        facts = self.positions, self.cross, self.pixels_per_latent
        if self.tiling.needs_tiles(jobs):
            return pack_tiles(jobs, *facts, self.tile, self.tiling.sides, self.max_listed, pads, rows)
        return pack(jobs, *facts, pads, rows)

    def run(self, packed: PackedBatch) -> Tensor:
        assert isinstance(packed, UnetBatch | TiledBatch)
        if isinstance(packed, TiledBatch):
            return predict_tiles(self.unet, self.positions, self.tiling.kept, packed)
        return predict(self.unet, self.positions, packed)

    def begin(self, packed: PackedBatch) -> Encoded:
        assert isinstance(packed, UnetBatch)
        return encode(self.unet, self.positions, packed)

    @property
    def kept_convolutions(self) -> KeptConvolutions:
        return KeptConvolutions(self.tile, self.tiling.ranks) if self.convolutions == "reused" else KeptConvolutions()

    def observe(
        self, jobs: Sequence[Job], kind: Kind, keep: TakeRows, num_text: int = 0, with_convolutions: bool = False
    ) -> None:
        assert not num_text  # it does not flow
        if with_convolutions:
            facts = self.positions, self.cross, self.pixels_per_latent, self.tile, self.tiling.sides
            self.run(pack_tiles(jobs, *facts, self.max_listed).recording(kind, keep))
            return
        packed = pack(jobs, self.positions, self.cross, self.pixels_per_latent)
        predict(self.unet, self.positions, packed, Recorder(kind, keep))

    def observe_time(self, jobs: Sequence[Job]) -> Tensor:
        return torch.empty(len(jobs), 0, dtype=self.dtype, device=self.device)
