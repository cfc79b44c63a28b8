"""FLUX.2 over packed tokens: the blocks of diffusers' Flux2Transformer2DModel, and what lies before and after them.

All double blocks share their modulation layers, and so do all single blocks. One layer of a single block computes Q, K,
V and the feed-forward layer's input.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import Flux2Transformer2DModel
from torch import Tensor, nn

from instgenie.cost.network import BlockShape, NetworkShape
from instgenie.jobs.job import Grid
from instgenie.kernels.heads import HeadPlaces, Heads, Projected, place
from instgenie.kernels.swiglu import beside_swiglu
from instgenie.models.joint.batch import JointBatch
from instgenie.models.joint.block import DoubleBlock, EntryLayers, ExitLayers, JointBlock, attend, modulated
from instgenie.models.joint.flow import Flow, Together, join
from instgenie.models.joint.layout import Layout
from instgenie.models.joint.modulation import Modulation
from instgenie.models.joint.network import JointNetwork
from instgenie.models.joint.residual import Residual
from instgenie.models.layers.fp8_linear import reads_fp8
from instgenie.models.layers.linear import EACH_BRANCH, Owners, call, linear, linear_columns
from instgenie.models.layers.products import products

BETWEEN_PICTURES = 10  # from the first position of one picture to that of the next


class Flux2Network(JointNetwork):
    @cached_property
    def blocks(self) -> Sequence[JointBlock]:
        whole = self.transformer
        image, text, single = (
            whole.double_stream_modulation_img,
            whole.double_stream_modulation_txt,
            whole.single_stream_modulation,
        )
        doubles = [Flux2DoubleBlock(block, image, text) for block in whole.transformer_blocks]
        return [*doubles, *(Flux2SingleBlock(block, single) for block in whole.single_transformer_blocks)]

    @property
    def image_embedder(self) -> nn.Module:
        embedder: nn.Module = self.transformer.x_embedder
        return embedder

    @property
    def time_embedder(self) -> nn.Module:
        embedder: nn.Module = self.transformer.time_guidance_embed
        return embedder

    def embed_image(self, batch: JointBatch) -> Tensor:
        return linear(self.image_embedder, batch.image, batch.layout.image_owners)

    def embed(
        self, sigma: Tensor, guidance: Tensor, pooled: Tensor, dtype: torch.dtype, owners: Owners = EACH_BRANCH
    ) -> Tensor:
        """Of the time alone: the stock pipelines of klein give no guidance to the network."""
        timestep = (sigma * 1000).to(dtype) / 1000 * 1000  # scaled back and forth, to round as the stock pipeline does
        waves = self.transformer.time_guidance_embed.time_proj(timestep).to(dtype)
        return F.silu(call(self.transformer.time_guidance_embed.timestep_embedder, owners, waves))

    def describe(self) -> NetworkShape:
        whole, shape = self.transformer, super().describe()
        modulations = (
            whole.double_stream_modulation_img,
            whole.double_stream_modulation_txt,
            whole.single_stream_modulation,
        )
        return replace(shape, per_branch=shape.per_branch + products(*modulations))


def embed_positions(
    transformer: Flux2Transformer2DModel, num_text: int, grid: Grid, references: Sequence[Grid] = ()
) -> Tensor:
    """Rotary table of one branch [text tokens + image tokens seen, head channels / 2] as unit complex numbers. The four
    coordinates of a token are its picture's, its row, its column and its place in the text."""
    text = F.pad(torch.arange(float(num_text))[:, None], (3, 0))
    pictures = [positions_of(one, float(number * BETWEEN_PICTURES)) for number, one in enumerate((grid, *references))]
    positions = torch.cat([text, *pictures]).to(transformer.context_embedder.weight.device)
    cos, sin = transformer.pos_embed(positions)  # each value appears twice, for the real and the imaginary channel
    return torch.complex(cos[:, ::2].contiguous(), sin[:, ::2].contiguous())


def positions_of(grid: Grid, picture: float) -> Tensor:  # [tokens, 4]
    rows, columns = torch.meshgrid(*(torch.arange(float(side)) for side in grid), indexing="ij")
    return torch.stack([torch.full(grid, picture), rows, columns, torch.zeros(grid)], dim=2).flatten(0, 1)


