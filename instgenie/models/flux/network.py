"""Flux over packed tokens: walks the sub-modules of diffusers' FluxTransformer2DModel, block by block.

Knows how a Flux model computes; owns no weights and no state. Linear layers, norms and rotary embedding run over the
tokens of all branches at once; only attention looks at one branch at a time. Modulation is computed once per branch and
read by that branch's tokens.

A cached block is the same block over fewer tokens: the layout says which, and attention reads keys of all tokens, each
at its own place. Keys of tokens that are not computed are written first, then those of tokens that are.
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
from instgenie.kernels.addresses import RowSource
from instgenie.kernels.gather import gather_rows
from instgenie.kernels.gelu import beside_gelu
from instgenie.kernels.heads import HeadPlaces, Heads, Projected, place
from instgenie.kernels.modulate import add_norm_modulate, norm_modulate
from instgenie.kernels.quantize import Rows
from instgenie.kernels.streams import beside
from instgenie.models.flux.batch import FluxBatch, Layout
from instgenie.models.flux.modulation import Modulation, embed, first_columns
from instgenie.models.flux.residual import Residual
from instgenie.models.layers.feed_forward import feed_forward, first_layer
from instgenie.models.layers.fp8_linear import reads_fp8
from instgenie.models.layers.linear import EACH_BRANCH, Owners, join, linear, linears
from instgenie.models.layers.products import products

Block: TypeAlias = FluxTransformerBlock | FluxSingleTransformerBlock


def velocity(transformer: FluxTransformer2DModel, batch: FluxBatch) -> Tensor:
    """[image tokens, latent channels]; for a job that caches any block, of its masked tokens alone."""
    mod = find_modulation(transformer, batch)
    layout, image = run_blocks(transformer, batch, embed_image(transformer, batch), mod)
    return unembed(transformer, image, mod, layout)


def run_blocks(
    transformer: FluxTransformer2DModel, batch: FluxBatch, image: Tensor, mod: Modulation
) -> tuple[Layout, Tensor]:
    """Send embedded image rows through all blocks."""
    text, image_rows = Residual(batch.text), Residual(image)
    doubles, singles = transformer.transformer_blocks, transformer.single_transformer_blocks
    layout = batch.layout
    for index, block in enumerate(doubles):
        if batch.needs_rows(layout, index):
            layout, text_turned, turned = batch.turn(layout, text.total, image_rows.total, index)
            parts = zip(text_turned.split(layout.num_text), turned.split(layout.num_image), strict=True)
            keep_y(index, batch, list(parts))
            text, image_rows = Residual(text_turned), Residual(turned)
        heads = recall(block, index, batch, layout)
        text, image_rows = double_block(block, text, image_rows, mod, layout, heads)
        if batch.control and (rows := batch.control.behind(index)) is not None:
            image_rows = Residual(image_rows.total + rows)
        keep_kv(index, batch, layout, heads)
    joint = Residual(layout.join(text.total, image_rows.total))
    for index, block in enumerate(singles, len(doubles)):
        if batch.needs_rows(layout, index):
            layout, turned = batch.turn_joint(layout, joint.total, index)
            parts = zip(turned.split(layout.num_joint), layout.num_text, strict=True)
            keep_y(index, batch, [(rows[:num], rows[num:]) for rows, num in parts])
            joint = Residual(turned)
        heads = recall(block, index, batch, layout)
        joint = single_block(block, joint, mod, layout, heads)
        if batch.control and (rows := batch.control.behind(index)) is not None:
            joint = Residual(joint.total.index_add(0, layout.image_places.joint, rows))
        keep_kv(index, batch, layout, heads)
    layout, _, image = batch.turn(
        layout, *layout.part(joint.total.split(layout.num_joint)), len(doubles) + len(singles)
    )
    return layout, image


def observe(
    transformer: FluxTransformer2DModel, batch: FluxBatch, kind: Kind, with_text: bool = False
) -> Iterator[Tensor]:
    """Yield what activations keep of each block [2 or 1, image tokens, width], from a dense pass; `with_text` the rows
    of each branch's text lie before those of its image."""
    mod, layout = find_modulation(transformer, batch), batch.layout
    text_rotary, rotary = layout.part(layout.rotary.split(layout.num_joint))
    for block, text, image in walk(transformer, batch, mod):
        if kind == "y":
            seen, seen_text = image[None], text[None]
        else:
            keys = reserve_keys(block, len(image), image)
            project_keys(block, image, mod, rotary, layout.image_owners, keys)
            seen, seen_text = keys.flatten(2), text.new_empty(2, 0, image.shape[1])
            if with_text:
                keys = reserve_keys(block, len(text), text)
                project_keys(block, text, mod, text_rotary, layout.text_owners, keys, is_text=True)
                seen_text = keys.flatten(2)
        yield torch.stack(list(map(layout.join, seen_text, seen))) if with_text else seen


