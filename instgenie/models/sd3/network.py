"""Stable Diffusion 3 over packed tokens: the blocks of diffusers' SD3Transformer2DModel, and what lies before and after
them.

Positions are embedded with the image; the text has none, so its order makes no difference.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from instgenie.cost.network import BlockShape
from instgenie.jobs.job import Grid
from instgenie.models.joint.batch import JointBatch
from instgenie.models.joint.block import DoubleBlock, EntryLayers, ExitLayers, JointBlock
from instgenie.models.joint.network import JointNetwork
from instgenie.models.layers.linear import EACH_BRANCH, Owners, call, linear
from instgenie.models.layers.products import products

SECOND = 6  # the output of a modulation layer at which those of the second attention begin


class Sd3Network(JointNetwork):
    @cached_property
    def blocks(self) -> Sequence[JointBlock]:
        return [Sd3Block(block) for block in self.transformer.transformer_blocks]

    @property
    def image_embedder(self) -> nn.Module:
        embedder: nn.Module = self.transformer.pos_embed.proj
        return embedder

    def embed_image(self, batch: JointBatch) -> Tensor:
        assert batch.positions is not None
        table = self.transformer.pos_embed.pos_embed[0]  # [positions, width]
        rows = linear(self.image_embedder, batch.image, batch.layout.image_owners)
        embedded: Tensor = (rows + table[batch.positions]).to(rows.dtype)
        return embedded

    def embed(
        self, sigma: Tensor, guidance: Tensor, pooled: Tensor, dtype: torch.dtype, owners: Owners = EACH_BRANCH
    ) -> Tensor:
        return F.silu(call(self.transformer.time_text_embed, owners, sigma * 1000, pooled))

    def order(self, predicted: Tensor) -> Tensor:
        """The last layer predicts the channels of one latent after those of another."""
        side = self.transformer.config.patch_size
        ordered: Tensor = predicted.unflatten(1, (side * side, -1)).transpose(1, 2).flatten(1)
        return ordered


def find_positions(transformer: SD3Transformer2DModel, grid: Grid, device: torch.device) -> Tensor:
    """Where the tokens of a grid [tokens] lie in the table of positions: in the middle of the largest grid. Made on the
    device, which no copy keeps waiting."""
    side = int(transformer.config.pos_embed_max_size)
    num_rows, num_columns = grid
    top, left = (side - num_rows) // 2, (side - num_columns) // 2
    rows = torch.arange(top, top + num_rows, device=device)
    columns = torch.arange(left, left + num_columns, device=device)
    return (rows[:, None] * side + columns).flatten()


class Sd3Block(DoubleBlock):
    """In some blocks the image also attends to itself alone. The text ends with the last block."""

    @property
    def head_shape(self) -> tuple[int, int]:
        return self.attn.heads, self.attn.inner_dim // self.attn.heads

    @property
    def num_attentions(self) -> int:
        return 1 if self.module.attn2 is None else 2

    @property
    def modulations(self) -> Sequence[nn.Linear]:
        return self.module.norm1.linear, self.module.norm1_context.linear

    def entries(self, is_text: bool) -> Sequence[EntryLayers]:
        block, attn, attn2 = self.module, self.attn, self.module.attn2
        if is_text:
            norm, layers = block.norm1_context, (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            norms = attn.norm_added_q, attn.norm_added_k
            return [EntryLayers(norm.linear, norm.norm.eps, layers, *norms, scale_first=block.context_pre_only)]
        norm, layers = block.norm1, (attn.to_q, attn.to_k, attn.to_v)
        entries = [EntryLayers(norm.linear, norm.norm.eps, layers, attn.norm_q, attn.norm_k)]
        if attn2 is not None:
            layers = attn2.to_q, attn2.to_k, attn2.to_v
            entries.append(EntryLayers(norm.linear, norm.norm.eps, layers, attn2.norm_q, attn2.norm_k, first=SECOND))
        return entries

    def exit(self, is_text: bool) -> ExitLayers | None:
        block, attn = self.module, self.attn
        if not is_text:
            return ExitLayers(attn.to_out[0], block.norm2.eps, block.ff)
        return (
            None if block.context_pre_only else ExitLayers(attn.to_add_out, block.norm2_context.eps, block.ff_context)
        )

    @property
    def second_out(self) -> nn.Module | None:
        attn2 = self.module.attn2
        return None if attn2 is None else attn2.to_out[0]

    def describe(self) -> BlockShape:
        block, attn, attn2 = self.module, self.attn, self.module.attn2
        second = () if attn2 is None else (attn2.to_k, attn2.to_v)
        ends = () if block.context_pre_only else (attn.to_add_out, block.ff_context)
        return BlockShape(
            per_token=products(attn.to_q, attn.to_k, attn.to_v, attn.to_out, block.ff, attn2),
            per_text=products(attn.add_q_proj, attn.add_k_proj, attn.add_v_proj, *ends),
            per_rest=products(attn.to_k, attn.to_v, *second),
            per_pair=4 * attn.inner_dim,
            per_branch=products(block.norm1, block.norm1_context),
            width=attn.inner_dim,
            joint=True,
            num_attentions=self.num_attentions,
        )
