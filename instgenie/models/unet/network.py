"""Stable Diffusion's UNets over jobs: walks the sub-modules of diffusers' UNet2DConditionModel, block by block.

Knows how such a UNet computes; owns no weights and no state. It has two parts that meet in `transform` alone: the
convolutional part (resnets, resampling) sees whole pictures of one size, one per branch; the ragged part (the
transformers at every level) sees packed tokens. Channels lie last in memory, so that a picture and its tokens are two
views of one tensor. A cached block computes only the masked tokens of its level: attention reads keys of all tokens,
each at its own place, and the output of the transformer is completed with the output kept at registration.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, compress
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor, nn

from instgenie.adapters.applied import BatchLoras
from instgenie.cost.network import BlockShape, NetworkShape
from instgenie.jobs.activations import Kind
from instgenie.jobs.job import Branch
from instgenie.jobs.rows import BatchRows
from instgenie.kernels.fill import fill_rows
from instgenie.kernels.group_norm import group_norm
from instgenie.kernels.layer_norm import add_layer_norm, layer_norm
from instgenie.kernels.quantize import Rows
from instgenie.models.layers.feed_forward import feed_forward, first_layer
from instgenie.models.layers.fp8_linear import reads_fp8
from instgenie.models.layers.linear import EACH_BRANCH, Owners, call, linear, patched
from instgenie.models.layers.products import products
from instgenie.models.layers.resnet import convolutions, is_plain
from instgenie.models.layers.resnet import convolve as convolve_plain
from instgenie.models.unet.attention import attend
from instgenie.models.unet.batch import Positions, TransformerPosition, UnetBatch
from instgenie.models.unet.layout import LevelLayout

UnetBlock: TypeAlias = Any  # one of diffusers' down, middle or up blocks


@dataclass(frozen=True)
class Recorder:
    """Receives what activations keep, in the order of the pass."""

    kind: Kind
    keep: Callable[[Tensor], None]


@dataclass(frozen=True, eq=False)
class Pass:
    """What every part of one pass reads."""

    batch: UnetBatch
    positions: Positions
    time: Tensor  # [branches, width]
    active: Tensor  # [branches, width], the input of linear layers
    recorder: Recorder | None = None

    @cached_property
    def each_branch(self) -> Owners:
        """Owners of one row, or one picture, per branch."""
        return EACH_BRANCH.of(self.batch.loras)


def cross(
    unet: UNet2DConditionModel, branches: tuple[Branch, ...], loras: BatchLoras | None = None
) -> tuple[Tensor, ...]:
    """K and V of the text in every block [2, branches, text tokens, width]: the same at all steps."""
    text = torch.stack([branch.text for branch in branches])
    owners = Owners(per_branch=text.shape[1], loras=loras)
    attentions = [block.attn2 for transformer in transformers(unet) for block in transformer.transformer_blocks]
    return tuple(torch.stack([linear(layer, text, owners) for layer in (attn.to_k, attn.to_v)]) for attn in attentions)


@dataclass(frozen=True, eq=False)
class Encoded:
    """A pass at its middle, where residuals of ControlNets enter."""

    unet: UNet2DConditionModel
    run: Pass
    skips: list[Tensor]  # [branches, channels, rows, columns], in the order of the encoder
    x: Tensor  # [branches, channels, rows, columns]

    @property
    def places(self) -> list[Tensor]:
        """The tensors that residuals are added to."""
        return [*self.skips, self.x]

    def end(self) -> Tensor:
        return decode(self.unet, self.run, list(self.skips), self.x)


def predict(
    unet: UNet2DConditionModel, positions: Positions, batch: UnetBatch, recorder: Recorder | None = None
) -> Tensor:
    """[branches, channels, rows, columns]"""
    encoded = encode(unet, positions, batch, recorder)
    for residuals in batch.residuals:
        residuals.add_to(encoded.places)
    return encoded.end()


def encode(
    unet: UNet2DConditionModel, positions: Positions, batch: UnetBatch, recorder: Recorder | None = None
) -> Encoded:
    """The first half of a pass."""
    time = embed_time(unet, batch)
    run = Pass(batch, positions, time, F.silu(time), recorder)
    x = call(unet.conv_in, run.each_branch, batch.sample)
    skips = [x]
    for block in unet.down_blocks:
        x = down(block, x, run, skips)
    return Encoded(unet, run, skips, middle(unet.mid_block, x, run))


def decode(unet: UNet2DConditionModel, run: Pass, skips: list[Tensor], x: Tensor) -> Tensor:
    """The second half; it takes the skips, the last one first."""
    for block in unet.up_blocks:
        x = up(block, x, run, skips)
    if isinstance(unet.conv_act, nn.SiLU):
        x = group_norm(x, unet.conv_norm_out, activates=True)
    else:
        x = unet.conv_act(unet.conv_norm_out(x))
    return call(unet.conv_out, run.each_branch, x)


def embed_time(unet: UNet2DConditionModel, batch: UnetBatch) -> Tensor:  # [branches, width]
    owners = EACH_BRANCH.of(batch.loras)
    embedded = call(unet.time_embedding, owners, unet.get_time_embed(batch.sample, batch.timestep))
    with patched(getattr(unet, "add_embedding", None), owners):
        added = unet.get_aug_embed(embedded, None, {"text_embeds": batch.pooled, "time_ids": batch.sizes})
    return embedded if added is None else embedded + added


def down(block: UnetBlock, x: Tensor, run: Pass, skips: list[Tensor]) -> Tensor:
    for resnet, transformer in pairs(block):
        x = transform(transformer, convolve(resnet, x, run), run)
        skips.append(x)
    for sampler in block.downsamplers or ():
        x = call(sampler, run.each_branch, x)
        skips.append(x)
    return x


def middle(block: UnetBlock | None, x: Tensor, run: Pass) -> Tensor:
    if block is None:
        return x.clone()  # residuals are added to it, and to the skip that it is
    first, *others = block.resnets
    x = convolve(first, x, run)
    for resnet, transformer in zip(others, block.attentions, strict=True):
        x = convolve(resnet, transform(transformer, x, run), run)
    return x


def up(block: UnetBlock, x: Tensor, run: Pass, skips: list[Tensor]) -> Tensor:
    for resnet, transformer in pairs(block):
        x = transform(transformer, convolve(resnet, torch.cat([x, skips.pop()], dim=1), run), run)
    for sampler in block.upsamplers or ():
        x = call(sampler, run.each_branch, x)
    return x


def pairs(block: UnetBlock) -> Iterator[tuple[nn.Module, Transformer2DModel | None]]:
    """Yield the resnets, each with the transformer behind it where the level has any."""
    transformers = getattr(block, "attentions", None) or [None] * len(block.resnets)
    return zip(block.resnets, transformers, strict=True)


def convolve(resnet: ResnetBlock2D, x: Tensor, run: Pass) -> Tensor:
    loras = run.batch.loras
    if is_plain(resnet) and not (loras and any(map(loras.patches, convolutions(resnet)))):
        return convolve_plain(resnet, x, run.active, run.each_branch)
    return call(resnet, run.each_branch, x, run.time)


def transformers(unet: UNet2DConditionModel) -> list[Transformer2DModel]:
    """All transformers, in the order of the pass."""
    blocks = (*unet.down_blocks, unet.mid_block, *unet.up_blocks)
    return [transformer for block in blocks for transformer in getattr(block, "attentions", ())]


def find_positions(unet: UNet2DConditionModel) -> Positions:
    found = [
        (transformer, len(transformer.transformer_blocks), side)
        for block, side in with_sides(unet)
        for transformer in getattr(block, "attentions", ())
    ]
    firsts = accumulate((num_blocks for _, num_blocks, _ in found), initial=0)
    # after the blocks of each transformer, activations keep its output too
    return {
        transformer: TransformerPosition(block, block + before, num_blocks, side)
        for before, ((transformer, num_blocks, side), block) in enumerate(zip(found, firsts, strict=False))
    }


def transform(transformer: Transformer2DModel | None, x: Tensor, run: Pass) -> Tensor:
    """The ragged part, between two convolutions [branches, channels, rows, columns]."""
    if transformer is None:
        return x
    batch, position, recorder = run.batch, run.positions[transformer], run.recorder
    num_branches, channels, *grid = x.shape
    num_all = x.shape[2] * x.shape[3]
    normed = enter(transformer.norm, x, batch.layout(position.block, num_all))
    layout, leaving = flow(transformer, normed, num_all, run)
    leaving = make_whole(layout, leaving, batch.rows, position.end)
    for branch in compress(range(num_branches), batch.kept_kinds):
        batch.rows.keep(position.end, branch, [leaving[branch]])
    if recorder:
        recorder.keep(leaving[:, None])
    return x + leaving.view(num_branches, *grid, channels).permute(0, 3, 1, 2)


def flow(transformer: Transformer2DModel, normed: Tensor, num_all: int, run: Pass) -> tuple[LevelLayout, Tensor]:
    """From the computed tokens that enter a transformer to those that leave it [computed tokens, channels], in the
    layout that is returned."""
    batch, position, recorder = run.batch, run.positions[transformer], run.recorder
    layout = batch.layout(position.block, num_all)
    tokens = linear(transformer.proj_in, normed, layout.owners)
    for offset, block in enumerate(transformer.transformer_blocks):
        place = position.place + offset
        layout, tokens = turn(layout, batch.layout(position.block + offset, num_all), tokens, batch.rows, place)
        if recorder:
            kept = keep_block(block, tokens, recorder.kind, layout.owners)
            recorder.keep(kept.unflatten(1, (layout.num_branches, -1)).transpose(0, 1))
        tokens = transformer_block(block, tokens, batch, layout, position.block + offset, place)
    return layout, linear(transformer.proj_out, tokens, layout.owners)


def enter(norm: nn.GroupNorm, x: Tensor, layout: LevelLayout) -> Tensor:
    """[branches, channels, rows, columns] -> the computed tokens [computed tokens, channels], normed"""
    normed = group_norm(x, norm, index=layout.index)
    return normed.permute(0, 2, 3, 1).flatten(0, 2) if layout.index is None else normed


def turn(
    layout: LevelLayout, to: LevelLayout, tokens: Tensor, rows: BatchRows, place: int
) -> tuple[LevelLayout, Tensor]:
    """Return the layout of a block and the tokens in it: where a job's plan turns, its unmasked tokens leave, or come
    back from the activations."""
    if layout is to:
        return layout, tokens
    whole = make_whole(layout, tokens, rows, place, to.cached).flatten(0, 1)
    return to, whole if to.index is None else whole[to.index]


def make_whole(
    layout: LevelLayout, tokens: Tensor, rows: BatchRows, place: int, still_cached: tuple[bool, ...] | None = None
) -> Tensor:
    """[computed tokens, channels] -> [branches, all tokens, channels]. The other tokens come from the activations; in
    branches that stay cached they are left uninitialised."""
    if layout.origin is None:
        return tokens.reshape(layout.num_branches, layout.num_all, -1)
    whole = tokens.new_empty(1, layout.num_branches, layout.num_all, tokens.shape[1])
    stays = still_cached or (False,) * layout.num_branches
    wanted = [narrow and not stay for narrow, stay in zip(layout.cached, stays, strict=True)]
    fill_rows(rows.at(place, wanted), layout.origin, [tokens], whole)
    return whole[0]


def transformer_block(
    block: BasicTransformerBlock, tokens: Tensor, batch: UnetBatch, layout: LevelLayout, number: int, place: int
) -> Tensor:
    """[computed tokens, width]; plans count the block as `number`, activations as `place`."""
    inner = layer_norm(tokens, block.norm1, reads_fp8(block.attn1.to_q))
    k, v = find_keys(block, tokens, inner, batch, layout, place)
    for branch, kind in enumerate(batch.kept_kinds):
        if kind:
            batch.rows.keep(
                place, branch, [k[branch], v[branch]] if kind == "kv" else [rows_of(layout, tokens, branch)]
            )
    attended = attend_heads(block.attn1, inner, k, v, batch, layout)
    tokens, inner = add_layer_norm(tokens, attended, block.norm2, reads_fp8(block.attn2.to_q))
    k, v = batch.crossed[number]
    attended = attend_heads(block.attn2, inner, k, v, batch, layout)
    tokens, inner = add_layer_norm(tokens, attended, block.norm3, reads_fp8(first_layer(block.ff)))
    return tokens + feed_forward(block.ff, inner, layout.owners)


def rows_of(layout: LevelLayout, tokens: Tensor, branch: int) -> Tensor:
    """The rows [all tokens, width] of a branch that computes every token."""
    if layout.origin is None:
        return tokens.view(layout.num_branches, layout.num_all, -1)[branch]
    return tokens[layout.origin[branch]]


def attend_heads(attn: Attention, inner: Rows, k: Tensor, v: Tensor, batch: UnetBatch, layout: LevelLayout) -> Tensor:
    """Attend from packed tokens [computed tokens, width] to each branch's keys and values [branches, keys, width]."""
    q, k, v = (x.unflatten(-1, (attn.heads, -1)) for x in (linear(attn.to_q, inner, layout.owners), k, v))
    attended = attend(layout, q, k, v, batch.key_bounds[k.shape[1]]).flatten(1)
    return linear(attn.to_out[0], attended, layout.owners)


