"""Stable Diffusion's UNets over jobs: walks the sub-modules of diffusers' UNet2DConditionModel, block by block.

Knows how such a UNet computes; owns no weights and no state. Two parts that meet in `transform` alone:
the convolutional part (resnets, resampling) sees whole pictures of one size, one for each branch; the ragged part (the
transformers at every level) sees packed tokens. Channels lie last in memory, so that a picture and its tokens are two
views of one tensor. Through a cached block only the masked tokens of its level flow: attention reads keys of all
tokens, each at its own place, and what leaves the transformer for the convolutions is filled up with what left it at
registration.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from diffusers.models.activations import GEGLU
from diffusers.models.attention import BasicTransformerBlock, FeedForward
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor, nn

from instgenie.cost.network import BlockShape, NetworkShape
from instgenie.jobs.activations import Kind
from instgenie.jobs.job import Branch, Job, JobRows, Rows
from instgenie.kernels.fill import fill_rows
from instgenie.kernels.geglu import geglu
from instgenie.kernels.group_norm import group_norm
from instgenie.kernels.layer_norm import add_layer_norm, layer_norm
from instgenie.models.layers.products import products
from instgenie.models.layers.resnet import as_product, is_plain
from instgenie.models.layers.resnet import convolve as convolve_plain
from instgenie.models.unet.flow import Flow, FlowKey, attend, bounds_of_keys, lay_out_all

UnetBlock: TypeAlias = Any  # one of diffusers' down, middle or up blocks


@dataclass(frozen=True)
class Place:
    """Where in the pass a transformer stands."""

    block: int  # its first, counted as plans count
    index: int  # of what activations keep of that block
    num_blocks: int
    side: int  # of the square of tokens that one of its tokens stands for


Places: TypeAlias = dict[Transformer2DModel, Place]


@dataclass(frozen=True)
class Watch:
    """Hands over what activations keep, in the order of the pass."""

    kind: Kind
    keep: Callable[[Tensor], None]


@dataclass(frozen=True, eq=False)
class Group:
    """One step of jobs of one size; every branch is a picture of its own."""

    jobs: tuple[Job, ...]
    kinds: tuple[Kind | None, ...]  # of each branch, of the activations it reads
    cached: tuple[tuple[bool, ...], ...]  # of each block, of each branch
    sample: Tensor  # [branches, latent + conditioning channels, rows, columns]
    timestep: Tensor  # [branches]
    pooled: Tensor  # [branches, pooled channels]
    sizes: Tensor  # [branches, 6], original height and width, crop from top and left, target height and width
    crossed: tuple[Tensor, ...]  # of each block, K and V of the text [2, branches, text tokens, width]
    flows: Mapping[FlowKey, Flow]
    key_bounds: Mapping[int, Tensor]  # by the number of keys of a branch [branches + 1]
    rows: Rows  # of the branches' activations

    def flow(self, block: int, num_all: int) -> Flow:
        return self.flows[num_all, self.cached[block]]

    @property
    def signature(self) -> Hashable:
        """Groups of one signature differ in nothing but the values of their columns and rows."""
        counts = tuple((key, flow.num_flowing, flow.is_even) for key, flow in self.flows.items())
        return self.sample.shape, self.crossed[0].shape, self.kinds, self.cached, counts

    @property
    def columns(self) -> dict[str, Tensor]:
        """All that one pass reads, but for rows."""
        found = {name: getattr(self, name) for name in ("sample", "timestep", "pooled", "sizes")}
        found |= {f"crossed {block}": keys for block, keys in enumerate(self.crossed)}
        found |= {f"bounds of {num_keys}": bounds for num_keys, bounds in self.key_bounds.items()}
        for number, flow in enumerate(self.flows.values()):
            found |= {f"{name} {number}": column for name, column in flow.columns.items()}
        return found

    def over(self, columns: Mapping[str, Tensor], rows: Rows) -> "Group":
        """The same pass over other tensors."""
        flows = {
            key: flow.over({name: columns[f"{name} {number}"] for name in flow.columns})
            for number, (key, flow) in enumerate(self.flows.items())
        }
        bounds = {num_keys: columns[f"bounds of {num_keys}"] for num_keys in self.key_bounds}
        crossed = tuple(columns[f"crossed {block}"] for block in range(len(self.crossed)))
        own: dict[str, Any] = {name: columns[name] for name in ("sample", "timestep", "pooled", "sizes")}
        return replace(self, jobs=(), crossed=crossed, flows=flows, key_bounds=bounds, rows=rows, **own)

    @property
    def readers(self) -> list[tuple[Job, int]]:
        """Whose rows are read, and of which branch; one for each of the pass's branches."""
        return [(job, branch) for job in self.jobs for branch in range(len(job.branches))]

    def deal(self, predicted: Tensor) -> list[list[Tensor]]:
        """[branches, channels, rows, columns] -> to each job, of each branch, [tokens, channels]"""
        branches = iter(predicted.permute(0, 2, 3, 1).flatten(1, 2))
        return [[next(branches) for _ in job.branches] for job in self.jobs]


