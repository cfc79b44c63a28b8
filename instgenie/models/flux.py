"""Flux over packed tokens: walks the sub-modules of diffusers' FluxTransformer2DModel, block by block.

Knows how a Flux model computes; owns no weights and no state. Linear layers, norms and rotary embedding run over the
tokens of all branches at once; only attention looks at one branch at a time. Modulation is computed once per branch and
spread over that branch's tokens.

A cached block is the same block over fewer tokens: what flows is the layout's matter, and attention reads, behind the
keys of the tokens that flow, those of the tokens that do not.
"""

from collections.abc import Iterator
from typing import TypeAlias

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

from instgenie.activations import Kind
from instgenie.batch import Batch, Job, Layout, concat

Block: TypeAlias = FluxTransformerBlock | FluxSingleTransformerBlock
KeysValues = tuple[Tensor, Tensor]  # K and V, each [tokens, heads, head channels], ready for attention
Rest = list[KeysValues | None]  # of each branch: K and V of its unmasked tokens where they do not flow


def velocity(transformer: FluxTransformer2DModel, batch: Batch) -> Tensor:
    """[image tokens, latent channels]; of the masked tokens alone where a job cached any block."""
    text, image = batch.text, transformer.x_embedder(batch.image)
    time = embed_time(transformer, batch)
    doubles, singles = transformer.transformer_blocks, transformer.single_transformer_blocks
    layout: Layout = batch
    for index, block in enumerate(doubles):
        layout, image = layout.turn(image, index)
        text, image = double_block(block, text, image, time, layout, recall(block, index, layout))
    joint = layout.join(text, image)
    for index, block in enumerate(singles, len(doubles)):
        layout, joint = layout.turn_joint(joint, index)
        joint = single_block(block, joint, time, layout, recall(block, index, layout))
    _, image = layout.part(joint)
    layout, image = layout.turn(image, len(doubles) + len(singles))
    return unembed(transformer, image, time, layout)


def observe(transformer: FluxTransformer2DModel, batch: Batch, kind: Kind) -> Iterator[Tensor]:
    """What activations keep of each block [2 or 1, image tokens, width], from a dense pass."""
    time = embed_time(transformer, batch)
    _, rotary = batch.part(batch.rotary)
    for block, image in walk(transformer, batch, time):
        if kind == "y":
            yield image[None]
        else:
            yield torch.stack(keys_values(block, image, time, rotary, batch.image_rows)).flatten(2)


def walk(transformer: FluxTransformer2DModel, batch: Batch, time: Tensor) -> Iterator[tuple[Block, Tensor]]:
    """Every block and the image rows that go into it, all dense."""
    dense: Rest = [None] * len(batch.num_image)
    text, image = batch.text, transformer.x_embedder(batch.image)
    for block in transformer.transformer_blocks:
        yield block, image
        text, image = double_block(block, text, image, time, batch, dense)
    joint = batch.join(text, image)
    for block in transformer.single_transformer_blocks:
        yield block, batch.part(joint)[1]
        joint = single_block(block, joint, time, batch, dense)


def num_blocks(transformer: FluxTransformer2DModel) -> int:
    return len(transformer.transformer_blocks) + len(transformer.single_transformer_blocks)


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
    positions = torch.zeros(num_text + num_rows * num_columns, 3, device=transformer.context_embedder.weight.device)
    positions[num_text:, 1] = torch.arange(num_rows).repeat_interleave(num_columns)
    positions[num_text:, 2] = torch.arange(num_columns).repeat(num_rows)
    cos, sin = transformer.pos_embed(positions)  # each value stands twice, for the real and the imaginary channel
    return torch.complex(cos[:, ::2].contiguous(), sin[:, ::2].contiguous())


def double_block(
    block: FluxTransformerBlock, text: Tensor, image: Tensor, time: Tensor, layout: Layout, rest: Rest
) -> tuple[Tensor, Tensor]:
    attn = block.attn
    text_mod = modulation(block.norm1_context, time, layout.text_rows)
    image_mod = modulation(block.norm1, time, layout.image_rows)
    text_in = modulate(block.norm1_context.norm(text), *text_mod[:2])
    image_in = modulate(block.norm1.norm(image), *image_mod[:2])

    q = layout.join(
        heads(attn, attn.add_q_proj, text_in, attn.norm_added_q), heads(attn, attn.to_q, image_in, attn.norm_q)
    )
    k = layout.join(
        heads(attn, attn.add_k_proj, text_in, attn.norm_added_k), heads(attn, attn.to_k, image_in, attn.norm_k)
    )
    v = layout.join(heads(attn, attn.add_v_proj, text_in), heads(attn, attn.to_v, image_in))
    text_out, image_out = layout.part(attend(q, k, v, layout, rest))

    text = feed_forward(block.norm2_context, block.ff_context, text, attn.to_add_out(text_out), text_mod[2:])
    image = feed_forward(block.norm2, block.ff, image, attn.to_out[0](image_out), image_mod[2:])
    return text, image