def find_keys(
    block: BasicTransformerBlock, tokens: Tensor, inner: Rows, batch: UnetBatch, layout: LevelLayout, place: int
) -> tuple[Tensor, Tensor]:
    """K and V of all tokens, each at its place [branches, all tokens, width]. Those of tokens that are not computed are
    as the activations keep them, or projected from Y as at registration."""
    shape = layout.num_branches, layout.num_all, tokens.shape[1]
    if layout.origin is None:
        k, v = project_keys(block, inner, layout.owners)
        return k.view(shape), v.view(shape)
    has_kv, has_y = (
        [narrow and kind == one for narrow, kind in zip(layout.cached, batch.kinds, strict=True)] for one in ("kv", "y")
    )
    keys = projected = tokens.new_empty(2, *shape)
    if any(has_y):
        whole = tokens.new_empty(1, *shape)
        fill_rows(batch.rows.at(place, has_y), layout.origin, [tokens], whole)
        inner_whole = norm_keys(block, whole.view(-1, shape[2]))
        projected = torch.stack([k.view(shape) for k in project_keys(block, inner_whole, layout.whole_owners)])
    if any(has_kv):
        fill_rows(batch.rows.at(place, has_kv), layout.origin, project_keys(block, inner, layout.owners), keys)
    if any(has_y) and any(has_kv):
        of_kv = torch.tensor(has_kv).to(tokens.device, non_blocking=True)
        keys = torch.where(of_kv[:, None, None], keys, projected)
    k, v = keys if any(has_kv) else projected
    return k, v


