"""Blocks of a UNet that compute some tiles of a picture, and take guesses for the others. Which they compute is known
only when they are reached: `jobs.blocks` chooses.

A resnet convolves the chosen tiles, each with a halo. The halo of its first convolution is the picture itself; that of
the second, and the statistics of the norm before it, come from what the first convolution gave at the other tiles when
it computed them last. A transformer block computes the tokens of the chosen tiles; K and V of all tokens are projected
from what goes into it now. Of an edit that reads activations these are its masked tokens, and the tiles are those that
have any. What is cheap stays dense: the first and the last convolution, resampling, norms and the projections into and
out of a transformer.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor, nn

from instgenie.kernels.group_norm import group_norm
from instgenie.models.layers.linear import Owners, call, linear
from instgenie.models.layers.resnet import go_around
from instgenie.models.unet.choices import ChosenTiles, UnetChoices
from instgenie.models.unet.flow import FlowPart, chosen_block, transformer_block
from instgenie.models.unet.layout import LevelLayout, place_bounds


def convolve_chosen(
    resnet: ResnetBlock2D, x: Tensor, column: Tensor | None, choices: UnetChoices, owners: Owners
) -> Tensor:
    """A plain residual block over the tiles that it chooses. The column [branches, channels] is that of the time."""
    choice = choices.choose(x)
    around = x if resnet.conv_shortcut is None else go_around(resnet.conv_shortcut, x, owners.loras)
    index, tiles = choice.index, choice.tiles
    if index is None:
        inner = choice.middle(call(resnet.conv1, owners, group_norm(x, resnet.norm1, activates=True)), None)
        inner = call(resnet.conv2, owners, group_norm(inner, resnet.norm2, column, activates=True))
        return choice.complete(inner + around, around)
    added = x.new_empty(0, resnet.conv2.out_channels, tiles.side, tiles.side)
    if not len(index):
        choice.middle(None, x.new_empty(0, resnet.conv1.out_channels, tiles.side, tiles.side))
        return choice.complete(added, around)
    window = tiles.windows(group_norm(x, resnet.norm1, activates=True), index)
    inner = choice.middle(None, convolve_windows(resnet.conv1, window, owners, choice.nums))
    window = tiles.windows(group_norm(inner, resnet.norm2, column, activates=True), index)
    return choice.complete(convolve_windows(resnet.conv2, window, owners, choice.nums), around)


def convolve_windows(conv: nn.Conv2d, windows: Tensor, owners: Owners, nums: Sequence[int]) -> Tensor:
    """Convolve windows of pictures [windows, channels, side + 2, side + 2], so many of each branch."""
    out = F.conv2d(windows, conv.weight, conv.bias)
    if owners.loras and owners.patches(conv):
        owners.loras.add_windows(conv, windows, out, nums)
    return out


def flow_chosen(transformer: Transformer2DModel, normed: Tensor, part: FlowPart, grid: tuple[int, int]) -> Tensor:
    """From the computed tokens that enter a transformer to those that leave it [computed tokens, channels]. All blocks
    have one layout."""
    position = part.run.positions[transformer]
    layout = part.layout(position.block)
    tokens = linear(transformer.proj_in, normed, layout.owners)
    for offset, block in enumerate(transformer.transformer_blocks):
        tokens = attend_chosen(block, tokens, part, grid, position.block + offset, position.place + offset)
    return linear(transformer.proj_out, tokens, layout.owners)


def attend_chosen(
    block: BasicTransformerBlock, tokens: Tensor, part: FlowPart, grid: tuple[int, int], number: int, place: int
) -> Tensor:
    """A transformer block over the tiles that it chooses [computed tokens, width]. Of an edit that reads activations
    the tokens are the masked ones; in pictures, zeros are in the place of the others."""
    choices, layout = part.run.choices, part.layout(number)
    assert choices is not None
    x = as_pictures(spread(tokens, layout), grid)
    choice = choices.choose(x, masked=layout.index is not None)
    if choice.index is None:
        out = transformer_block(block, tokens, [part], [layout], number, place)
        choice.complete(as_pictures(spread(out, layout), grid), x)
        return out
    rows = x.new_empty(0, x.shape[1], choice.tiles.side, choice.tiles.side)
    if len(choice.index):
        chosen = lay_out_chosen(choice, layout)
        assert chosen.index is not None
        own = chosen.index if layout.origin is None else layout.origin.flatten()[chosen.index]
        out = chosen_block(block, tokens, own, part, layout, chosen, number, place)
        added = spread(torch.zeros_like(tokens).index_copy(0, own, out - tokens[own]), layout)
        rows = choice.tiles.squares(choice.tiles.cut(as_pictures(added, grid))[choice.index])
    elif layout.index is not None:
        part.run.batch.rows.at(place, layout.cached)  # as every block does: rows that are loaded come in turn
    whole = as_tokens(choice.complete(rows, x))
    return whole if layout.index is None else whole[layout.index]


def spread(tokens: Tensor, layout: LevelLayout) -> Tensor:
    """[computed tokens, width] -> [tokens of all pictures, width], zero where they are not computed"""
    if layout.index is None:
        return tokens
    whole = tokens.new_zeros(layout.num_branches * layout.num_all, tokens.shape[1])
    return whole.index_copy(0, layout.index, tokens)


def as_pictures(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """[tokens of all pictures, width] -> [branches, width, rows, columns]"""
    return tokens.view(-1, *grid, tokens.shape[1]).permute(0, 3, 1, 2)


def as_tokens(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).flatten(0, 2)


def lay_out_chosen(choice: ChosenTiles, whole: LevelLayout) -> LevelLayout:
    assert choice.index is not None
    index = choice.tiles.tokens(choice.index)
    if whole.origin is not None:
        index = index[whole.origin.flatten()[index] >= 0]
    none = torch.full((whole.num_branches * whole.num_all,), -1, device=index.device)
    origin = none.index_copy(0, index, torch.arange(len(index), device=index.device))
    counts = torch.bincount(index // whole.num_all, minlength=whole.num_branches).tolist()
    return LevelLayout(
        num_computed=len(index),
        num_all=whole.num_all,
        cached=(True,) * whole.num_branches,
        index=index,
        origin=origin.view(whole.num_branches, -1),
        bounds=place_bounds(counts, index.device),
        loras=whole.loras,
    )
