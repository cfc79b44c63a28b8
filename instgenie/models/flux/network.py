"""Flux over packed tokens: walks the sub-modules of diffusers' FluxTransformer2DModel, block by block.

Knows how a Flux model computes; owns no weights and no state. Linear layers, norms and rotary embedding run over the
tokens of all branches at once; only attention looks at one branch at a time. Modulation is computed once per branch and
read by that branch's tokens.

A cached block is the same block over fewer tokens: what flows is the layout's matter, and attention reads keys of all
tokens, each at its own place. Those of tokens that do not flow are written first, then those that do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from diffusers.models.normalization import AdaLayerNormZero
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from torch import Tensor, nn

from instgenie.cost.network import BlockShape, NetworkShape
from instgenie.jobs.activations import Kind
from instgenie.jobs.job import Batch, Layout
from instgenie.kernels.addresses import RowSource
from instgenie.kernels.gather import gather_rows
from instgenie.kernels.gelu import gelu_into
from instgenie.kernels.heads import HeadPlaces, Heads, Projected, place
from instgenie.kernels.modulate import add_gated, add_norm_modulate, norm_modulate
from instgenie.models.layers.products import products

Block: TypeAlias = FluxTransformerBlock | FluxSingleTransformerBlock


def velocity(transformer: FluxTransformer2DModel, batch: Batch) -> Tensor:
    """[image tokens, latent channels]; of the masked tokens alone where a job cached any block."""
    time = embed_time(transformer, batch)
    layout, image = flow(transformer, batch, transformer.x_embedder(batch.image), time)
    return unembed(transformer, image, time, layout)


def flow(transformer: FluxTransformer2DModel, batch: Batch, image: Tensor, time: Tensor) -> tuple[Layout, Tensor]:
    """Embedded image rows through all blocks."""
    text = batch.text
    doubles, singles = transformer.transformer_blocks, transformer.single_transformer_blocks
    layout = batch.layout
    for index, block in enumerate(doubles):
        layout, image = batch.turn(layout, image, index)
        text, image = double_block(block, text, image, time, layout, recall(block, index, batch, layout))
    joint = layout.join(text, image)
    for index, block in enumerate(singles, len(doubles)):
        layout, joint = batch.turn_joint(layout, joint, index)
        joint = single_block(block, joint, time, layout, recall(block, index, batch, layout))
    _, image = layout.part(joint.split(layout.num_joint))
    return batch.turn(layout, image, len(doubles) + len(singles))


def observe(transformer: FluxTransformer2DModel, batch: Batch, kind: Kind) -> Iterator[Tensor]:
    """What activations keep of each block [2 or 1, image tokens, width], from a dense pass."""
    time, layout = embed_time(transformer, batch), batch.layout
    _, rotary = layout.part(layout.rotary.split(layout.num_joint))
    for block, image in walk(transformer, batch, time):
        if kind == "y":
            yield image[None]
        else:
            keys = reserve_keys(block, len(image), image)
            project_keys(block, image, time, rotary, layout.image_rows, keys)
            yield keys.flatten(2)


def walk(transformer: FluxTransformer2DModel, batch: Batch, time: Tensor) -> Iterator[tuple[Block, Tensor]]:
    """Every block and the image rows that go into it, all dense."""
    layout = batch.layout
    text, image = batch.text, transformer.x_embedder(batch.image)
    for block in transformer.transformer_blocks:
        yield block, image
        text, image = double_block(block, text, image, time, layout, reserve(block, layout, text))
    joint = layout.join(text, image)
    for block in transformer.single_transformer_blocks:
        yield block, layout.part(joint.split(layout.num_joint))[1]
        joint = single_block(block, joint, time, layout, reserve(block, layout, joint))


def num_blocks(transformer: FluxTransformer2DModel) -> int:
    return len(transformer.transformer_blocks) + len(transformer.single_transformer_blocks)


def embed_prompt(transformer: FluxTransformer2DModel, sequence: Tensor) -> Tensor:  # [text tokens, width]
    embedded: Tensor = transformer.context_embedder(sequence)
    return embedded


def embed_time(transformer: FluxTransformer2DModel, batch: Batch) -> Tensor:
    """What modulates every block [branches, width]: as it goes into their linear layers."""
    dtype = batch.text.dtype
    timestep = (batch.sigma * 1000).to(dtype) / 1000 * 1000  # there and back, to round as the stock pipeline does
    columns = [timestep, batch.guidance.to(dtype) * 1000] if transformer.config.guidance_embeds else [timestep]
    return F.silu(transformer.time_text_embed(*columns, batch.pooled))


def embed_positions(transformer: FluxTransformer2DModel, num_text: int, grid: tuple[int, int]) -> Tensor:
    """Rotary table of one branch [text tokens + image tokens, head channels / 2] as unit complex numbers."""
    num_rows, num_columns = grid
    positions = torch.zeros(num_text + num_rows * num_columns, 3, device=transformer.context_embedder.weight.device)
    positions[num_text:, 1] = torch.arange(num_rows).repeat_interleave(num_columns)
    positions[num_text:, 2] = torch.arange(num_columns).repeat(num_rows)
    cos, sin = transformer.pos_embed(positions)  # each value stands twice, for the real and the imaginary channel
    return torch.complex(cos[:, ::2].contiguous(), sin[:, ::2].contiguous())


def double_block(
    block: FluxTransformerBlock, text: Tensor, image: Tensor, time: Tensor, layout: Layout, heads: Heads
) -> tuple[Tensor, Tensor]:
    attn, text_rows, image_rows = block.attn, layout.text_rows, layout.image_rows
    text_in, text_mod = modulated(block.norm1_context, text, time, text_rows)
    image_in, image_mod = modulated(block.norm1, image, time, image_rows)

    added = attn.add_q_proj(text_in), attn.add_k_proj(text_in), attn.add_v_proj(text_in)
    place(Projected(*added, attn.norm_added_q, attn.norm_added_k), layout.rotary, layout.text_places, heads)
    own = attn.to_q(image_in), attn.to_k(image_in), attn.to_v(image_in)
    place(Projected(*own, attn.norm_q, attn.norm_k), layout.rotary, layout.image_places, heads)
    text_out, image_out = layout.part(attend(heads, layout))

    text = feed_forward(block.norm2_context, block.ff_context, text, attn.to_add_out(text_out), text_mod, text_rows)
    image = feed_forward(block.norm2, block.ff, image, attn.to_out[0](image_out), image_mod, image_rows)
    return text, image


def single_block(
    block: FluxSingleTransformerBlock, joint: Tensor, time: Tensor, layout: Layout, heads: Heads
) -> Tensor:
    attn, rows, width = block.attn, layout.joint_rows, joint.shape[1]
    joint_in, [gate] = modulated(block.norm, joint, time, rows)

    own = attn.to_q(joint_in), attn.to_k(joint_in), attn.to_v(joint_in)
    place(Projected(*own, attn.norm_q, attn.norm_k), layout.rotary, layout.joint_places, heads)
    both = joint.new_empty(len(joint), block.proj_out.in_features)  # attended, then hidden
    torch.cat(attend(heads, layout), out=both[:, :width])
    gelu_into(block.proj_mlp(joint_in), both[:, width:])
    return add_gated(joint, gate, block.proj_out(both), rows)


def unembed(transformer: FluxTransformer2DModel, image: Tensor, time: Tensor, layout: Layout) -> Tensor:
    norm = transformer.norm_out
    scale, shift = norm.linear(time).chunk(2, dim=1)
    out: Tensor = transformer.proj_out(norm_modulate(image, shift, scale, layout.image_rows, norm.norm.eps))
    return out


def modulated(norm: AdaLayerNormZero, x: Tensor, time: Tensor, rows: Tensor | None) -> tuple[Tensor, Sequence[Tensor]]:
    """What goes into a block, and the columns [branches, width] of what follows in it; a lone branch needs no rows."""
    shift, scale, *others = norm.linear(time).split(x.shape[1], dim=1)
    return norm_modulate(x, shift, scale, rows, norm.norm.eps), others


def feed_forward(
    norm: nn.LayerNorm, ff: nn.Module, x: Tensor, attended: Tensor, mod: Sequence[Tensor], rows: Tensor
) -> Tensor:
    gate_attended, shift, scale, gate = mod
    x, inner = add_norm_modulate(x, gate_attended, attended, shift, scale, rows, norm.eps)
    return add_gated(x, gate, ff(inner), rows)


def recall(block: Block, index: int, batch: Batch, layout: Layout) -> Heads:
    """Heads that hold K and V of the tokens that do not flow. Both branches of a job read the same: a template is
    registered once, with the empty prompt."""
    heads = reserve(block, layout, batch.text)
    if not any(layout.cached):
        return heads
    sources = batch.rows.at(index, layout.cached)
    for job, (cached, images) in enumerate(zip(layout.cached, layout.images, strict=True)):
        if cached:
            first, *others = (heads.keys[:, image] for image in images)
            recall_one(block, batch, job, sources[job], first)
            for other in others:
                other.copy_(first)
    return heads


def recall_one(block: Block, batch: Batch, job: int, source: RowSource, keys: Tensor) -> None:
    """K and V [2, image tokens, heads, head channels] of a job's tokens that do not flow, each at its place: as they
    are, or projected from Y as they would have been at registration."""
    assert source is not None
    rest, num_all = batch.shapes[job].rest, batch.shapes[job].num_all
    if batch.kinds[job] == "kv":
        gather_rows(source, rest, num_all, keys.flatten(2), rest)
        return
    assert batch.template is not None
    y = keys.new_empty(1, len(rest), keys.shape[2] * keys.shape[3])
    gather_rows(source, rest, num_all, y)
    time, rotary = batch.template.time[job, None], batch.template.rotary[job]
    project_keys(block, y[0], time, rotary, None, keys, HeadPlaces(joint=rest, keys=rest))


def project_keys(
    block: Block,
    image: Tensor,
    time: Tensor,
    rotary: Tensor,
    image_rows: Tensor | None,
    keys: Tensor,
    places: HeadPlaces | None = None,
) -> None:
    """Writes K and V [2, image tokens, heads, head channels] of image rows that go into a block."""
    attn = block.attn
    norm = block.norm1 if hasattr(block, "norm1") else block.norm  # of a double, of a single block
    image_in, _ = modulated(norm, image, time, image_rows)
    projected = Projected(None, attn.to_k(image_in), attn.to_v(image_in), attn.norm_q, attn.norm_k)
    place(projected, rotary, places, Heads(None, keys))


def reserve(block: Block, layout: Layout, like: Tensor) -> Heads:
    attn = block.attn
    q = like.new_empty(sum(layout.num_joint), attn.heads, attn.head_dim)
    return Heads(q, reserve_keys(block, sum(layout.num_keys), like))


def reserve_keys(block: Block, num_keys: int, like: Tensor) -> Tensor:
    return like.new_empty(2, num_keys, block.attn.heads, block.attn.head_dim)


def attend(heads: Heads, layout: Layout) -> list[Tensor]:
    """Of each branch [joint tokens, width]"""
    assert heads.q is not None
    k, v = heads.keys
    parts = zip(heads.q.split(layout.num_joint), k.split(layout.num_keys), v.split(layout.num_keys), strict=True)
    return [attend_one(*part) for part in parts]


def attend_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [tokens, heads, head channels] -> [tokens, width]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)


def describe(transformer: FluxTransformer2DModel) -> NetworkShape:
    """What embeds tokens counts with the first block, what makes velocities of them with the last."""
    doubles = [describe_double(block) for block in transformer.transformer_blocks]
    blocks = [*doubles, *(describe_single(block) for block in transformer.single_transformer_blocks)]
    blocks[0] = replace(blocks[0], per_token=blocks[0].per_token + products(transformer.x_embedder))
    blocks[-1] = replace(blocks[-1], per_token=blocks[-1].per_token + products(transformer.proj_out))
    per_branch = products(transformer.time_text_embed, transformer.norm_out)
    return NetworkShape(tuple(blocks), (len(blocks),), per_token=0, per_branch=per_branch)


def describe_double(block: FluxTransformerBlock) -> BlockShape:
    attn = block.attn
    return BlockShape(
        per_token=products(attn.to_q, attn.to_k, attn.to_v, attn.to_out, block.ff),
        per_text=products(attn.add_q_proj, attn.add_k_proj, attn.add_v_proj, attn.to_add_out, block.ff_context),
        per_rest=products(attn.to_k, attn.to_v),
        per_pair=4 * attn.inner_dim,
        per_branch=products(block.norm1, block.norm1_context),
        width=attn.inner_dim,
        joint=True,
    )


def describe_single(block: FluxSingleTransformerBlock) -> BlockShape:
    attn = block.attn
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
