"""Flux over packed tokens: the blocks of diffusers' FluxTransformer2DModel, and what lies before and after them."""

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn

from instgenie.cost.network import BlockShape
from instgenie.kernels.gelu import beside_gelu
from instgenie.kernels.heads import Heads, Projected, place
from instgenie.models.joint.batch import JointBatch
from instgenie.models.joint.block import DoubleBlock, Entry, Exit, JointBlock, attend, modulated
from instgenie.models.joint.flow import Flow, Together, join
from instgenie.models.joint.layout import Layout
from instgenie.models.joint.modulation import Modulation
from instgenie.models.joint.network import JointNetwork
from instgenie.models.joint.residual import Residual
from instgenie.models.layers.fp8_linear import reads_fp8
from instgenie.models.layers.linear import linear, linears
from instgenie.models.layers.products import products


class FluxNetwork(JointNetwork):
    @cached_property
    def blocks(self) -> Sequence[JointBlock]:
        doubles = map(FluxDoubleBlock, self.transformer.transformer_blocks)
        return [*doubles, *map(FluxSingleBlock, self.transformer.single_transformer_blocks)]

    @property
    def image_embedder(self) -> nn.Module:
        embedder: nn.Module = self.transformer.x_embedder
        return embedder

    def embed_image(self, batch: JointBatch) -> Tensor:
        return linear(self.image_embedder, batch.image, batch.layout.image_owners)

    def embed(self, sigma: Tensor, guidance: Tensor, pooled: Tensor, dtype: torch.dtype) -> Tensor:
        timestep = (sigma * 1000).to(dtype) / 1000 * 1000  # scaled back and forth, to round as the stock pipeline does
        columns = [timestep, guidance.to(dtype) * 1000] if self.transformer.config.guidance_embeds else [timestep]
        return F.silu(self.transformer.time_text_embed(*columns, pooled))


def embed_positions(transformer: FluxTransformer2DModel, num_text: int, grid: tuple[int, int]) -> Tensor:
    """Rotary table of one branch [text tokens + image tokens, head channels / 2] as unit complex numbers."""
    num_rows, num_columns = grid
    positions = torch.zeros(num_text + num_rows * num_columns, 3, device=transformer.context_embedder.weight.device)
    positions[num_text:, 1] = torch.arange(num_rows).repeat_interleave(num_columns)
    positions[num_text:, 2] = torch.arange(num_columns).repeat(num_rows)
    cos, sin = transformer.pos_embed(positions)  # each value appears twice, for the real and the imaginary channel
    return torch.complex(cos[:, ::2].contiguous(), sin[:, ::2].contiguous())


class FluxDoubleBlock(DoubleBlock):
    @property
    def head_shape(self) -> tuple[int, int]:
        return self.attn.heads, self.attn.head_dim

    def entries(self, is_text: bool) -> Sequence[Entry]:
        block, attn = self.module, self.attn
        if is_text:
            norm, layers = block.norm1_context, (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            return [Entry(norm.linear, norm.norm.eps, layers, attn.norm_added_q, attn.norm_added_k)]
        norm, layers = block.norm1, (attn.to_q, attn.to_k, attn.to_v)
        return [Entry(norm.linear, norm.norm.eps, layers, attn.norm_q, attn.norm_k)]

    def exit(self, is_text: bool) -> Exit:
        block, attn = self.module, self.attn
        if is_text:
            return Exit(attn.to_add_out, block.norm2_context.eps, block.ff_context)
        return Exit(attn.to_out[0], block.norm2.eps, block.ff)

    def describe(self) -> BlockShape:
        block, attn = self.module, self.attn
        return BlockShape(
            per_token=products(attn.to_q, attn.to_k, attn.to_v, attn.to_out, block.ff),
            per_text=products(attn.add_q_proj, attn.add_k_proj, attn.add_v_proj, attn.to_add_out, block.ff_context),
            per_rest=products(attn.to_k, attn.to_v),
            per_pair=4 * attn.inner_dim,
            per_branch=products(block.norm1, block.norm1_context),
            width=attn.inner_dim,
            joint=True,
        )


class FluxSingleBlock(JointBlock):
    """A block with the same layers for text and image; the feed-forward layer runs beside attention."""

    @property
    def head_shape(self) -> tuple[int, int]:
        return self.attn.heads, self.attn.head_dim

    def entries(self, is_text: bool) -> Sequence[Entry]:
        norm, attn = self.module.norm, self.attn
        layers = (attn.to_q, attn.to_k, attn.to_v, self.module.proj_mlp)
        return [Entry(norm.linear, norm.norm.eps, layers, attn.norm_q, attn.norm_k)]

    @property
    def joinable(self) -> Sequence[Sequence[nn.Module]]:
        return [self.entries(is_text=False)[0].projections]

    def __call__(self, flow: Flow, mod: Modulation, layout: Layout, heads: Heads) -> Together:
        joint, owners = join(flow, layout).joint, layout.joint_owners
        [entry] = self.entries(is_text=False)
        joint_in, [gate] = modulated(entry, joint, mod, layout.joint_rows, reads_fp8(entry.projections[0]))
        q, k, v, hidden = linears(entry.projections, joint_in, owners)
        place(Projected(q, k, v, entry.norm_q, entry.norm_k), layout.rotary, layout.joint_places, heads)
        out = self.module.proj_out
        both = beside_gelu(attend(heads, layout), hidden, reads_fp8(out))
        return Together(Residual(joint.total, gate, linear(out, both, owners), layout.joint_rows))

    def describe(self) -> BlockShape:
        block, attn = self.module, self.attn
        per_token = products(attn.to_q, attn.to_k, attn.to_v, block.proj_mlp, block.proj_out)
        return BlockShape(
            per_token=per_token,
            per_text=per_token,
            per_rest=products(attn.to_k, attn.to_v),
            per_pair=4 * attn.inner_dim,
            per_branch=products(block.norm),
            width=attn.inner_dim,
            joint=True,
        )
