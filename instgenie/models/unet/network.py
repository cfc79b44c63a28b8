"""Stable Diffusion's UNets over jobs: walks the sub-modules of diffusers' UNet2DConditionModel, block by block. The
first half serves ControlNets, too, which are copies of it.

Knows how such a UNet computes; owns no weights and no state. It has two parts that meet in `transform` alone: the
convolutional part (resnets, resampling) sees whole pictures of one size, one per branch; the ragged part (the
transformers at every level) sees packed tokens. Channels lie last in memory, so that a picture and its tokens are two
views of one tensor. A cached block computes only the masked tokens of its level: attention reads keys of all tokens,
each at its own place, and the output of the transformer is completed with the output kept at registration.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, compress
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor, nn

from instgenie.adapters.applied import BatchLoras
from instgenie.cost.network import BlockShape, NetworkShape
from instgenie.jobs.job import Branch
from instgenie.kernels.group_norm import group_norm
from instgenie.models.layers.linear import EACH_BRANCH, Owners, call, linear, patched
from instgenie.models.layers.products import products
from instgenie.models.layers.resnet import convolutions, is_plain
from instgenie.models.layers.resnet import convolve as convolve_plain
from instgenie.models.unet.batch import Positions, TransformerPosition, UnetBatch
from instgenie.models.unet.choices import ChosenShape, choices_of, count_blocks
from instgenie.models.unet.flow import FlowPart, Pass, Recorder, flow, make_whole
from instgenie.models.unet.layout import LevelLayout
from instgenie.models.unet.reused import convolve_chosen, flow_chosen

UnetBlock: TypeAlias = Any  # one of diffusers' down, middle or up blocks
Encoder: TypeAlias = Any  # diffusers' UNet, or a ControlNet, which has no up blocks


def cross(
    unet: UNet2DConditionModel, branches: tuple[Branch, ...], loras: BatchLoras | None = None
) -> tuple[Tensor, ...]:
    """K and V of the text in every block [2, branches, text tokens, width]: the same at all steps."""
    return cross_texts(unet, torch.stack([branch.text for branch in branches]), loras)


def cross_texts(unet: Encoder, text: Tensor, loras: BatchLoras | None = None) -> tuple[Tensor, ...]:
    """The same of texts [branches, text tokens, channels]."""
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
    unet: Encoder,
    positions: Positions,
    batch: UnetBatch,
    recorder: Recorder | None = None,
    added: Tensor | None = None,
) -> Encoded:
    """The first half of a pass; what is `added` to its first convolution is what a ControlNet sees of its images."""
    time = embed_time(unet, batch)
    run = Pass(batch, positions, time, F.silu(time), recorder, choices_of(unet, batch.jobs))
    x = call(unet.conv_in, run.each_branch, batch.sample)
    x = x if added is None else x + added
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
    if run.choices:
        run.choices.blocks.commit()
    return call(unet.conv_out, run.each_branch, x)


def embed_time(unet: Encoder, batch: UnetBatch) -> Tensor:  # [branches, width]
    owners, kind = EACH_BRANCH.of(batch.loras), UNet2DConditionModel
    embedded = call(unet.time_embedding, owners, kind.get_time_embed(unet, batch.sample, batch.timestep))
    with patched(getattr(unet, "add_embedding", None), owners):
        added = kind.get_aug_embed(unet, embedded, None, {"text_embeds": batch.pooled, "time_ids": batch.sizes})
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
    if run.choices:
        column = linear(resnet.time_emb_proj, run.active, run.each_branch) if resnet.time_emb_proj is not None else None
        return convolve_chosen(resnet, x, column, run.choices, run.each_branch)
    if is_plain(resnet) and not (loras and any(map(loras.patches, convolutions(resnet)))):
        return convolve_plain(resnet, x, run.active, run.each_branch)
    return call(resnet, run.each_branch, x, run.time)


def transformers(unet: Encoder) -> list[Transformer2DModel]:
    """All transformers, in the order of the pass."""
    blocks = (*unet.down_blocks, unet.mid_block, *getattr(unet, "up_blocks", ()))
    return [transformer for block in blocks for transformer in getattr(block, "attentions", ())]


def find_positions(unet: Encoder) -> Positions:
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
    part = FlowPart(run, num_all)
    leaving = (
        flow_chosen(transformer, normed, part, (x.shape[2], x.shape[3]))
        if run.choices
        else flow(transformer, normed, [part])
    )
    layout = batch.layout(position.block + position.num_blocks - 1, num_all)
    leaving = make_whole(layout, leaving, batch.rows, position.end)
    for branch in compress(range(num_branches), batch.kept_kinds):
        batch.rows.keep(position.end, branch, [leaving[branch]])
    if recorder:
        recorder.keep(leaving[:, None])
    return x + leaving.view(num_branches, *grid, channels).permute(0, 3, 1, 2)


def enter(norm: nn.GroupNorm, x: Tensor, layout: LevelLayout) -> Tensor:
    """[branches, channels, rows, columns] -> the computed tokens [computed tokens, channels], normed"""
    normed = group_norm(x, norm, index=layout.index)
    return normed.permute(0, 2, 3, 1).flatten(0, 2) if layout.index is None else normed


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


def with_sides(unet: Encoder) -> Iterator[tuple[UnetBlock, int]]:
    """Yield every block of the UNet with the side of the square of full-resolution tokens that its tokens stand for."""
    downs = [(block, 2**level) for level, block in enumerate(unet.down_blocks)]
    ups = [(block, 2**level) for level, block in enumerate(reversed(getattr(unet, "up_blocks", ())))]
    middles = [(unet.mid_block, downs[-1][1])] if unet.mid_block is not None else []
    yield from (*downs, *middles, *reversed(ups))


def chosen_shapes(unet: UNet2DConditionModel) -> list[ChosenShape]:
    """The blocks that can choose what they compute; none in a UNet with resnets that are not plain."""
    shapes = [shape for block, side in with_sides(unet) for shape in find_shapes(block, side)]
    return shapes if count_blocks(unet) else []


def find_shapes(block: UnetBlock, side: int) -> Iterator[ChosenShape]:
    for resnet in block.resnets:
        yield ChosenShape(side, resnet.conv1.in_channels, resnet.conv2.out_channels, resnet.conv1.out_channels)
    for transformer in getattr(block, "attentions", None) or ():
        for one in transformer.transformer_blocks:
            yield ChosenShape(side, one.attn1.query_dim, one.attn1.query_dim)


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