@dataclass(frozen=True, eq=False)
class Pass:
    """What every part of one pass reads."""

    group: Group
    places: Places
    time: Tensor  # [branches, width]
    active: Tensor  # [branches, width], as it goes into linear layers
    watch: Watch | None = None


def group_jobs(
    jobs: Sequence[Job],
    places: Places,
    cross: Callable[[tuple[Branch, ...]], tuple[Tensor, ...]],
    pixels_per_latent: int,
    pads: bool = False,
) -> Group:
    """Jobs of one size. Where it pads, as many masked tokens flow as of many other masks: one of them flows several
    times."""
    members = [(job, branch) for job in jobs for branch in range(len(job.branches))]
    branches = tuple(job.branches[branch] for job, branch in members)
    device, dtype = branches[0].text.device, branches[0].text.dtype
    height, width = (side * pixels_per_latent for side in jobs[0].grid)
    num_blocks = sum(place.num_blocks for place in places.values())
    plans = [job.present_plan or (False,) * num_blocks for job, _ in members]
    cached = tuple(zip(*plans, strict=True))
    flows = lay_out_all([job for job, _ in members], flow_keys(places, cached, len(jobs[0].masked)), pads)
    key_counts = {len(branches[0].text), *(num_all for num_all, _ in flows)}
    return Group(
        jobs=tuple(jobs),
        kinds=tuple(
            job.activations.kind if job.activations and any(plan) else None
            for (job, _), plan in zip(members, plans, strict=True)
        ),
        cached=cached,
        sample=torch.stack([seen for job in jobs for seen in [see(job)] * len(job.branches)])
        .to(dtype)
        .permute(0, 3, 1, 2),
        timestep=torch.stack([job.timestep for job, _ in members]),
        pooled=torch.stack([branch.pooled for branch in branches]),
        sizes=size_numbers(height, width, device, dtype).expand(len(members), 6),
        crossed=cross(branches),
        flows=flows,
        key_bounds={num_keys: bounds_of_keys(len(members), num_keys, device) for num_keys in key_counts},
        rows=JobRows(tuple(members)),
    )