def keep_block(block: BasicTransformerBlock, tokens: Tensor, kind: Kind, owners: Owners) -> Tensor:
    """What activations keep of a block [2 or 1, tokens, width], from the tokens that go into it."""
    return tokens[None] if kind == "y" else torch.stack(project_keys(block, norm_keys(block, tokens), owners))


def norm_keys(block: BasicTransformerBlock, tokens: Tensor) -> Rows:
    return layer_norm(tokens, block.norm1, reads_fp8(block.attn1.to_k))


def project_keys(block: BasicTransformerBlock, inner: Rows, owners: Owners) -> tuple[Tensor, Tensor]:
    """K and V of normed tokens, each [tokens, width]."""
    return linear(block.attn1.to_k, inner, owners), linear(block.attn1.to_v, inner, owners)


def describe(unet: UNet2DConditionModel) -> NetworkShape:
    """Describe the network as numbers; the projections into and out of a transformer count with its first and its last
    block."""
    runs = [
        describe_transformer(transformer, side)
        for block, side in with_sides(unet)
        for transformer in getattr(block, "attentions", ())
    ]
    per_token = products(unet.conv_in, unet.conv_out)
    per_branch = products(unet.time_embedding, getattr(unet, "add_embedding", None))
    for block, side in with_sides(unet):
        for resnet in block.resnets:
            per_token += products(resnet.conv1, resnet.conv2, resnet.conv_shortcut) // side**2
            per_branch += products(resnet.time_emb_proj)
        per_token += sum(products(sampler) for sampler in getattr(block, "downsamplers", None) or ()) // (2 * side) ** 2
        per_token += 4 * sum(products(sampler) for sampler in getattr(block, "upsamplers", None) or ()) // side**2
    blocks = tuple(block for run in runs for block in run)
    return NetworkShape(blocks, tuple(len(run) for run in runs), per_token, per_branch)


