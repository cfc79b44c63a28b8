"""A pass in which every block computes some image tokens, and takes guesses for the others. Which it computes is known
only when it is reached: `jobs.blocks` chooses.

A block chooses among the tokens that a pass computes: all of them, or the masked ones of an edit that reads K and V of
the others. K and V of all tokens among which it chooses are projected from what goes into the block now, so no token
attends to an older step of these. The text of a branch is computed where any of its image tokens is. Branches without
any are left out of the block.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress

import torch
import torch.nn.functional as F
from torch import Tensor

from instgenie.jobs.blocks import BlockPass, per_job
from instgenie.jobs.job import Grid, Job, block_units
from instgenie.jobs.tokens import JobTokens, concat
from instgenie.kernels.heads import HeadPlaces, Heads
from instgenie.models.joint.batch import JointBatch
from instgenie.models.joint.block import JointBlock
from instgenie.models.joint.flow import Apart
from instgenie.models.joint.layout import Layout, lay_out
from instgenie.models.joint.modulation import Modulation
from instgenie.models.joint.residual import Residual
from instgenie.models.layers.linear import Owners


@dataclass(frozen=True, eq=False)
class Chosen:
    """The tokens that a block computes, by index among those that the batch computes, and their layout."""

    text: Tensor  # [text tokens]
    image: Tensor  # [image tokens]
    rest: Tensor  # [other image tokens of branches that compute any]
    rest_keys: Tensor  # [the same], their places among the keys
    is_used: Sequence[bool]  # per branch, whether it computes any
    layout: Layout  # of these branches


def run_reused(
    blocks: Sequence[JointBlock], batch: JointBatch, image: Tensor, mod: Modulation, reserve: Callable[[int], Heads]
) -> Tensor:
    """Send embedded image rows [image tokens, width] through all blocks. `reserve` gives the heads of a block, with K
    and V of tokens that the pass does not compute."""
    layout = batch.layout
    changes = BlockPass([block_units(job) for job in batch.jobs], len(blocks), image.device)
    texts, images = (per_job(nums, layout.num_branches) for nums in (layout.num_text, layout.num_image))
    text = batch.text
    for number, block in enumerate(blocks):
        asked = changes.choose(number, image, layout.image_rows, images, lambda values: pool(values, batch, changes))
        nums = torch.stack([one.sum() for one in asked.split(layout.num_image)]).tolist()
        changes.count(number, per_job(nums, layout.num_branches))
        chosen = None if nums == list(layout.num_image) else choose(batch, asked, nums)
        if chosen and not len(chosen.image):
            batch.read(number, layout.cached, layout)  # as every block does: rows that are loaded come in turn
            text_out, image_out = text[:0], image[:0]
        else:
            text_out, image_out = run_chosen(block, text, image, mod, batch, chosen, reserve(number))
        text_index, index = (chosen.text, chosen.image) if chosen else (None, None)
        text = changes.complete(("text", number), text, text_out, text_index, layout.text_rows, texts)
        image = changes.complete(number, image, image_out, index, layout.image_rows, images)
        if batch.control and (rows := batch.control.behind(number)) is not None:
            image = image + rows
    changes.commit()
    return image


def run_chosen(
    block: JointBlock,
    text: Tensor,
    image: Tensor,
    mod: Modulation,
    batch: JointBatch,
    chosen: Chosen | None,
    heads: Heads,
) -> tuple[Tensor, Tensor]:
    """Rows of text and image behind a block, of the tokens that it computes."""
    layout = batch.layout
    if chosen:
        layout, heads = chosen.layout, narrow_heads(heads, batch.layout, chosen)
        project_rest(block, image, mod, batch.layout, chosen, heads)
        text, image = text[chosen.text], image[chosen.image]
    return block(Apart(Residual(text), Residual(image)), mod, layout, heads).parts(layout)


def narrow_heads(heads: Heads, layout: Layout, chosen: Chosen) -> Heads:
    """Heads of the chosen tokens alone, with the keys of their branches."""
    assert heads.q is not None
    parts = heads.keys.split(layout.num_keys, dim=1)
    keys = heads.keys if all(chosen.is_used) else torch.cat(list(compress(parts, chosen.is_used)), dim=1)
    return Heads(heads.q[: sum(chosen.layout.num_joint)], keys)


def project_rest(
    block: JointBlock, image: Tensor, mod: Modulation, layout: Layout, chosen: Chosen, heads: Heads
) -> None:
    """Write K and V of tokens that are not computed, as the block would."""
    if not len(chosen.rest):
        return
    times = None if layout.image_times is None else layout.image_times[chosen.rest]
    owners = Owners(layout.image_rows[chosen.rest], loras=layout.loras, times=times)
    places = HeadPlaces(joint=layout.image_places.joint[chosen.rest], keys=chosen.rest_keys)
    block.project_keys(image[chosen.rest], mod, layout.rotary, owners, heads.keys, places)


def choose(batch: JointBatch, asked: Tensor, nums: Sequence[int]) -> Chosen:
    """Lay out the image tokens that are asked for [image tokens], bool, so many of each branch."""
    layout, is_used = batch.layout, [num > 0 for num in nums]
    facts = zip(batch.jobs, layout.cached, batch.num_kept_text, strict=True)
    members = [(own, narrow, narrow and num > 0) for job, narrow, num in facts for own in split_branches(job.tokens)]
    chosen, keys, rests, reads_padding = [], [], [], []
    first_text = list(accumulate(layout.num_text, initial=0))
    first_image = list(accumulate(layout.num_image, initial=0))
    first_key = 0
    parts = zip(members, asked.split(layout.num_image), first_image, strict=False)
    for (own, narrow, reads), part, first in compress(parts, is_used):
        tokens, rest = own.computed(narrow), (~part).nonzero()[:, 0]
        chosen.append(replace(own, inside=tokens[part.nonzero()[:, 0]], rest=tokens[rest]))
        reads_padding.append(reads)
        rests.append(first + rest)
        keys.append(first_key + own.num_text[0] + tokens[rest])
        first_key += own.num_text[0] + own.num_all
    image = asked.nonzero()[:, 0]
    if not chosen:
        return Chosen(image, image, image, image, is_used, layout)
    few = lay_out.__wrapped__(tuple(chosen), (True,) * len(chosen), tuple(reads_padding))
    device = asked.device
    spans = compress(zip(first_text, layout.num_text, strict=False), is_used)
    text = concat([torch.arange(first, first + num, device=device) for first, num in spans])
    numbers = torch.tensor(list(compress(range(len(nums)), is_used)), device=device)
    owned = replace(
        few,
        loras=layout.loras,
        text_rows=numbers[few.text_rows],
        image_rows=numbers[few.image_rows],
        joint_rows=numbers[few.joint_rows],
        image_times=None if layout.image_times is None else layout.image_times[image],
    )
    return Chosen(text, image, concat(rests), concat(keys), is_used, owned)


def split_branches(tokens: JobTokens) -> list[JobTokens]:
    pairs = zip(tokens.num_text, tokens.rotary, strict=True)
    return [replace(tokens, num_text=(num,), rotary=(table,)) for num, table in pairs]


def pool(values: Tensor, batch: JointBatch, changes: BlockPass) -> Tensor:
    """Spread the largest value of each square of tokens over the square; tokens of references go with the whole
    picture, or alone."""
    side, parts = changes.rule.side, iter(values.split(batch.layout.num_image))
    if side == 1:
        return values
    jobs = zip(batch.jobs, batch.layout.cached, strict=True)
    return concat(
        [
            (pool_masked(next(parts), job, side) if narrow else pool_one(next(parts), job.grid, side))
            for job, narrow in jobs
            for _ in job.branches
        ]
    )


def pool_masked(values: Tensor, job: Job, side: int) -> Tensor:  # [masked tokens]
    whole = values.new_full((len(job.masked),), -math.inf)
    return pool_one(whole.index_copy(0, job.inside, values), job.grid, side)[job.inside]


def pool_one(values: Tensor, grid: Grid, side: int) -> Tensor:  # [tokens]
    if not side:
        return values.max().expand(len(values))
    num = grid[0] * grid[1]
    most = F.max_pool2d(values[:num].view(1, 1, *grid), side, ceil_mode=True)
    spread = most.repeat_interleave(side, dim=2).repeat_interleave(side, dim=3)
    return torch.cat([spread[..., : grid[0], : grid[1]].reshape(-1), values[num:]])