def single_block(block: FluxSingleTransformerBlock, joint: Tensor, time: Tensor, layout: Layout, rest: Rest) -> Tensor:
    attn = block.attn
    shift, scale, gate = modulation(block.norm, time, layout.joint_rows)
    joint_in = modulate(block.norm.norm(joint), shift, scale)

    q = heads(attn, attn.to_q, joint_in, attn.norm_q)
    k = heads(attn, attn.to_k, joint_in, attn.norm_k)
    v = heads(attn, attn.to_v, joint_in)
    hidden = block.act_mlp(block.proj_mlp(joint_in))
    out = block.proj_out(torch.cat([attend(q, k, v, layout, rest), hidden], dim=1))
    return torch.addcmul(joint, gate, out)


def recall(block: Block, index: int, layout: Layout) -> Rest:
    """Both branches of a job read the same: a template is registered once, with the empty prompt."""
    recalled = [
        recall_one(block, index, job) if cached else None
        for job, cached in zip(layout.jobs, layout.cached, strict=True)
    ]
    return [rest for job, rest in zip(layout.jobs, recalled, strict=True) for _ in job.branches]


def recall_one(block: Block, index: int, job: Job) -> KeysValues:
    """K and V of a job's unmasked tokens: as they are, or projected from Y as they would have been at registration."""
    assert job.activations is not None
    rows = job.recall(index).index_select(1, job.outside)  # [2 or 1, unmasked tokens, width]
    if job.activations.kind == "kv":
        k, v = rows.unflatten(-1, (-1, block.attn.head_dim))
        return k, v
    return keys_values(block, rows[0], job.activations.time[job.step, None], job.outside_rotary)


def keys_values(
    block: Block, image: Tensor, time: Tensor, rotary: Tensor, image_rows: Tensor | None = None
) -> KeysValues:
    """K and V of image rows that go into a block; a lone branch needs no rows."""
    attn = block.attn
    norm = block.norm1 if hasattr(block, "norm1") else block.norm  # of a double, of a single block
    shift, scale, *_ = modulation(norm, time, image_rows)
    image_in = modulate(norm.norm(image), shift, scale)
    return rotate(heads(attn, attn.to_k, image_in, attn.norm_k), rotary), heads(attn, attn.to_v, image_in)


def unembed(transformer: FluxTransformer2DModel, image: Tensor, time: Tensor, layout: Layout) -> Tensor:
    scale, shift = modulation(transformer.norm_out, time, layout.image_rows)
    out: Tensor = transformer.proj_out(modulate(transformer.norm_out.norm(image), shift, scale))
    return out


def feed_forward(norm: nn.Module, ff: nn.Module, x: Tensor, attended: Tensor, mod: tuple[Tensor, ...]) -> Tensor:
    gate_attended, shift, scale, gate = mod
    x = torch.addcmul(x, gate_attended, attended)
    return torch.addcmul(x, gate, ff(modulate(norm(x), shift, scale)))


def modulation(norm: AdaLayerNormZero, time: Tensor, rows: Tensor | None) -> tuple[Tensor, ...]:
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


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, rest: Rest) -> Tensor:  # [joint tokens, width]
    parts = (x.split(layout.num_joint) for x in (rotate(q, layout.rotary), rotate(k, layout.rotary), v))
    return concat([attend_one(q, *append(k, v, more)) for q, k, v, more in zip(*parts, rest, strict=True)])


def append(k: Tensor, v: Tensor, rest: KeysValues | None) -> KeysValues:
    """Attention does not care about the order of keys: text, masked, unmasked."""
    return (torch.cat([k, rest[0]]), torch.cat([v, rest[1]])) if rest else (k, v)


def attend_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [tokens, heads, head channels] -> [tokens, width]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turns neighbouring channels, as real and imaginary part, by each token's angles."""
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * rotary[:, None]
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)
