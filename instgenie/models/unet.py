"""Stable Diffusion's UNets over jobs: walks the sub-modules of diffusers' UNet2DConditionModel, block by block.

Knows how such a UNet computes; owns no weights and no state. Two parts that meet in `transform` alone:
the convolutional part (resnets, resampling) sees whole pictures of one size, one for each branch; the ragged part (the
transformers at every level) sees packed tokens. Through a cached block only the masked tokens of its level flow:
attention reads, behind their keys, those of the tokens that do not flow, and what leaves the transformer for the
convolutions is filled up with what left it at registration.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor, nn

from instgenie.activations import Kind
from instgenie.batch import Job, concat
from instgenie.kernels.gather import gather_rows
from instgenie.models.products import products
from instgenie.network import BlockShape, NetworkShape

UnetBlock: TypeAlias = Any  # one of diffusers' down, middle or up blocks


@dataclass(frozen=True, eq=False)
class Member:
    """One branch of a job."""

    job: Job
    branch: int


@dataclass(frozen=True)
class Place:
    """Where in the pass a transformer stands."""

    block: int  # its first, counted as plans count
    index: int  # of what activations keep of that block


@dataclass(frozen=True)
class Watch:
    """Hands over what activations keep, in the order of the pass."""

    kind: Kind
    keep: Callable[[Tensor], None]


@dataclass(frozen=True, eq=False)
class Group:
    """One step of jobs of one size; every branch is a picture of its own."""

    members: tuple[Member, ...]
    sample: Tensor  # [branches, latent + conditioning channels, rows, columns]
    timestep: Tensor  # [branches]
    text: Tensor  # [branches, text tokens, width]
    pooled: Tensor  # [branches, pooled channels]
    sizes: Tensor  # [branches, 6], original height and width, crop from top and left, target height and width


@dataclass(frozen=True, eq=False)
class Pass:
    """What every part of one pass reads."""

    members: tuple[Member, ...]
    time: Tensor  # [branches, width]
    text: Tensor  # [branches, text tokens, width]
    places: dict[Transformer2DModel, Place]
    watch: Watch | None = None


def group_jobs(jobs: Sequence[Job], pixels_per_latent: int) -> Group:
    """Jobs of one size."""
    members = tuple(Member(job, branch) for job in jobs for branch in range(len(job.branches)))
    branches = [member.job.branches[member.branch] for member in members]
    device, dtype = branches[0].text.device, branches[0].text.dtype
    height, width = (side * pixels_per_latent for side in jobs[0].grid)
    return Group(
        members=members,
        sample=torch.stack([see(member.job) for member in members]).to(dtype),
        timestep=torch.stack([member.job.timestep for member in members]),
        text=torch.stack([branch.text for branch in branches]),
        pooled=torch.stack([branch.pooled for branch in branches]),
        sizes=size_numbers(height, width, device, dtype).expand(len(members), 6),
    )


@lru_cache(maxsize=16)  # a copy to the device waits for it
def size_numbers(height: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:  # [1, 6]
    return torch.tensor([[height, width, 0, 0, height, width]], device=device, dtype=dtype)


def see(job: Job) -> Tensor:  # [latent + conditioning channels, rows, columns]
    tokens = torch.cat([job.schedule.scaled(job.latents, job.step), job.conditioning], dim=1)
    return tokens.T.reshape(-1, *job.grid)


def predict(unet: UNet2DConditionModel, group: Group, watch: Watch | None = None) -> Tensor:
    """[branches, channels, rows, columns]"""
    run = Pass(group.members, embed_time(unet, group), group.text, find_places(unet), watch)
    x = unet.conv_in(group.sample)
    skips = [x]
    for block in unet.down_blocks:
        x = down(block, x, run, skips)
    x = middle(unet.mid_block, x, run)
    for block in unet.up_blocks:
        x = up(block, x, run, skips)
    out: Tensor = unet.conv_out(unet.conv_act(unet.conv_norm_out(x)))
    return out


def embed_time(unet: UNet2DConditionModel, group: Group) -> Tensor:  # [branches, width]
    embedded: Tensor = unet.time_embedding(unet.get_time_embed(group.sample, group.timestep))
    added = unet.get_aug_embed(embedded, group.text, {"text_embeds": group.pooled, "time_ids": group.sizes})
    return embedded if added is None else embedded + added


def down(block: UnetBlock, x: Tensor, run: Pass, skips: list[Tensor]) -> Tensor:
    for resnet, transformer in pairs(block):
        x = transform(transformer, resnet(x, run.time), run)
        skips.append(x)
    for sampler in block.downsamplers or ():
        x = sampler(x)
        skips.append(x)
    return x


def middle(block: UnetBlock | None, x: Tensor, run: Pass) -> Tensor:
    if block is None:
        return x
    first, *others = block.resnets
    x = first(x, run.time)
    for resnet, transformer in zip(others, block.attentions, strict=True):
        x = resnet(transform(transformer, x, run), run.time)
    return x


def up(block: UnetBlock, x: Tensor, run: Pass, skips: list[Tensor]) -> Tensor:
    for resnet, transformer in pairs(block):
        x = transform(transformer, resnet(torch.cat([x, skips.pop()], dim=1), run.time), run)
    for sampler in block.upsamplers or ():
        x = sampler(x)
    return x


def pairs(block: UnetBlock) -> Iterator[tuple[nn.Module, Transformer2DModel | None]]:
    """Resnets, each with the transformer behind it where the level has any."""
    transformers = getattr(block, "attentions", None) or [None] * len(block.resnets)
    return zip(block.resnets, transformers, strict=True)


def transformers(unet: UNet2DConditionModel) -> list[Transformer2DModel]:
    """In the order of the pass."""
    blocks = (*unet.down_blocks, unet.mid_block, *unet.up_blocks)
    return [transformer for block in blocks for transformer in getattr(block, "attentions", ())]


def find_places(unet: UNet2DConditionModel) -> dict[Transformer2DModel, Place]:
    found = transformers(unet)
    firsts = accumulate((len(transformer.transformer_blocks) for transformer in found), initial=0)
    # behind the blocks of each transformer, activations keep one thing more: what left it
    return {
        transformer: Place(block, block + before)
        for before, (transformer, block) in enumerate(zip(found, firsts, strict=False))
    }


@dataclass(frozen=True, eq=False)
class Flow:
    """Which tokens of one level flow: of each branch all, or the masked alone. Branches lie one after the other."""

    members: tuple[Member, ...]
    cached: tuple[bool, ...]  # of each branch: whether its masked tokens flow alone
    num_all: int  # tokens of a whole picture at this level

    @cached_property
    def num_flowing(self) -> list[int]:
        return [
            len(member.job.level(self.num_all).inside) if cached else self.num_all
            for member, cached in zip(self.members, self.cached, strict=True)
        ]

    def gather(self, rows: Tensor) -> Tensor:
        """[branches, all tokens, channels] -> [flowing tokens, channels]"""
        if not any(self.cached):
            return rows.flatten(0, 1)
        whole = zip(rows, self.members, self.cached, strict=True)
        return concat([row[member.job.level(self.num_all).inside] if cached else row for row, member, cached in whole])

    def turn(self, tokens: Tensor, block: int, index: int) -> tuple["Flow", Tensor]:
        """The flow of a block and the tokens in it: where a job's plan turns, its unmasked tokens leave, or come back
        from the activations."""
        flow = lay_out(self.members, block, self.num_all)
        if flow.cached == self.cached:
            return self, tokens
        turns = zip(tokens.split(self.num_flowing), self.members, self.cached, flow.cached, strict=True)
        return flow, concat([self.turn_one(*turn, index) for turn in turns])

    def turn_one(self, part: Tensor, member: Member, before: bool, after: bool, index: int) -> Tensor:
        if before == after:
            return part
        inside = member.job.level(self.num_all).inside
        return part[inside] if after else member.job.recall(index, member.branch)[0].index_copy(0, inside, part)

    def spread(self, tokens: Tensor, index: int) -> Tensor:
        """[flowing tokens, channels] -> [branches, all tokens, channels]"""
        if not any(self.cached):
            return tokens.view(len(self.members), self.num_all, -1)
        parts = zip(tokens.split(self.num_flowing), self.members, self.cached, strict=True)
        return torch.stack([self.turn_one(*part, after=False, index=index) for part in parts])

    def complete(self, k: Tensor, v: Tensor, keys: Tensor) -> Tensor:
        """K and V of flowing tokens, each [flowing tokens, width], put before those of the others into keys: attention
        does not care about their order."""
        for whole, flowing in zip(keys, (k, v), strict=True):
            if len(set(self.num_flowing)) == 1:
                whole[:, : self.num_flowing[0]] = flowing.unflatten(0, (len(self.members), -1))
            else:
                for rows, part in zip(whole, flowing.split(self.num_flowing), strict=True):
                    rows[: len(part)] = part
        return keys


def lay_out(members: tuple[Member, ...], block: int, num_all: int) -> Flow:
    return Flow(members, tuple(member.job.is_cached(block) for member in members), num_all)


def transform(transformer: Transformer2DModel | None, x: Tensor, run: Pass) -> Tensor:
    """The ragged part, between two convolutions [branches, channels, rows, columns]."""
    if transformer is None:
        return x
    place, num_blocks = run.places[transformer], len(transformer.transformer_blocks)
    flow = lay_out(run.members, place.block, x.shape[2] * x.shape[3])
    rows = transformer.norm(x).flatten(2).transpose(1, 2)  # [branches, tokens, channels]
    tokens = project(transformer.proj_in, flow.gather(rows))
    for offset, block in enumerate(transformer.transformer_blocks):
        flow, tokens = flow.turn(tokens, place.block + offset, place.index + offset)
        if run.watch:
            run.watch.keep(keep_block(block, tokens, run.watch.kind).unflatten(1, (len(x), -1)).transpose(0, 1))
        tokens = transformer_block(block, tokens, run.text, flow, recall(block, place.index + offset, flow, tokens))
    leaving = flow.spread(project(transformer.proj_out, tokens), place.index + num_blocks)
    if run.watch:
        run.watch.keep(leaving[:, None])
    return x + leaving.transpose(1, 2).reshape(x.shape)


def project(layer: nn.Module, tokens: Tensor) -> Tensor:
    """Linear, or a convolution of one by one, over packed tokens [tokens, channels]."""
    if isinstance(layer, nn.Conv2d):
        projected: Tensor = layer(tokens.T[None, :, :, None])[0, :, :, 0].T
    else:
        projected = layer(tokens)
    return projected


def transformer_block(
    block: BasicTransformerBlock, tokens: Tensor, text: Tensor, flow: Flow, keys: Tensor | None
) -> Tensor:
    """[flowing tokens, width]; keys are those of tokens that do not flow, where there are any."""
    num_flowing, num_branches = flow.num_flowing, len(flow.members)
    inner = block.norm1(tokens)
    k, v = block.attn1.to_k(inner), block.attn1.to_v(inner)
    k, v = (x.unflatten(0, (num_branches, -1)) for x in (k, v)) if keys is None else flow.complete(k, v, keys)
    tokens = tokens + attend(block.attn1, inner, k, v, num_flowing)
    k, v = block.attn2.to_k(text), block.attn2.to_v(text)
    tokens = tokens + attend(block.attn2, block.norm2(tokens), k, v, num_flowing)
    fed: Tensor = block.ff(block.norm3(tokens))
    return tokens + fed


def attend(attn: Attention, inner: Tensor, k: Tensor, v: Tensor, num_flowing: list[int]) -> Tensor:
    """Packed tokens [flowing tokens, width] to each branch's keys and values [branches, keys, width]."""
    q = attn.to_q(inner)
    if len(set(num_flowing)) == 1:
        attended = attend_heads(q.unflatten(0, (len(k), -1)), k, v, attn.heads).flatten(0, 1)
    else:
        parts = zip(q.split(num_flowing), k, v, strict=True)
        attended = torch.cat([attend_heads(q[None], k[None], v[None], attn.heads)[0] for q, k, v in parts])
    out: Tensor = attn.to_out[0](attended)
    return out


