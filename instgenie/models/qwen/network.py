"""Qwen-Image over packed tokens: the blocks of diffusers' QwenImageTransformer2DModel, and what lies before and after
them."""

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from instgenie.cost.network import BlockShape
from instgenie.models.joint.batch import JointBatch
from instgenie.models.joint.block import DoubleBlock, EntryLayers, ExitLayers, JointBlock
from instgenie.models.joint.network import JointNetwork
from instgenie.models.layers.linear import EACH_BRANCH, Owners, call, linear
from instgenie.models.layers.products import products


class QwenNetwork(JointNetwork):
    @cached_property
    def blocks(self) -> Sequence[JointBlock]:
        return [QwenBlock(block) for block in self.transformer.transformer_blocks]

    @property
    def clean_references(self) -> bool:
        return bool(self.transformer.config.get("zero_cond_t"))

    @property
    def image_embedder(self) -> nn.Module:
        embedder: nn.Module = self.transformer.img_in
        return embedder

    def embed_image(self, batch: JointBatch) -> Tensor:
        return linear(self.image_embedder, batch.image, batch.layout.image_owners)

    def embed_prompt(self, sequence: Tensor) -> Tensor:
        normed = self.transformer.txt_norm(sequence)
        return linear(self.transformer.txt_in, normed, Owners(per_branch=len(sequence)))

    def embed(
        self, sigma: Tensor, guidance: Tensor, pooled: Tensor, dtype: torch.dtype, owners: Owners = EACH_BRANCH
    ) -> Tensor:
        timestep = (sigma * 1000).to(dtype) / 1000  # scaled back and forth, to round as the stock pipeline does
        waves = self.transformer.time_text_embed.time_proj(timestep).to(dtype)
        return F.silu(call(self.transformer.time_text_embed.timestep_embedder, owners, waves))


class QwenBlock(DoubleBlock):
    @property
    def head_shape(self) -> tuple[int, int]:
        return self.attn.heads, self.attn.inner_dim // self.attn.heads

    @property
    def modulations(self) -> Sequence[nn.Linear]:
        return self.module.img_mod[1], self.module.txt_mod[1]

    def entries(self, is_text: bool) -> Sequence[EntryLayers]:
        block, attn = self.module, self.attn
        if is_text:
            layers, norms = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj), (attn.norm_added_q, attn.norm_added_k)
            return [EntryLayers(block.txt_mod[1], block.txt_norm1.eps, layers, *norms)]
        layers = attn.to_q, attn.to_k, attn.to_v
        return [EntryLayers(block.img_mod[1], block.img_norm1.eps, layers, attn.norm_q, attn.norm_k)]

    def exit(self, is_text: bool) -> ExitLayers:
        block, attn = self.module, self.attn
        if is_text:
            return ExitLayers(attn.to_add_out, block.txt_norm2.eps, block.txt_mlp)
        return ExitLayers(attn.to_out[0], block.img_norm2.eps, block.img_mlp)

    def describe(self) -> BlockShape:
        block, attn = self.module, self.attn
        return BlockShape(
            per_token=products(attn.to_q, attn.to_k, attn.to_v, attn.to_out, block.img_mlp),
            per_text=products(attn.add_q_proj, attn.add_k_proj, attn.add_v_proj, attn.to_add_out, block.txt_mlp),
            per_rest=products(attn.to_k, attn.to_v),
            per_pair=4 * attn.inner_dim,
            per_branch=products(block.img_mod, block.txt_mod),
            width=attn.inner_dim,
            joint=True,
        )
