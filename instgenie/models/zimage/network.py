"""Z-Image over packed tokens: the blocks of diffusers' ZImageTransformer2DModel, and what lies before and after them.

Blocks have the same layers for text and image. The first ones refine the noise: only the image flows through them.
Those that refine the text depend on no step, so a prompt passes them once.

The stock code makes the numbers of text and image tokens multiples of 32 with learned rows. Those of the image depend
on no pixel and attend to everything, so they flow with the text: they are the last tokens of a branch's text, and the
only ones that the refiners of the noise see.

Positions count from the image: its tokens are at 0 before their row and column, the text lies at negative numbers. Only
differences of positions matter to attention, and so the keys of a template serve texts of any length.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import ZImageTransformer2DModel
from torch import Tensor, nn

from instgenie.cost.network import BlockShape
from instgenie.jobs.job import Grid
from instgenie.jobs.tokens import concat
from instgenie.kernels.heads import HeadPlaces, Heads, Projected, place
from instgenie.kernels.modulate import norm_modulate
from instgenie.kernels.rms_modulate import add_rms_gated, add_rms_modulate, rms_modulate
from instgenie.kernels.silu_gate import silu_gate
from instgenie.models.joint.batch import JointBatch
from instgenie.models.joint.block import EntryLayers, JointBlock, attend, attend_behind
from instgenie.models.joint.flow import Apart, Flow, Together, join
from instgenie.models.joint.layout import Layout
from instgenie.models.joint.modulation import Modulation, modulate
from instgenie.models.joint.network import JointNetwork
from instgenie.models.joint.residual import Residual
from instgenie.models.layers.fp8_linear import reads_fp8
from instgenie.models.layers.linear import EACH_BRANCH, Owners, call, linear, linears
from instgenie.models.layers.products import products

MULTIPLE = 32  # of the numbers of text and of image tokens
SIDE = 2  # of a patch, in latents
PATCH = f"{SIDE}-1"  # the name of the layers for such patches of a single picture


class ZImageNetwork(JointNetwork):
    def __init__(self, transformer: ZImageTransformer2DModel) -> None:
        super().__init__(transformer)
        self._modulated: dict[nn.Linear, ZImageBlock] = {}  # blocks by their modulation layers

    @cached_property
    def blocks(self) -> Sequence["ZImageBlock"]:
        refiners = map(RefinerBlock, self.transformer.noise_refiner)
        return [*refiners, *map(ZImageBlock, self.transformer.layers)]

    @property
    def image_embedder(self) -> nn.Module:
        embedder: nn.Module = self.transformer.all_x_embedder[PATCH]
        return embedder

    @property
    def final_layer(self) -> Any:
        return self.transformer.all_final_layer[PATCH]

    @property
    def image_unembedder(self) -> nn.Module:
        unembedder: nn.Module = self.final_layer.linear
        return unembedder

    @property
    def time_embedder(self) -> nn.Module:
        embedder: nn.Module = self.transformer.t_embedder
        return embedder

    @property
    def final_modulation(self) -> nn.Linear:
        layer: nn.Linear = self.final_layer.adaLN_modulation[1]
        return layer

    def modulate(self, layer: nn.Linear, time: Tensor, owners: Owners | None) -> Tensor:
        if layer is self.final_modulation:
            return modulate(layer, F.silu(time), owners)
        if layer not in self._modulated:  # it may have been exchanged
            self._modulated = {block.modulation: block for block in self.blocks}
        return self._modulated[layer].weigh(modulate(layer, time, owners))

    def embed_image(self, batch: JointBatch) -> Tensor:
        channels_last = batch.image.unflatten(1, (self.transformer.in_channels, -1)).transpose(1, 2).flatten(1)
        return linear(self.image_embedder, channels_last, batch.layout.image_owners)

    def embed(
        self, sigma: Tensor, guidance: Tensor, pooled: Tensor, dtype: torch.dtype, owners: Owners = EACH_BRANCH
    ) -> Tensor:
        clean = (1000 - sigma * 1000) / 1000  # the time runs from noise to clean; rounded as the stock pipeline does
        return call(self.time_embedder, owners, clean * self.transformer.t_scale).to(dtype)

    def embed_prompt(self, sequence: Tensor) -> Tensor:
        """Embed and refine the text of a single branch, with the rows that make its length a multiple."""
        transformer = self.transformer
        embedded = transformer.cap_embedder(sequence)
        text = torch.cat([embedded, transformer.cap_pad_token.expand(num_missing(len(sequence)), -1)])[None]
        rotary = text_rotary(transformer, text.shape[1]).to(text.device)[None]
        for block in transformer.context_refiner:
            text = block(text, None, rotary)
        refined: Tensor = text[0]
        return refined

    def unembed(self, image: Tensor, mod: Modulation, layout: Layout) -> Tensor:
        scale = mod.of(self.final_modulation, image.shape[1])[0].contiguous()
        normed = norm_modulate(
            image, torch.zeros_like(scale), scale, layout.image_rows, self.final_layer.norm_final.eps
        )
        return self.order(linear(self.image_unembedder, normed, layout.image_owners))

    def order(self, predicted: Tensor) -> Tensor:
        """The last layer predicts the channels of one latent after those of another, and the way to the clean
        picture, against which velocities point."""
        ordered: Tensor = predicted.unflatten(1, (SIDE * SIDE, -1)).transpose(1, 2).flatten(1)
        return -ordered


def num_missing(count: int) -> int:
    """Rows that make a number of tokens a multiple."""
    return -count % MULTIPLE


def embed_positions(transformer: ZImageTransformer2DModel, num_text: int, grid: Grid) -> Tensor:
    """Rotary table of one branch [text + missing + image tokens, head channels / 2] as unit complex numbers. The rows
    that the image misses lie before the first token of the text."""
    num_rows, num_columns = grid
    before = turn(transformer, 0, torch.tensor([-num_text - 1.0])).expand(num_missing(num_rows * num_columns), -1)
    still = turn(transformer, 0, torch.zeros(1))
    rows = turn(transformer, 1, torch.arange(float(num_rows)))
    columns = turn(transformer, 2, torch.arange(float(num_columns)))
    shape = num_rows, num_columns, -1
    image = torch.cat([still.expand(*shape), rows[:, None].expand(*shape), columns[None].expand(*shape)], dim=2)
    beside = still_beside(transformer, len(before))
    return torch.cat([text_rotary(transformer, num_text), torch.cat([before, beside], dim=1), image.flatten(0, 1)])


def text_rotary(transformer: ZImageTransformer2DModel, num_text: int) -> Tensor:  # [text tokens, head channels / 2]
    own = turn(transformer, 0, torch.arange(-float(num_text), 0.0))
    return torch.cat([own, still_beside(transformer, num_text)], dim=1)


def still_beside(transformer: ZImageTransformer2DModel, num_tokens: int) -> Tensor:
    """Rows and columns of tokens that have none."""
    num_channels = sum(transformer.axes_dims[1:]) // 2
    return torch.ones(num_tokens, num_channels, dtype=torch.complex64)


def turn(transformer: ZImageTransformer2DModel, axis: int, positions: Tensor) -> Tensor:  # [positions, channels / 2]
    """Turns of positions along an axis, in the precision of the stock code."""
    num_channels = transformer.axes_dims[axis]
    exponents = torch.arange(0, num_channels, 2, dtype=torch.float64) / num_channels
    angles = torch.outer(positions.double(), transformer.rope_theta**-exponents).float()
    return torch.polar(torch.ones_like(angles), angles)


class ZImageBlock(JointBlock):
    """A block with the same layers for text and image, whose outputs are normalised before they are added."""

    @property
    def attn(self) -> Any:
        return self.module.attention

    @property
    def head_shape(self) -> tuple[int, int]:
        return self.attn.heads, self.attn.inner_dim // self.attn.heads

    @property
    def modulation(self) -> nn.Linear:
        layer: nn.Linear = self.module.adaLN_modulation[0]
        return layer

    @property
    def modulations(self) -> Sequence[nn.Linear]:
        return (self.modulation,)

    def entries(self, is_text: bool) -> Sequence[EntryLayers]:
        attn = self.attn
        layers = attn.to_q, attn.to_k, attn.to_v
        return [EntryLayers(self.modulation, self.module.attention_norm1.eps, layers, attn.norm_q, attn.norm_k)]

    @property
    def joinable(self) -> Sequence[Sequence[nn.Module]]:
        feed = self.module.feed_forward
        return [self.entries(is_text=False)[0].projections, (feed.w1, feed.w3)]

    def weigh(self, columns: Tensor) -> Tensor:
        """Columns that contain the weights of the block's norms: for attention and for the feed-forward layer, a
        factor of the rows that go in and a gate of those that come out."""
        block = self.module
        scale, gate, feed_scale, feed_gate = columns.chunk(4, dim=1)
        parts = (1 + scale) * block.attention_norm1.weight, gate.tanh() * block.attention_norm2.weight
        feed_parts = (1 + feed_scale) * block.ffn_norm1.weight, feed_gate.tanh() * block.ffn_norm2.weight
        return torch.cat([*parts, *feed_parts], dim=1)

    def project_keys(
        self,
        rows: Tensor,
        mod: Modulation,
        rotary: Tensor,
        owners: Owners | None,
        keys: Tensor,
        places: HeadPlaces | None = None,
        is_text: bool = False,
    ) -> None:
        [entry] = self.entries(is_text)
        _, *layers = entry.projections
        factor, *_ = mod.of(entry.modulation, rows.shape[1])
        rows_in = rms_modulate(rows, factor, owners.index if owners else None, entry.eps, reads_fp8(layers[0]))
        k, v = linears(layers, rows_in, owners)
        place(Projected(None, k, v, entry.norm_q, entry.norm_k), rotary, places, Heads(None, keys))

    def __call__(self, flow: Flow, mod: Modulation, layout: Layout, heads: Heads) -> Flow:
        rows, owners = join(flow, layout).joint.total, layout.joint_owners
        columns = self.enter(rows, mod, owners, layout, layout.joint_places, heads)
        return Together(Residual(self.leave(rows, concat(attend(heads, layout)), columns, owners)))

    def enter(
        self, rows: Tensor, mod: Modulation, owners: Owners, layout: Layout, places: HeadPlaces, heads: Heads
    ) -> Sequence[Tensor]:
        """Write Q, K and V of rows; return the columns that modulate the rest of the block."""
        [entry] = self.entries(is_text=False)
        factor, *columns = mod.of(entry.modulation, rows.shape[1])
        rows_in = rms_modulate(rows, factor, owners.index, entry.eps, reads_fp8(entry.projections[0]))
        q, k, v = linears(entry.projections, rows_in, owners)
        place(Projected(q, k, v, entry.norm_q, entry.norm_k), layout.rotary, places, heads)
        return columns

    def leave(self, rows: Tensor, attended: Tensor, columns: Sequence[Tensor], owners: Owners) -> Tensor:
        """Add what was attended, and feed the sum forward."""
        block, feed, index = self.module, self.module.feed_forward, owners.index
        gate, factor, feed_gate = columns
        out = linear(self.attn.to_out[0], attended, owners)
        eps = block.attention_norm2.eps, block.ffn_norm1.eps
        total, inner = add_rms_modulate(rows, gate, out, factor, index, *eps, fp8=reads_fp8(feed.w1))
        opened, values = linears((feed.w1, feed.w3), inner, owners)
        fed = linear(feed.w2, silu_gate(opened, values, reads_fp8(feed.w2)), owners)
        return add_rms_gated(total, feed_gate, fed, index, block.ffn_norm2.eps)

    def describe(self) -> BlockShape:
        block, attn = self.module, self.attn
        per_token = products(attn.to_q, attn.to_k, attn.to_v, attn.to_out, block.feed_forward)
        return BlockShape(
            per_token=per_token,
            per_text=per_token,
            per_rest=products(attn.to_k, attn.to_v),
            per_pair=4 * attn.inner_dim,
            per_branch=products(block.adaLN_modulation),
            width=attn.inner_dim,
            joint=True,
        )


class RefinerBlock(ZImageBlock):
    """A block that the image passes before it meets the text, with the rows that it misses."""

    def __call__(self, flow: Flow, mod: Modulation, layout: Layout, heads: Heads) -> Flow:
        assert isinstance(flow, Apart)
        nums_missing = [num_missing(num) for num in layout.num_all]
        nums_told = [num - missing for num, missing in zip(layout.num_text, nums_missing, strict=True)]  # stay outside
        branches = list(zip(flow.by_branch(layout), nums_told, strict=True))
        owners, places = behind(layout, nums_told)
        rows = torch.cat([part for (text, image), num in branches for part in (text[num:], image)])
        columns = self.enter(rows, mod, owners, layout, places, heads)
        out = self.leave(rows, concat(attend_behind(heads, layout, nums_told, nums_told)), columns, owners)
        parts = out.split([num for pair in zip(nums_missing, layout.num_image, strict=True) for num in pair])
        texts = [(text[:num], own) for ((text, _), num), own in zip(branches, parts[::2], strict=True)]
        return Apart(Residual(torch.cat(list(chain(*texts)))), Residual(concat(parts[1::2])))

    def describe(self) -> BlockShape:
        return replace(super().describe(), per_text=0, sees_text=False)


def behind(layout: Layout, nums: Sequence[int]) -> tuple[Owners, HeadPlaces]:
    """Owners and places of the joint tokens of each branch but its first ones."""

    def cut(column: Tensor) -> Tensor:
        return concat([own[num:] for own, num in zip(column.split(layout.num_joint), nums, strict=True)])

    places = layout.joint_places
    owners = Owners(cut(layout.joint_rows), loras=layout.loras)
    return owners, HeadPlaces(cut(places.joint), cut(places.keys))