def attend_heads(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:  # [branches, tokens, width]
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def recall(block: BasicTransformerBlock, index: int, flow: Flow, tokens: Tensor) -> Tensor | None:
    """K and V of tokens that do not flow, at the ends of keys [2, branches, all tokens, width]; None where all flow."""
    if not any(flow.cached):
        return None
    keys = tokens.new_empty(2, len(flow.members), flow.num_all, tokens.shape[1])
    for branch, (member, cached, num) in enumerate(zip(flow.members, flow.cached, flow.num_flowing, strict=True)):
        if cached:
            recall_one(block, index, member, keys[:, branch, num:])
    return keys


def recall_one(block: BasicTransformerBlock, index: int, member: Member, keys: Tensor) -> None:
    """K and V [2, unmasked tokens, width] of a branch: as they are, or projected from Y as at registration."""
    job, rows = member.job, member.job.recall(index, member.branch)
    assert job.activations is not None
    outside = job.level(rows.shape[1]).outside
    if job.activations.kind == "kv":
        gather_rows(rows, outside, keys)
    else:
        keys[0], keys[1] = keys_values(block, rows[0].index_select(0, outside))


def keep_block(block: BasicTransformerBlock, tokens: Tensor, kind: Kind) -> Tensor:  # [2 or 1, tokens, width]
    return tokens[None] if kind == "y" else torch.stack(keys_values(block, tokens))


def keys_values(block: BasicTransformerBlock, tokens: Tensor) -> tuple[Tensor, Tensor]:  # each [tokens, width]
    inner = block.norm1(tokens)
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
    return [*blocks[:-1], replace(blocks[-1], per_token=per_token, width_behind=transformer.in_channels)]


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