@lru_cache(maxsize=16)  # a copy to the device waits for it
def size_numbers(height: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:  # [1, 6]
    return torch.tensor([[height, width, 0, 0, height, width]], device=device, dtype=dtype)


def see(job: Job) -> Tensor:  # [rows, columns, latent + conditioning channels]
    tokens = torch.cat([job.schedule.scaled(job.latents, job.step), job.conditioning], dim=1)
    return tokens.view(*job.grid, -1)


def cross(unet: UNet2DConditionModel, branches: tuple[Branch, ...]) -> tuple[Tensor, ...]:
    """K and V of the text in every block [2, branches, text tokens, width]: the same at all steps."""
    text = torch.stack([branch.text for branch in branches])
    attentions = [block.attn2 for transformer in transformers(unet) for block in transformer.transformer_blocks]
    return tuple(torch.stack([attn.to_k(text), attn.to_v(text)]) for attn in attentions)


def flow_keys(places: Places, cached: tuple[tuple[bool, ...], ...], num_tokens: int) -> list[FlowKey]:
    """The flows of all blocks, each once."""
    return list(
        dict.fromkeys(
            (num_tokens // place.side**2, cached[block])
            for place in places.values()
            for block in range(place.block, place.block + place.num_blocks)
        )
    )


def predict(unet: UNet2DConditionModel, places: Places, group: Group, watch: Watch | None = None) -> Tensor:
    """[branches, channels, rows, columns]"""
    time = embed_time(unet, group)
    run = Pass(group, places, time, F.silu(time), watch)
    x = unet.conv_in(group.sample)
    skips = [x]
    for block in unet.down_blocks:
        x = down(block, x, run, skips)
    x = middle(unet.mid_block, x, run)
    for block in unet.up_blocks:
        x = up(block, x, run, skips)
    if isinstance(unet.conv_act, nn.SiLU):
        out: Tensor = unet.conv_out(group_norm(x, unet.conv_norm_out, activates=True))
    else:
        out = unet.conv_out(unet.conv_act(unet.conv_norm_out(x)))
    return out


def embed_time(unet: UNet2DConditionModel, group: Group) -> Tensor:  # [branches, width]
    embedded: Tensor = unet.time_embedding(unet.get_time_embed(group.sample, group.timestep))
    added = unet.get_aug_embed(embedded, None, {"text_embeds": group.pooled, "time_ids": group.sizes})
    return embedded if added is None else embedded + added


def down(block: UnetBlock, x: Tensor, run: Pass, skips: list[Tensor]) -> Tensor:
    for resnet, transformer in pairs(block):
        x = transform(transformer, convolve(resnet, x, run), run)
        skips.append(x)
    for sampler in block.downsamplers or ():
        x = sampler(x)
        skips.append(x)
    return x


def middle(block: UnetBlock | None, x: Tensor, run: Pass) -> Tensor:
    if block is None:
        return x
    first, *others = block.resnets
    x = convolve(first, x, run)
    for resnet, transformer in zip(others, block.attentions, strict=True):
        x = convolve(resnet, transform(transformer, x, run), run)
    return x


def up(block: UnetBlock, x: Tensor, run: Pass, skips: list[Tensor]) -> Tensor:
    for resnet, transformer in pairs(block):
        x = transform(transformer, convolve(resnet, torch.cat([x, skips.pop()], dim=1), run), run)
    for sampler in block.upsamplers or ():
        x = sampler(x)
    return x


def pairs(block: UnetBlock) -> Iterator[tuple[nn.Module, Transformer2DModel | None]]:
    """Resnets, each with the transformer behind it where the level has any."""
    transformers = getattr(block, "attentions", None) or [None] * len(block.resnets)
    return zip(block.resnets, transformers, strict=True)


def convolve(resnet: ResnetBlock2D, x: Tensor, run: Pass) -> Tensor:
    if is_plain(resnet):
        return convolve_plain(resnet, x, run.active)
    out: Tensor = resnet(x, run.time)
    return out


def transformers(unet: UNet2DConditionModel) -> list[Transformer2DModel]:
    """In the order of the pass."""
    blocks = (*unet.down_blocks, unet.mid_block, *unet.up_blocks)
    return [transformer for block in blocks for transformer in getattr(block, "attentions", ())]


def find_places(unet: UNet2DConditionModel) -> Places:
    found = [
        (transformer, len(transformer.transformer_blocks), side)
        for block, side in with_sides(unet)
        for transformer in getattr(block, "attentions", ())
    ]
    firsts = accumulate((num_blocks for _, num_blocks, _ in found), initial=0)
    # behind the blocks of each transformer, activations keep one thing more: what left it
    return {
        transformer: Place(block, block + before, num_blocks, side)
        for before, ((transformer, num_blocks, side), block) in enumerate(zip(found, firsts, strict=False))
    }


def transform(transformer: Transformer2DModel | None, x: Tensor, run: Pass) -> Tensor:
    """The ragged part, between two convolutions [branches, channels, rows, columns]."""
    if transformer is None:
        return x
    group, place = run.group, run.places[transformer]
    num_branches, channels, *grid = x.shape
    num_all = x.shape[2] * x.shape[3]
    flow = group.flow(place.block, num_all)
    tokens = project(transformer.proj_in, enter(transformer.norm, x, flow))
    for offset, block in enumerate(transformer.transformer_blocks):
        index = place.index + offset
        flow, tokens = turn(flow, group.flow(place.block + offset, num_all), tokens, group.rows, index)
        if run.watch:
            run.watch.keep(keep_block(block, tokens, run.watch.kind).unflatten(1, (num_branches, -1)).transpose(0, 1))
        tokens = transformer_block(block, tokens, group, flow, place.block + offset, index)
    leaving = make_whole(flow, project(transformer.proj_out, tokens), group.rows, place.index + place.num_blocks)
    if run.watch:
        run.watch.keep(leaving[:, None])
    return x + leaving.view(num_branches, *grid, channels).permute(0, 3, 1, 2)


def enter(norm: nn.GroupNorm, x: Tensor, flow: Flow) -> Tensor:
    """[branches, channels, rows, columns] -> the flowing tokens [flowing tokens, channels], normed"""
    normed = group_norm(x, norm, index=flow.index)
    return normed.permute(0, 2, 3, 1).flatten(0, 2) if flow.index is None else normed


def turn(flow: Flow, to: Flow, tokens: Tensor, rows: Rows, index: int) -> tuple[Flow, Tensor]:
    """The flow of a block and the tokens in it: where a job's plan turns, its unmasked tokens leave, or come back from
    the activations."""
    if flow is to:
        return flow, tokens
    whole = make_whole(flow, tokens, rows, index, to.cached).flatten(0, 1)
    return to, whole if to.index is None else whole[to.index]


def make_whole(
    flow: Flow, tokens: Tensor, rows: Rows, index: int, still_cached: tuple[bool, ...] | None = None
) -> Tensor:
    """[flowing tokens, channels] -> [branches, all tokens, channels]; the others from the activations, but for branches
    that stay cached, of which anything may stand there."""
    if flow.origin is None:
        return tokens.reshape(flow.num_branches, flow.num_all, -1)
    whole = tokens.new_empty(1, flow.num_branches, flow.num_all, tokens.shape[1])
    stays = still_cached or (False,) * flow.num_branches
    wanted = [narrow and not stay for narrow, stay in zip(flow.cached, stays, strict=True)]
    fill_rows(rows.at(index, wanted), flow.origin, [tokens], whole)
    return whole[0]


def project(layer: nn.Module, tokens: Tensor) -> Tensor:
    """Linear, or a convolution of one by one, over packed tokens [tokens, channels]."""
    projected: Tensor = as_product(layer, tokens) if isinstance(layer, nn.Conv2d) else layer(tokens)
    return projected


def transformer_block(
    block: BasicTransformerBlock, tokens: Tensor, group: Group, flow: Flow, number: int, index: int
) -> Tensor:
    """[flowing tokens, width]; the number counts as plans do, the index as activations."""
    inner = layer_norm(tokens, block.norm1)
    k, v = find_keys(block, tokens, inner, group, flow, index)
    attended = attend_heads(block.attn1, inner, k, v, group, flow)
    tokens, inner = add_layer_norm(tokens, attended, block.norm2)
    k, v = group.crossed[number]
    attended = attend_heads(block.attn2, inner, k, v, group, flow)
    tokens, inner = add_layer_norm(tokens, attended, block.norm3)
    return tokens + feed_forward(block.ff, inner)


def feed_forward(ff: FeedForward, inner: Tensor) -> Tensor:
    gate, *others = ff.net
    fed: Tensor = geglu(gate.proj(inner)) if isinstance(gate, GEGLU) else gate(inner)
    for layer in others:
        fed = layer(fed)
    return fed


def attend_heads(attn: Attention, inner: Tensor, k: Tensor, v: Tensor, group: Group, flow: Flow) -> Tensor:
    """Packed tokens [flowing tokens, width] to each branch's keys and values [branches, keys, width]."""
    q, k, v = (x.unflatten(-1, (attn.heads, -1)) for x in (attn.to_q(inner), k, v))
    out: Tensor = attn.to_out[0](attend(flow, q, k, v, group.key_bounds[k.shape[1]]).flatten(1))
    return out


def find_keys(
    block: BasicTransformerBlock, tokens: Tensor, inner: Tensor, group: Group, flow: Flow, index: int
) -> tuple[Tensor, Tensor]:
    """K and V of all tokens, each at its place [branches, all tokens, width]. Of tokens that do not flow: as they are
    in the activations, or projected from Y as at registration."""
    shape = flow.num_branches, flow.num_all, tokens.shape[1]
    if flow.origin is None:
        return block.attn1.to_k(inner).view(shape), block.attn1.to_v(inner).view(shape)
    has_kv, has_y = (
        [narrow and kind == one for narrow, kind in zip(flow.cached, group.kinds, strict=True)] for one in ("kv", "y")
    )
    keys = projected = tokens.new_empty(2, *shape)
    if any(has_y):
        whole = tokens.new_empty(1, *shape)
        fill_rows(group.rows.at(index, has_y), flow.origin, [tokens], whole)
        projected = torch.stack([part.view(shape) for part in keys_values(block, whole.view(-1, shape[2]))])
    if any(has_kv):
        k, v = block.attn1.to_k(inner), block.attn1.to_v(inner)
        fill_rows(group.rows.at(index, has_kv), flow.origin, [k, v], keys)
    if any(has_y) and any(has_kv):
        of_kv = torch.tensor(has_kv).to(tokens.device, non_blocking=True)
        keys = torch.where(of_kv[:, None, None], keys, projected)
    k, v = keys if any(has_kv) else projected
    return k, v


def keep_block(block: BasicTransformerBlock, tokens: Tensor, kind: Kind) -> Tensor:  # [2 or 1, tokens, width]
    return tokens[None] if kind == "y" else torch.stack(keys_values(block, tokens))


def keys_values(block: BasicTransformerBlock, tokens: Tensor) -> tuple[Tensor, Tensor]:  # each [tokens, width]
    inner = layer_norm(tokens, block.norm1)
    return block.attn1.to_k(inner), block.attn1.to_v(inner)


def describe(unet: UNet2DConditionModel) -> NetworkShape:
    """What projects into a transformer counts with its first block, what projects out of it with its last."""
    units = [
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
    blocks = tuple(block for unit in units for block in unit)
    return NetworkShape(blocks, tuple(len(unit) for unit in units), per_token, per_branch)


def with_sides(unet: UNet2DConditionModel) -> Iterator[tuple[UnetBlock, int]]:
    """Every block of the UNet, and the side of the square of tokens that one of its tokens stands for."""
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
