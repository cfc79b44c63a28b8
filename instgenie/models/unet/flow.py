"""The ragged part of a UNet: transformers over the packed tokens of pictures of one size, or of several. Knows how they
compute; knows no convolution.

A cached block computes only the masked tokens of its level: attention reads keys of all tokens, each at its own place.
Tokens of several sizes lie one part after the other: products and norms see all of them at once, attention and what is
read of activations each part apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor, nn

from instgenie.jobs.activations import Kind
from instgenie.jobs.rows import BatchRows
from instgenie.jobs.tokens import concat
from instgenie.kernels.fill import fill_rows
from instgenie.kernels.layer_norm import add_layer_norm, layer_norm
from instgenie.kernels.quantize import Rows
from instgenie.kernels.streams import beside
from instgenie.models.layers.feed_forward import feed_forward, first_layer
from instgenie.models.layers.fp8_linear import reads_fp8
from instgenie.models.layers.linear import EACH_BRANCH, Owners, join, linear, linears
from instgenie.models.unet.attention import attend
from instgenie.models.unet.batch import Positions, UnetBatch
from instgenie.models.unet.choices import UnetChoices
from instgenie.models.unet.layout import LevelLayout


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
    choices: UnetChoices | None = None  # of what its blocks compute; None: they do not choose

    @cached_property
    def each_branch(self) -> Owners:
        """Owners of one row, or one picture, per branch."""
        return EACH_BRANCH.of(self.batch.loras)


class FlowPart(NamedTuple):
    """The pictures of one size at a level."""

    run: Pass
    num_all: int  # tokens of a whole picture at this level

    def layout(self, block: int) -> LevelLayout:
        return self.run.batch.layout(block, self.num_all)


def flow(transformer: Transformer2DModel, normed: Tensor, parts: Sequence[FlowPart]) -> Tensor:
    """From the computed tokens that enter a transformer to those that leave it [computed tokens of all parts,
    channels], in the layouts of its first and of its last block."""
    run = parts[0].run
    position, recorder = run.positions[transformer], run.recorder
    layouts = [part.layout(position.block) for part in parts]
    tokens = linear(transformer.proj_in, normed, owners_of(layouts))
    for offset, block in enumerate(transformer.transformer_blocks):
        place = position.place + offset
        coming = [part.layout(position.block + offset) for part in parts]
        if coming != layouts:
            own = zip(layouts, coming, split(tokens, layouts), parts, strict=True)
            tokens = concat([turn(one, to, some, part.run.batch.rows, place) for one, to, some, part in own])
            layouts = coming
        if recorder:
            kept = keep_block(block, tokens, recorder.kind, layouts[0].owners)
            recorder.keep(kept.unflatten(1, (layouts[0].num_branches, -1)).transpose(0, 1))
        tokens = transformer_block(block, tokens, parts, layouts, position.block + offset, place)
    return linear(transformer.proj_out, tokens, owners_of(layouts))


def owners_of(layouts: Sequence[LevelLayout]) -> Owners | None:
    """The owners of the computed tokens. Where pictures have several sizes no branch has a LoRA."""
    return layouts[0].owners if len(layouts) == 1 else None


def split(tokens: Tensor, layouts: Sequence[LevelLayout]) -> Sequence[Tensor]:
    return [tokens] if len(layouts) == 1 else tokens.split([layout.num_computed for layout in layouts])


def turn(layout: LevelLayout, to: LevelLayout, tokens: Tensor, rows: BatchRows, place: int) -> Tensor:
    """The tokens in the layout of a block: where a job's plan turns, its unmasked tokens leave, or come back from the
    activations."""
    if layout is to:
        return tokens
    whole = make_whole(layout, tokens, rows, place, to.cached).flatten(0, 1)
    return whole if to.index is None else whole[to.index]


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
    block: BasicTransformerBlock,
    tokens: Tensor,
    parts: Sequence[FlowPart],
    layouts: Sequence[LevelLayout],
    number: int,
    place: int,
) -> Tensor:
    """[computed tokens, width]; plans count the block as `number`, activations as `place`."""
    inner = layer_norm(tokens, block.norm1, reads_fp8(block.attn1.to_q))
    owners = owners_of(layouts)
    if reads_own_keys(parts, layouts):
        queries, *own_keys = linears(projections(block), inner, owners)
    else:
        queries, own_keys = linear(block.attn1.to_q, inner, owners), [tokens, tokens]  # which are not read
    keys = find_keys(block, tokens, own_keys, parts, layouts, place)
    for part, layout, own, (k, v) in zip(parts, layouts, split(tokens, layouts), keys, strict=True):
        for branch, kind in enumerate(part.run.batch.kept_kinds):
            if kind:
                kept = [k[branch], v[branch]] if kind == "kv" else [rows_of(layout, own, branch)]
                part.run.batch.rows.keep(place, branch, kept)
    return attend_and_feed(block, tokens, queries, keys, parts, layouts, number)


def chosen_block(
    block: BasicTransformerBlock,
    tokens: Tensor,
    index: Tensor,
    part: FlowPart,
    whole: LevelLayout,
    chosen: LevelLayout,
    number: int,
    place: int,
) -> Tensor:
    """The chosen tokens behind a block [chosen tokens, width], those at the index of all computed tokens that go into
    it. K and V of all of these are projected."""
    is_read = reads_own_keys([part], [whole])
    own_keys = project_keys(block, norm_keys(block, tokens), whole.owners) if is_read else [tokens, tokens]
    keys = find_keys(block, tokens, own_keys, [part], [whole], place)
    own = tokens[index]
    inner = layer_norm(own, block.norm1, reads_fp8(block.attn1.to_q))
    queries = linear(block.attn1.to_q, inner, chosen.owners)
    return attend_and_feed(block, own, queries, keys, [part], [chosen], number)


def attend_and_feed(
    block: BasicTransformerBlock,
    tokens: Tensor,
    queries: Tensor,
    keys: Sequence[tuple[Tensor, ...]],
    parts: Sequence[FlowPart],
    layouts: Sequence[LevelLayout],
    number: int,
) -> Tensor:
    """The rest of a block, from the queries and the keys of its first attention."""
    owners = owners_of(layouts)
    attended = attend_heads(block.attn1, queries, keys, parts, layouts)
    tokens, inner = add_layer_norm(tokens, attended, block.norm2, reads_fp8(block.attn2.to_q))
    crossed = [part.run.batch.crossed[number].unbind() for part in parts]
    attended = attend_heads(block.attn2, linear(block.attn2.to_q, inner, owners), crossed, parts, layouts)
    tokens, inner = add_layer_norm(tokens, attended, block.norm3, reads_fp8(first_layer(block.ff)))
    return tokens + feed_forward(block.ff, inner, owners)


def rows_of(layout: LevelLayout, tokens: Tensor, branch: int) -> Tensor:
    """The rows [all tokens, width] of a branch that computes every token."""
    if layout.origin is None:
        return tokens.view(layout.num_branches, layout.num_all, -1)[branch]
    return tokens[layout.origin[branch]]


def attend_heads(
    attn: Attention,
    queries: Tensor,
    keys: Sequence[tuple[Tensor, ...]],
    parts: Sequence[FlowPart],
    layouts: Sequence[LevelLayout],
) -> Tensor:
    """Attend from packed tokens [computed tokens, width] to each branch's keys and values [branches, keys, width]. The
    part with the most pairs has work enough for a GPU, others may have little: they attend beside it."""
    each = [
        partial(attend_part, attn, part, layout, query, *there)
        for part, layout, query, there in zip(parts, layouts, split(queries, layouts), keys, strict=True)
    ]
    if len(each) > 1:
        nums = [layout.num_computed * k.shape[1] for layout, (k, _) in zip(layouts, keys, strict=True)]
        largest = nums.index(max(nums))
        others = each[:largest] + each[largest + 1 :]
        attended, last = beside(lambda: [one() for one in others], each[largest], queries)
        attended.insert(largest, last)
    else:
        attended = [each[0]()]
    return linear(attn.to_out[0], concat(attended), owners_of(layouts))


def attend_part(attn: Attention, part: FlowPart, layout: LevelLayout, query: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, keys, values = (x.unflatten(-1, (attn.heads, -1)) for x in (query, k, v))
    return attend(layout, q, keys, values, part.run.batch.key_bounds.get(k.shape[1])).flatten(1)


def find_keys(
    block: BasicTransformerBlock,
    tokens: Tensor,
    own: Sequence[Tensor],
    parts: Sequence[FlowPart],
    layouts: Sequence[LevelLayout],
    place: int,
) -> list[tuple[Tensor, Tensor]]:
    """Per part, K and V of all tokens, each at its place [branches, all tokens, width]: those of computed tokens are
    their `own`, others are as the activations keep them, or projected from Y as at registration."""
    pairs = zip(*(split(one, layouts) for one in own), strict=True)
    return [
        complete_keys(block, some, pair, part, layout, place)
        for some, pair, part, layout in zip(split(tokens, layouts), pairs, parts, layouts, strict=True)
    ]


def reads_own_keys(parts: Sequence[FlowPart], layouts: Sequence[LevelLayout]) -> bool:
    """False if K and V of all tokens are projected from Y, in all parts."""
    both = zip(parts, layouts, strict=True)
    return any(layout.origin is None or any(reads(part, layout, "kv")) for part, layout in both)


def reads(part: FlowPart, layout: LevelLayout, kind: Kind) -> list[bool]:
    """Per branch, whether it reads activations of a kind."""
    return [narrow and own == kind for narrow, own in zip(layout.cached, part.run.batch.kinds, strict=True)]


def complete_keys(
    block: BasicTransformerBlock,
    tokens: Tensor,
    own: tuple[Tensor, Tensor],
    part: FlowPart,
    layout: LevelLayout,
    place: int,
) -> tuple[Tensor, Tensor]:
    """K and V of a part, of which those of the computed tokens are `own`, where they are read."""
    shape = layout.num_branches, layout.num_all, tokens.shape[1]
    has_kv, has_y, rows = reads(part, layout, "kv"), reads(part, layout, "y"), part.run.batch.rows
    if layout.origin is None:
        return own[0].view(shape), own[1].view(shape)
    keys = projected = tokens.new_empty(2, *shape)
    if any(has_y):
        whole = tokens.new_empty(1, *shape)
        fill_rows(rows.at(place, has_y), layout.origin, [tokens], whole)
        inner_whole = norm_keys(block, whole.view(-1, shape[2]))
        projected = torch.stack([k.view(shape) for k in project_keys(block, inner_whole, layout.whole_owners)])
    if any(has_kv):
        fill_rows(rows.at(place, has_kv), layout.origin, own, keys)
    if any(has_y) and any(has_kv):
        of_kv = torch.tensor(has_kv).to(tokens.device, non_blocking=True)
        keys = torch.where(of_kv[:, None, None], keys, projected)
    k, v = keys if any(has_kv) else projected
    return k, v


def keep_block(block: BasicTransformerBlock, tokens: Tensor, kind: Kind, owners: Owners) -> Tensor:
    """What activations keep of a block [2 or 1, tokens, width], from the tokens that go into it."""
    return tokens[None] if kind == "y" else torch.stack(list(project_keys(block, norm_keys(block, tokens), owners)))


def norm_keys(block: BasicTransformerBlock, tokens: Tensor) -> Rows:
    return layer_norm(tokens, block.norm1, reads_fp8(block.attn1.to_k))


def project_keys(block: BasicTransformerBlock, inner: Rows, owners: Owners | None) -> Sequence[Tensor]:
    """K and V of normed tokens, each [tokens, width]."""
    return linears(projections(block)[1:], inner, owners)


def projections(block: BasicTransformerBlock) -> list[nn.Module]:
    """The layers of queries, keys and values of a block, which read the same rows."""
    return [block.attn1.to_q, block.attn1.to_k, block.attn1.to_v]


def join_projections(network: nn.Module) -> None:
    """Make one product of the queries, keys and values of each block."""
    for module in network.modules():
        if isinstance(module, BasicTransformerBlock):
            join(projections(module))
