"""Flux over packed tokens: the blocks of diffusers' FluxTransformer2DModel, and what lies before and after them."""

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn

from instgenie.cost.network import BlockShape
from instgenie.jobs.job import Grid
from instgenie.kernels.gelu import beside_gelu
from instgenie.kernels.heads import Heads, Projected, place
from instgenie.models.joint.batch import JointBatch
from instgenie.models.joint.block import DoubleBlock, EntryLayers, ExitLayers, JointBlock, attend, modulated
from instgenie.models.joint.flow import Flow, Together, join
from instgenie.models.joint.layout import Layout
from instgenie.models.joint.modulation import Modulation
from instgenie.models.joint.network import JointNetwork
from instgenie.models.joint.residual import Residual
from instgenie.models.layers.fp8_linear import reads_fp8
from instgenie.models.layers.linear import EACH_BRANCH, Owners, call, linear, linears
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

    def embed(
        self, sigma: Tensor, guidance: Tensor, pooled: Tensor, dtype: torch.dtype, owners: Owners = EACH_BRANCH
    ) -> Tensor:
        timestep = (sigma * 1000).to(dtype) / 1000 * 1000  # scaled back and forth, to round as the stock pipeline does
        columns = [timestep, guidance.to(dtype) * 1000] if self.transformer.config.guidance_embeds else [timestep]
        return F.silu(call(self.transformer.time_text_embed, owners, *columns, pooled))


def embed_positions(
    transformer: FluxTransformer2DModel, num_text: int, grid: Grid, references: Sequence[Grid] = ()
) -> Tensor:
    """Rotary table of one branch [text tokens + image tokens seen, head channels / 2] as unit complex numbers. The
    tokens of references have the number 1 before their row and column, those of the picture 0."""
    pictures = [positions_of(one, float(number > 0)) for number, one in enumerate((grid, *references))]
    positions = torch.cat([torch.zeros(num_text, 3), *pictures]).to(transformer.context_embedder.weight.device)
    cos, sin = transformer.pos_embed(positions)  # each value appears twice, for the real and the imaginary channel
    return torch.complex(cos[:, ::2].contiguous(), sin[:, ::2].contiguous())


def positions_of(grid: Grid, number: float) -> Tensor:  # [tokens, 3]
    rows, columns = torch.meshgrid(*(torch.arange(float(side)) for side in grid), indexing="ij")
    return torch.stack([torch.full(grid, number), rows, columns], dim=2).flatten(0, 1)


class FluxDoubleBlock(DoubleBlock):
    @property
    def head_shape(self) -> tuple[int, int]:
        return self.attn.heads, self.attn.head_dim

    @property
    def modulations(self) -> Sequence[nn.Linear]:
        return self.module.norm1.linear, self.module.norm1_context.linear

    def entries(self, is_text: bool) -> Sequence[EntryLayers]:
        block, attn = self.module, self.attn
        if is_text:
            norm, layers = block.norm1_context, (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            return [EntryLayers(norm.linear, norm.norm.eps, layers, attn.norm_added_q, attn.norm_added_k)]
        norm, layers = block.norm1, (attn.to_q, attn.to_k, attn.to_v)
        return [EntryLayers(norm.linear, norm.norm.eps, layers, attn.norm_q, attn.norm_k)]

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
            per_branch=products(block.norm1, block.norm1_context),
            width=attn.inner_dim,
            joint=True,
        )


class FluxSingleBlock(JointBlock):
    """A block with the same layers for text and image; the feed-forward layer runs beside attention."""

    @property
    def head_shape(self) -> tuple[int, int]:
        return self.attn.heads, self.attn.head_dim

    @property
    def modulations(self) -> Sequence[nn.Linear]:
        return (self.module.norm.linear,)

    def entries(self, is_text: bool) -> Sequence[EntryLayers]:
        norm, attn = self.module.norm, self.attn
        layers = (attn.to_q, attn.to_k, attn.to_v, self.module.proj_mlp)
        return [EntryLayers(norm.linear, norm.norm.eps, layers, attn.norm_q, attn.norm_k)]

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