def walk(
    transformer: FluxTransformer2DModel, batch: FluxBatch, mod: Modulation
) -> Iterator[tuple[Block, Tensor, Tensor]]:
    """Yield every block with the rows of text and image that go into it, in a dense pass."""
    layout = batch.layout
    text, image = Residual(batch.text), Residual(embed_image(transformer, batch))
    for block in transformer.transformer_blocks:
        yield block, text.total, image.total
        text, image = double_block(block, text, image, mod, layout, reserve(block, layout, batch.text))
    joint = Residual(layout.join(text.total, image.total))
    for block in transformer.single_transformer_blocks:
        yield block, *layout.part(joint.total.split(layout.num_joint))
        joint = single_block(block, joint, mod, layout, reserve(block, layout, batch.text))


def num_blocks(transformer: FluxTransformer2DModel) -> int:
    return len(transformer.transformer_blocks) + len(transformer.single_transformer_blocks)


def embed_prompt(transformer: FluxTransformer2DModel, sequence: Tensor) -> Tensor:  # [text tokens, width]
    """Embed the text of a single branch."""
    return linear(transformer.context_embedder, sequence, Owners(per_branch=len(sequence)))


def embed_image(transformer: FluxTransformer2DModel, batch: FluxBatch) -> Tensor:  # [image tokens, width]
    return linear(transformer.x_embedder, batch.image, batch.layout.image_owners)


def embed_time(transformer: FluxTransformer2DModel, batch: FluxBatch) -> Tensor:
    """The input of every block's modulation layer [branches, width]."""
    owners = EACH_BRANCH.of(batch.loras)
    return embed(transformer, batch.sigma, batch.guidance, batch.pooled, batch.text.dtype, owners)


def find_modulation(transformer: FluxTransformer2DModel, batch: FluxBatch) -> Modulation:
    if batch.modulation is None:
        return Modulation(embed_time(transformer, batch), owners=EACH_BRANCH.of(batch.loras))
    return Modulation(columns=batch.modulation, firsts=first_columns(transformer))


def embed_positions(transformer: FluxTransformer2DModel, num_text: int, grid: tuple[int, int]) -> Tensor:
    """Rotary table of one branch [text tokens + image tokens, head channels / 2] as unit complex numbers."""
    num_rows, num_columns = grid
    positions = torch.zeros(num_text + num_rows * num_columns, 3, device=transformer.context_embedder.weight.device)
    positions[num_text:, 1] = torch.arange(num_rows).repeat_interleave(num_columns)
    positions[num_text:, 2] = torch.arange(num_columns).repeat(num_rows)
    cos, sin = transformer.pos_embed(positions)  # each value appears twice, for the real and the imaginary channel
    return torch.complex(cos[:, ::2].contiguous(), sin[:, ::2].contiguous())


def double_block(
    block: FluxTransformerBlock, text: Residual, image: Residual, mod: Modulation, layout: Layout, heads: Heads
) -> tuple[Residual, Residual]:
    """The few tokens of the text read as many weights as those of the image, so both run beside each other."""
    attn, text_owners, image_owners = block.attn, layout.text_owners, layout.image_owners

    def enter_text() -> Sequence[Tensor]:
        layers = text_projections(block)
        rows, columns = modulated(block.norm1_context, text, mod, layout.text_rows, reads_fp8(layers[0]))
        q, k, v = linears(layers, rows, text_owners)
        place(Projected(q, k, v, attn.norm_added_q, attn.norm_added_k), layout.rotary, layout.text_places, heads)
        return columns

    def enter_image() -> Sequence[Tensor]:
        layers = image_projections(block)
        rows, columns = modulated(block.norm1, image, mod, layout.image_rows, reads_fp8(layers[0]))
        q, k, v = linears(layers, rows, image_owners)
        place(Projected(q, k, v, attn.norm_q, attn.norm_k), layout.rotary, layout.image_places, heads)
        return columns

    def leave_text() -> Residual:
        out = linear(attn.to_add_out, text_out, text_owners)
        return feed_forward_gated(block.norm2_context, block.ff_context, text.total, out, text_mod, text_owners)

    def leave_image() -> Residual:
        out = linear(attn.to_out[0], image_out, image_owners)
        return feed_forward_gated(block.norm2, block.ff, image.total, out, image_mod, image_owners)

    text_mod, image_mod = beside(enter_text, enter_image, heads.keys)
    text_out, image_out = layout.part(attend(heads, layout))
    return beside(leave_text, leave_image, heads.keys)