def with_sides(unet: UNet2DConditionModel) -> Iterator[tuple[UnetBlock, int]]:
    """Yield every block of the UNet with the side of the square of full-resolution tokens that its tokens stand for."""
    downs = [(block, 2**level) for level, block in enumerate(unet.down_blocks)]
    ups = [(block, 2**level) for level, block in enumerate(reversed(unet.up_blocks))]
    middles = [(unet.mid_block, downs[-1][1])] if unet.mid_block is not None else []
    yield from (*downs, *middles, *reversed(ups))


def describe_transformer(transformer: Transformer2DModel, side: int) -> list[BlockShape]:
    blocks = [describe_block(block, side) for block in transformer.transformer_blocks]
    blocks[0] = replace(blocks[0], per_token=blocks[0].per_token + products(transformer.proj_in))
    per_token = blocks[-1].per_token + products(transformer.proj_out)
    return [*blocks[:-1], replace(blocks[-1], per_token=per_token, output_width=transformer.in_channels)]


def describe_block(block: BasicTransformerBlock, side: int) -> BlockShape:
    own, cross = block.attn1, block.attn2
    return BlockShape(
        per_token=products(own, cross.to_q, cross.to_out, block.ff),
        per_text=products(cross.to_k, cross.to_v),
        per_rest=products(own.to_k, own.to_v),
        per_pair=4 * own.inner_dim,
        per_branch=0,
        width=own.inner_dim,
        side=side,
    )