class Flux2DoubleBlock(DoubleBlock):
    def __init__(self, module: Any, image_modulation: Any, text_modulation: Any) -> None:
        super().__init__(module)
        self.image_modulation, self.text_modulation = image_modulation, text_modulation

    @property
    def head_shape(self) -> tuple[int, int]:
        return self.attn.heads, self.attn.head_dim

    @property
    def modulations(self) -> Sequence[nn.Linear]:
        return self.image_modulation.linear, self.text_modulation.linear

    def entries(self, is_text: bool) -> Sequence[EntryLayers]:
        block, attn = self.module, self.attn
        if is_text:
            layers = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
            norms = attn.norm_added_q, attn.norm_added_k
            return [EntryLayers(self.text_modulation.linear, block.norm1_context.eps, layers, *norms)]
        layers = attn.to_q, attn.to_k, attn.to_v
        return [EntryLayers(self.image_modulation.linear, block.norm1.eps, layers, attn.norm_q, attn.norm_k)]

    def exit(self, is_text: bool) -> ExitLayers:
        block, attn = self.module, self.attn
        if is_text:
            return ExitLayers(attn.to_add_out, block.norm2_context.eps, block.ff_context)
        return ExitLayers(attn.to_out[0], block.norm2.eps, block.ff)

    def describe(self) -> BlockShape:
        block, attn = self.module, self.attn
        return BlockShape(
            per_token=products(attn.to_q, attn.to_k, attn.to_v, attn.to_out, block.ff),
            per_text=products(attn.add_q_proj, attn.add_k_proj, attn.add_v_proj, attn.to_add_out, block.ff_context),
            per_rest=products(attn.to_k, attn.to_v),
            per_pair=4 * attn.inner_dim,
            per_branch=0,
            width=attn.inner_dim,
            joint=True,
        )


class Flux2SingleBlock(JointBlock):
    """A block with the same layers for text and image; the feed-forward layer runs beside attention."""

    def __init__(self, module: Any, modulation: Any) -> None:
        super().__init__(module)
        self.modulation = modulation

    @property
    def head_shape(self) -> tuple[int, int]:
        return self.attn.heads, self.attn.head_dim

    @property
    def modulations(self) -> Sequence[nn.Linear]:
        return (self.modulation.linear,)

    def entries(self, is_text: bool) -> Sequence[EntryLayers]:
        attn = self.attn
        layers = (attn.to_qkv_mlp_proj,)
        return [EntryLayers(self.modulation.linear, self.module.norm.eps, layers, attn.norm_q, attn.norm_k)]

    @property
    def joinable(self) -> Sequence[Sequence[nn.Module]]:
        return []

    def __call__(self, flow: Flow, mod: Modulation, layout: Layout, heads: Heads) -> Together:
        joint, owners, width = join(flow, layout).joint, layout.joint_owners, self.attn.inner_dim
        [entry] = self.entries(is_text=False)
        [layer], out = entry.projections, self.attn.to_out
        joint_in, [gate] = modulated(entry, joint, mod, layout.joint_rows, reads_fp8(layer))
        product = linear(layer, joint_in, owners)
        q, k, v, hidden = product.split([width, width, width, product.shape[1] - 3 * width], dim=1)
        place(Projected(q, k, v, entry.norm_q, entry.norm_k), layout.rotary, layout.joint_places, heads)
        both = beside_swiglu(attend(heads, layout), hidden, reads_fp8(out))
        return Together(Residual(joint.total, gate, linear(out, both, owners), layout.joint_rows))

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
        """K and V are columns of the one product."""
        [entry] = self.entries(is_text)
        [layer], width = entry.projections, self.attn.inner_dim
        rows_in, _ = modulated(entry, Residual(rows), mod, owners.index if owners else None, reads_fp8(layer))
        k, v = linear_columns(layer, rows_in, owners, width, 3 * width).split(width, dim=1)
        place(Projected(None, k, v, entry.norm_q, entry.norm_k), rotary, places, Heads(None, keys))

    def describe(self) -> BlockShape:
        attn = self.attn
        per_token = products(attn.to_qkv_mlp_proj, attn.to_out)
        return BlockShape(
            per_token=per_token,
            per_text=per_token,
            per_rest=2 * 2 * attn.inner_dim * attn.query_dim,
            per_pair=4 * attn.inner_dim,
            per_branch=0,
            width=attn.inner_dim,
            joint=True,
        )
