"""Flux over packed tokens: walks the sub-modules of diffusers' FluxTransformer2DModel, block by block.

Knows how a Flux model computes; owns no weights and no state. Linear layers, norms and rotary embedding run over the
tokens of all branches at once; only attention looks at one branch at a time. Modulation is computed once per branch and
spread over that branch's tokens.
"""

import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from diffusers.models.normalization import AdaLayerNormZero
from diffusers.models.transformers.transformer_flux import (
    FluxAttention,
    FluxSingleTransformerBlock,
    FluxTransformerBlock,
)
from torch import Tensor, nn

from instgenie.batch import Batch, concat


def velocity(transformer: FluxTransformer2DModel, batch: Batch) -> Tensor:  # [image tokens, latent channels]
    image = transformer.x_embedder(batch.image)
    text = batch.text
    time = embed_time(transformer, batch)
    for block in transformer.transformer_blocks:
        text, image = double_block(block, text, image, time, batch)
    joint = batch.join(text, image)
    for block in transformer.single_transformer_blocks:
        joint = single_block(block, joint, time, batch)
    _, image = batch.part(joint)
    return unembed(transformer, image, time, batch)


def embed_prompt(transformer: FluxTransformer2DModel, sequence: Tensor) -> Tensor:  # [text tokens, width]
    embedded: Tensor = transformer.context_embedder(sequence)
    return embedded


def embed_time(transformer: FluxTransformer2DModel, batch: Batch) -> Tensor:  # [branches, width]
    dtype = batch.text.dtype
    timestep = (batch.sigma * 1000).to(dtype) / 1000 * 1000  # there and back, to round as the stock pipeline does
    columns = [timestep, batch.guidance.to(dtype) * 1000] if transformer.config.guidance_embeds else [timestep]
    embedded: Tensor = transformer.time_text_embed(*columns, batch.pooled)
    return embedded


def embed_positions(transformer: FluxTransformer2DModel, num_text: int, grid: tuple[int, int]) -> Tensor:
    """Rotary table of one branch [text tokens + image tokens, head channels / 2] as unit complex numbers."""
    num_rows, num_columns = grid
    positions = torch.zeros(num_text + num_rows * num_columns, 3, device=transformer.device)
    positions[num_text:, 1] = torch.arange(num_rows).repeat_interleave(num_columns)
    positions[num_text:, 2] = torch.arange(num_columns).repeat(num_rows)
    cos, sin = transformer.pos_embed(positions)  # each value stands twice, for the real and the imaginary channel
    return torch.complex(cos[:, ::2].contiguous(), sin[:, ::2].contiguous())


def double_block(
    block: FluxTransformerBlock, text: Tensor, image: Tensor, time: Tensor, batch: Batch
) -> tuple[Tensor, Tensor]:
    attn = block.attn
    text_mod = modulation(block.norm1_context, time, batch.text_rows)
    image_mod = modulation(block.norm1, time, batch.image_rows)
    text_in = modulate(block.norm1_context.norm(text), *text_mod[:2])
    image_in = modulate(block.norm1.norm(image), *image_mod[:2])

    q = batch.join(
        heads(attn, attn.add_q_proj, text_in, attn.norm_added_q), heads(attn, attn.to_q, image_in, attn.norm_q)
    )
    k = batch.join(
        heads(attn, attn.add_k_proj, text_in, attn.norm_added_k), heads(attn, attn.to_k, image_in, attn.norm_k)
    )
    v = batch.join(heads(attn, attn.add_v_proj, text_in), heads(attn, attn.to_v, image_in))
    text_out, image_out = batch.part(attend(q, k, v, batch))

    text = feed_forward(block.norm2_context, block.ff_context, text, attn.to_add_out(text_out), text_mod[2:])
    image = feed_forward(block.norm2, block.ff, image, attn.to_out[0](image_out), image_mod[2:])
    return text, image


def single_block(block: FluxSingleTransformerBlock, joint: Tensor, time: Tensor, batch: Batch) -> Tensor:
    attn = block.attn
    shift, scale, gate = modulation(block.norm, time, batch.joint_rows)
    joint_in = modulate(block.norm.norm(joint), shift, scale)

    q = heads(attn, attn.to_q, joint_in, attn.norm_q)
    k = heads(attn, attn.to_k, joint_in, attn.norm_k)
    v = heads(attn, attn.to_v, joint_in)
    hidden = block.act_mlp(block.proj_mlp(joint_in))
    out = block.proj_out(torch.cat([attend(q, k, v, batch), hidden], dim=1))
    return torch.addcmul(joint, gate, out)


def unembed(transformer: FluxTransformer2DModel, image: Tensor, time: Tensor, batch: Batch) -> Tensor:
    scale, shift = modulation(transformer.norm_out, time, batch.image_rows)
    out: Tensor = transformer.proj_out(modulate(transformer.norm_out.norm(image), shift, scale))
    return out


def feed_forward(norm: nn.Module, ff: nn.Module, x: Tensor, attended: Tensor, mod: tuple[Tensor, ...]) -> Tensor:
    gate_attended, shift, scale, gate = mod
    x = torch.addcmul(x, gate_attended, attended)
    return torch.addcmul(x, gate, ff(modulate(norm(x), shift, scale)))


def modulation(norm: AdaLayerNormZero, time: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    """Shifts, scales and gates of a block, each [tokens, width], or [1, width] to broadcast over a lone branch."""
    columns: Tensor = norm.linear(norm.silu(time))  # [branches, k * width]
    spread = columns if len(columns) == 1 else columns[rows]
    return tuple(spread.split(time.shape[1], dim=1))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return torch.addcmul(shift, x, 1 + scale)


def heads(attn: FluxAttention, project: nn.Module, x: Tensor, norm: nn.Module | None = None) -> Tensor:
    """[tokens, width] -> [tokens, heads, head channels]"""
    split: Tensor = project(x).unflatten(-1, (-1, attn.head_dim))
    return norm(split) if norm else split


def attend(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:  # [joint tokens, width]
    parts = (x.split(batch.num_joint) for x in (rotate(q, batch.rotary), rotate(k, batch.rotary), v))
    return concat([attend_one(*branch) for branch in zip(*parts, strict=True)])


def attend_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [tokens, heads, head channels] -> [tokens, width]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turns neighbouring channels, as real and imaginary part, by each token's angles."""
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * rotary[:, None]
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)