def single_block(
    block: FluxSingleTransformerBlock, joint: Residual, mod: Modulation, layout: Layout, heads: Heads
) -> Residual:
    attn, owners = block.attn, layout.joint_owners
    projections = image_projections(block)
    joint_in, [gate] = modulated(block.norm, joint, mod, layout.joint_rows, reads_fp8(projections[0]))

    q, k, v, hidden = linears(projections, joint_in, owners)
    place(Projected(q, k, v, attn.norm_q, attn.norm_k), layout.rotary, layout.joint_places, heads)
    both = beside_gelu(attend(heads, layout), hidden, reads_fp8(block.proj_out))
    return Residual(joint.total, gate, linear(block.proj_out, both, owners), layout.joint_rows)


def image_projections(block: Block) -> tuple[nn.Module, ...]:
    """The layers that read the modulated image rows of a double block, or the modulated rows of a single block."""
    attn = block.attn
    heads = attn.to_q, attn.to_k, attn.to_v
    return (*heads, block.proj_mlp) if isinstance(block, FluxSingleTransformerBlock) else heads


def text_projections(block: FluxTransformerBlock) -> tuple[nn.Module, ...]:
    attn = block.attn
    return attn.add_q_proj, attn.add_k_proj, attn.add_v_proj


def join_projections(transformer: FluxTransformer2DModel) -> None:
    """Make one product of the layers that read the same rows."""
    for block in transformer.transformer_blocks:
        join(image_projections(block))
        join(text_projections(block))
    for block in transformer.single_transformer_blocks:
        join(image_projections(block))


def unembed(transformer: FluxTransformer2DModel, image: Tensor, mod: Modulation, layout: Layout) -> Tensor:
    norm = transformer.norm_out
    scale, shift = mod.of(norm.linear)
    normed = norm_modulate(image, shift, scale, layout.image_rows, norm.norm.eps)
    return linear(transformer.proj_out, normed, layout.image_owners)


def modulated(
    norm: AdaLayerNormZero, x: Residual, mod: Modulation, rows: Tensor | None, fp8: bool = False
) -> tuple[Rows, Sequence[Tensor]]:
    """Return the block's input, and the columns [branches, width] that modulate the rest of it. Rows give the branch of
    each token; rows that a branch has kept have none, and a single time."""
    shift, scale, *others = mod.of(norm.linear)
    return x.normed(shift, scale, rows, norm.norm.eps, fp8), others


def feed_forward_gated(
    norm: nn.LayerNorm, ff: nn.Module, x: Tensor, attended: Tensor, mod: Sequence[Tensor], owners: Owners
) -> Residual:
    gate_attended, shift, scale, gate = mod
    fp8 = reads_fp8(first_layer(ff))
    x, inner = add_norm_modulate(x, gate_attended, attended, shift, scale, owners.index, norm.eps, fp8)
    return Residual(x, gate, feed_forward(ff, inner, owners), owners.index)


def recall(block: Block, index: int, batch: FluxBatch, layout: Layout) -> Heads:
    """Reserve heads and fill in K and V of the tokens that are not computed. Branches without rows of their own read
    those of the branch before."""
    heads = reserve(block, layout, batch.text)
    if not any(layout.cached):
        return heads
    reader = 0
    kept = layout.kept_keys(batch.num_kept_text)
    for job, (sources, slices) in enumerate(zip(batch.read(index, layout.cached, layout), kept, strict=True)):
        keys = [heads.keys[:, one] for one in slices]
        for branch, source in enumerate(sources):
            recall_one(block, batch, job, reader + branch, source, keys[branch])
        for other in keys[len(sources) :] if sources else ():
            other.copy_(keys[len(sources) - 1])
        reader += len(slices)
    return heads


def recall_one(block: Block, batch: FluxBatch, job: int, reader: int, source: RowSource, keys: Tensor) -> None:
    """Write K and V [2, kept tokens, heads, head channels] of a branch's tokens that are not computed, each at its
    place: as they are kept, or projected from Y as at the step that left them."""
    assert source is not None
    tokens = batch.image_tokens[job]
    rest = tokens.rest
    if batch.kinds[job] == "kv":
        gather_rows(source, rest, tokens.num_rows, keys.flatten(2), rest)
        return
    assert batch.template is not None
    y = keys.new_empty(1, len(rest), keys.shape[2] * keys.shape[3])
    gather_rows(source, rest, tokens.num_rows, y)
    owners = kept_owners(batch, reader, len(rest))
    mod = Modulation(batch.template.time[reader, None], owners=owners)
    rotary = batch.template.rotary[job]
    num = tokens.num_padding
    if num:
        places = HeadPlaces(joint=rest[:num], keys=rest[:num])
        project_keys(block, y[0, :num], mod, rotary, owners, keys, places, is_text=True)
    project_keys(block, y[0, num:], mod, rotary, owners, keys, HeadPlaces(joint=rest[num:], keys=rest[num:]))


def kept_owners(batch: FluxBatch, reader: int, num_rows: int) -> Owners | None:
    """The owners of rows that a reader projects from Y: none, or itself if it has LoRAs, which change projections."""
    loras = batch.loras and batch.loras.of_branch(reader)
    return Owners(loras=loras, counts=(num_rows,)) if loras else None


def keep_y(index: int, batch: FluxBatch, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Keep the rows of text and image that go into a block, per branch, for the jobs that keep Y; the text for those
    that keep it."""
    for reader, (kind, num_text) in enumerate(zip(batch.kept_kinds, batch.kept_text, strict=True)):
        if kind == "y":
            text, image = parts[reader]
            batch.rows.keep(index, reader, [torch.cat([text, image]) if num_text else image])


def keep_kv(index: int, batch: FluxBatch, layout: Layout, heads: Heads) -> None:
    """Keep K and V of the tokens of a block that has run, for the jobs that keep them."""
    if "kv" not in batch.kept_kinds:
        return
    slices = [one for job in layout.kept_keys(batch.num_kept_text) for one in job]
    for reader, kind in enumerate(batch.kept_kinds):
        if kind == "kv":
            batch.rows.keep(index, reader, [part[slices[reader]].flatten(1) for part in heads.keys])


def project_keys(
    block: Block,
    rows: Tensor,
    mod: Modulation,
    rotary: Tensor,
    owners: Owners | None,
    keys: Tensor,
    places: HeadPlaces | None = None,
    is_text: bool = False,
) -> None:
    """Write K and V [2, tokens, heads, head channels] of rows that go into a block. A template's own rows have no
    owners, unless an edit's LoRAs project them. Text has projections of its own in a double block."""
    attn = block.attn
    if not hasattr(block, "norm1"):
        norm, layers, norms = block.norm, (attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k)
    elif is_text:
        norm, layers = block.norm1_context, (attn.add_k_proj, attn.add_v_proj)
        norms = attn.norm_added_q, attn.norm_added_k
    else:
        norm, layers, norms = block.norm1, (attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k)
    rows_in, _ = modulated(norm, Residual(rows), mod, owners.index if owners else None, reads_fp8(layers[0]))
    k, v = linears(layers, rows_in, owners)
    place(Projected(None, k, v, *norms), rotary, places, Heads(None, keys))


def reserve(block: Block, layout: Layout, like: Tensor) -> Heads:
    attn = block.attn
    q = like.new_empty(sum(layout.num_joint), attn.heads, attn.head_dim)
    return Heads(q, reserve_keys(block, sum(layout.num_keys), like))


def reserve_keys(block: Block, num_keys: int, like: Tensor) -> Tensor:
    return like.new_empty(2, num_keys, block.attn.heads, block.attn.head_dim)


def attend(heads: Heads, layout: Layout) -> list[Tensor]:
    """Return the attended tokens per branch [joint tokens, width]."""
    assert heads.q is not None
    k, v = heads.keys
    parts = zip(heads.q.split(layout.num_joint), k.split(layout.num_keys), v.split(layout.num_keys), strict=True)
    return [attend_one(*part) for part in parts]


def attend_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [tokens, heads, head channels] -> [tokens, width]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)


def describe(transformer: FluxTransformer2DModel) -> NetworkShape:
    """Describe the network as numbers; embedding counts with the first block, unembedding with the last."""
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
