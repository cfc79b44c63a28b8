"""Jobs, and the ragged batch: tokens of all jobs packed into one tensor, what differs between jobs as columns.

Knows tokens, branches, steps and plans; knows no picture, no prompt and no module of a model. A job has one branch, or
two when its guidance is true (classifier-free): both branches share the job's latents and its template's activations.
Through a dense block all tokens of a job flow, through a cached block its text, its masked tokens and their halo. Halo
tokens are computed, so that they see what the masked ones become, and stay on the template's trajectory.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from instgenie.cost.network import NUM_BUCKETS
from instgenie.cost.plan import DENSE, Plan, check_plan, is_cached
from instgenie.errors import PlanError
from instgenie.jobs.activations import Activations, Kind, Reader
from instgenie.jobs.sampler import Schedule
from instgenie.kernels.addresses import Addresses, RowSource, RowSources
from instgenie.kernels.gather import gather_rows
from instgenie.kernels.heads import HeadPlaces
from instgenie.types import Edit


@dataclass(frozen=True, eq=False)
class Template:
    """A picture's own tokens and noise: where they are at every step is a fact about it, whoever edits it."""

    clean: Tensor  # [tokens, channels]
    noise: Tensor  # [tokens, channels]

    def at(self, step: int, schedule: Schedule) -> Tensor:
        return self.clean if step == schedule.num_steps else schedule.noised(self.clean, self.noise, step)


@dataclass(frozen=True, eq=False)
class Branch:
    """One sequence of a job: what the model sees at every step besides the image tokens."""

    text: Tensor  # [text tokens, width], embedded
    pooled: Tensor  # [pooled channels; 0 for models that see none]
    rotary: Tensor  # [text tokens + image tokens, head channels / 2], complex; 0 for models without


@dataclass(frozen=True, eq=False)
class Level:
    """Where the masked and the unmasked tokens of one level of a UNet are."""

    num_all: int
    inside: Tensor  # [masked tokens]
    outside: Tensor  # [unmasked tokens]


@dataclass(frozen=True, eq=False)
class Shape:
    """Where a job's tokens are. Layouts are made of shapes, not of jobs, so that a layout that is kept keeps no job."""

    num_all: int  # image tokens
    inside: Tensor  # [masked tokens], where they are; where the list is padded, one of them stands in it several times
    rest: Tensor  # [the other tokens], and any of all where the list is padded
    num_text: tuple[int, ...]  # of each branch
    rotary: tuple[Tensor, ...]  # of each branch

    def num_image(self, cached: bool) -> int:
        """Image tokens that flow."""
        return len(self.inside) if cached else self.num_all

    def where(self, cached: bool) -> Tensor:
        """Where the image tokens are that flow."""
        return self.inside if cached else self.every

    @cached_property
    def every(self) -> Tensor:  # [image tokens]
        return torch.arange(self.num_all, device=self.inside.device)

    @property
    def padded(self) -> "Shape":
        """Keys of the rest are written before those of tokens that flow, so the rest may have too many tokens."""
        if not len(self.inside):  # there is no token to pad an empty list with
            return self
        count = bucket(len(self.inside), self.num_all)
        num_rest = min(self.num_all - count + bucket(1, self.num_all), self.num_all)
        rest = self.rest if len(self.rest) else self.inside[:1]
        return replace(self, inside=pad(self.inside, count), rest=pad(rest, num_rest))

    def tables(self, cached: bool) -> tuple[Tensor, ...]:
        """Of each branch, the rotary table of the tokens that flow."""
        return self.masked_rotary if cached else self.rotary

    @cached_property
    def masked_rotary(self) -> tuple[Tensor, ...]:  # of each branch [text tokens + masked tokens, head channels / 2]
        return tuple(
            torch.cat([table[:num_text], table[num_text:][self.inside]])
            for table, num_text in zip(self.rotary, self.num_text, strict=True)
        )


@dataclass(eq=False)
class Job:
    """An edit on a worker. One owner advances it step by step."""

    edit: Edit
    grid: tuple[int, int]  # rows and columns of image tokens
    template: Template
    masked: Tensor  # [tokens, 1], bool
    conditioning: Tensor  # [tokens, channels that fill models see beside the latents; 0 for the others]
    branches: tuple[Branch, ...]  # the prompt's, then the negative prompt's where guidance is true
    scale: float  # of the second branch's guidance
    schedule: Schedule
    latents: Tensor  # [tokens, channels]
    step: int = 0
    activations: Activations | None = None  # of the template
    plan: Plan = DENSE  # of the steps after the edit's dense steps
    reader: Reader | None = None  # who loads the activations ahead of their use, while somebody does

    def __post_init__(self) -> None:
        cache = self.activations
        if cache is None and any(self.plan):
            raise PlanError(f"the plan caches {sum(self.plan)} blocks: the template has no activations")
        if cache is not None:
            check_plan(self.plan, cache.kind, cache.run_lengths)
            assert (cache.num_steps, cache.num_tokens) == (self.num_steps, len(self.masked))

    @property
    def num_steps(self) -> int:
        return self.schedule.num_steps

    @property
    def done(self) -> bool:
        return self.step == self.num_steps

    @property
    def timestep(self) -> Tensor:  # []
        return self.timesteps[self.step]

    @cached_property
    def computed(self) -> Tensor:  # [tokens, 1], bool: the masked tokens and their halo
        return spread(self.masked, self.grid, self.edit.halo) if self.edit.halo else self.masked

    @cached_property
    def inside(self) -> Tensor:  # [masked tokens and their halo], where they are
        return self.computed[:, 0].nonzero()[:, 0]

    @cached_property
    def outside(self) -> Tensor:  # [the other tokens], where they are
        return (~self.computed[:, 0]).nonzero()[:, 0]

    @cached_property
    def timesteps(self) -> Tensor:  # [steps], on the device from the first step on
        return torch.tensor([self.schedule.timestep(step) for step in range(self.num_steps)], device=self.device)

    @cached_property
    def guidance(self) -> Tensor:  # []
        return torch.tensor(self.edit.guidance, dtype=torch.float32, device=self.device)

    @property
    def device(self) -> torch.device:
        return self.latents.device

    @cached_property
    def shape(self) -> Shape:
        num_text = tuple(len(branch.text) for branch in self.branches)
        rotary = tuple(branch.rotary for branch in self.branches)
        return Shape(len(self.masked), self.inside, self.outside, num_text, rotary)

    @cached_property
    def padded_shape(self) -> Shape:
        """With lists that are as long as those of many other masks."""
        return self.shape.padded

    @cached_property
    def image_rotary(self) -> Tensor:  # [image tokens, head channels / 2], the same in all branches
        branch = self.branches[0]
        return branch.rotary[len(branch.text) :]

    @cached_property
    def levels(self) -> dict[int, Level]:
        return {}

    def level(self, num_tokens: int) -> Level:
        """The level that has so many tokens; found once."""
        if num_tokens not in self.levels:
            self.levels[num_tokens] = pool(self.computed, self.grid, num_tokens)
        return self.levels[num_tokens]

    @property
    def in_dense_steps(self) -> bool:
        """Whether this step is one that computes every token, whatever activations there are."""
        return self.step < self.edit.dense_steps

    @property
    def present_plan(self) -> Plan:
        """Of this step."""
        return DENSE if self.in_dense_steps else self.plan

    def is_cached(self, block: int) -> bool:
        """Whether a block is cached at this step; see `plan.is_cached` for what comes after the last."""
        return is_cached(self.present_plan, block)

    @property
    def has_masked_velocity(self) -> bool:
        return self.is_cached(len(self.plan))

    def recall(self, index: int, branch: int = 0) -> Tensor:
        """What the activations keep at a place of the pass, at this step [2 or 1, tokens, width]."""
        reader = self.reader or self.activations
        assert reader is not None
        return reader.at(self.step, index, branch, self.device)

    @property
    def num_computed_tokens(self) -> int:
        """Image tokens computed, in the mean over steps and blocks."""
        cached_steps = max(self.num_steps - self.edit.dense_steps, 0) / self.num_steps
        cached_blocks = sum(self.plan) / max(len(self.plan), 1)
        return round(len(self.masked) - cached_steps * cached_blocks * len(self.outside))

    def advance(self, predictions: Sequence[Tensor]) -> None:
        """Masked tokens follow the prediction, one per branch, of all tokens or of the masked alone; the others stay on
        the template's trajectory."""
        prediction = guide(predictions, self.scale)
        if len(prediction) < len(self.masked):
            prediction = torch.zeros_like(self.latents).index_copy(0, self.inside, prediction)
        moved = self.schedule.advanced(self.latents, prediction, self.step)
        latents = torch.where(self.masked, moved, self.template.at(self.step + 1, self.schedule))
        self.step, self.latents = self.step + 1, latents  # both or none, should memory run out


class Rows(Protocol):
    """Rows of activations for the branches, or jobs, of a batch."""

    def at(self, place: int, wanted: Sequence[bool]) -> RowSources:
        """What is kept of a place of the pass; of those that do not want it, None or anything."""


@dataclass(frozen=True, eq=False)
class JobRows:
    """As the jobs' activations hand them over."""

    readers: tuple[tuple[Job, int], ...]  # with the number of the branch

    def at(self, place: int, wanted: Sequence[bool]) -> RowSources:
        return [
            job.recall(place, branch) if wants else None
            for (job, branch), wants in zip(self.readers, wanted, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class TableRows:
    """Wherever a table says at the time they are read."""

    table: Tensor  # [places, readers], int64

    def at(self, place: int, wanted: Sequence[bool]) -> RowSources:
        return Addresses(self.table[place])


def spread(masked: Tensor, grid: tuple[int, int], halo: int) -> Tensor:
    """[tokens, 1]: what is masked or within `halo` tokens of it, corners included."""
    wide = F.max_pool2d(masked.view(1, 1, *grid).float(), 2 * halo + 1, stride=1, padding=halo)
    return wide.view(-1, 1) > 0


def pool(masked: Tensor, grid: tuple[int, int], num_tokens: int) -> Level:
    """A token of a coarser level is masked if any of the tokens under it is."""
    side = math.isqrt(len(masked) // num_tokens)
    pooled = F.max_pool2d(masked.view(1, 1, *grid).float(), side).flatten() > 0
    assert len(pooled) == num_tokens, (grid, num_tokens)
    return Level(num_tokens, inside=pooled.nonzero()[:, 0], outside=(~pooled).nonzero()[:, 0])


def pad(index: Tensor, count: int) -> Tensor:
    """A list so long; the last token stands in it several times. Nobody reads what is computed of it again, or it is
    equal, so nothing but work changes."""
    return torch.cat([index, index[-1:].expand(count - len(index))])


def bucket(count: int, num_all: int) -> int:
    """The length to which a list of so many among all tokens is padded: a multiple of a thirty-second of all."""
    step = max(num_all // NUM_BUCKETS, 1)
    return min(-(-count // step) * step, num_all)


def guide(predictions: Sequence[Tensor], scale: float) -> Tensor:
    positive, *negative = (prediction.float() for prediction in predictions)
    return negative[0] + scale * (positive - negative[0]) if negative else positive


LAYOUT_COLUMNS = ("rotary", "text_rows", "image_rows", "joint_rows")
LAYOUT_PLACES = ("text_places", "image_places", "joint_places")


@dataclass(frozen=True, eq=False)
class Layout:
    """Which tokens flow through a block, and where they lie: one branch after the other, joint = a branch's text, then
    its image. Rows say which branch a token belongs to, places where it goes."""

    cached: tuple[bool, ...]  # of each job: whether its masked tokens flow alone
    num_branches: tuple[int, ...]  # of each job
    num_text: tuple[int, ...]  # of each branch
    num_image: tuple[int, ...]  # of each branch
    num_all: tuple[int, ...]  # of each branch, image tokens with those that do not flow
    rotary: Tensor  # [joint tokens, head channels / 2]
    text_rows: Tensor  # [text tokens]
    image_rows: Tensor  # [image tokens]
    joint_rows: Tensor  # [joint tokens]
    text_places: HeadPlaces
    image_places: HeadPlaces
    joint_places: HeadPlaces

    @cached_property
    def num_joint(self) -> tuple[int, ...]:
        return tuple(text + image for text, image in zip(self.num_text, self.num_image, strict=True))

    @cached_property
    def num_keys(self) -> tuple[int, ...]:
        return tuple(text + image for text, image in zip(self.num_text, self.num_all, strict=True))

    @cached_property
    def images(self) -> list[list[slice]]:
        """Of each job, of each branch: where among the keys those of its image tokens are, each at its own place."""
        ends = accumulate(self.num_keys)
        slices = iter([slice(end - image, end) for end, image in zip(ends, self.num_all, strict=True)])
        return [[next(slices) for _ in range(num)] for num in self.num_branches]

    @property
    def columns(self) -> dict[str, Tensor]:
        """All its tensors."""
        found = {name: getattr(self, name) for name in LAYOUT_COLUMNS}
        for name in LAYOUT_PLACES:
            places = getattr(self, name)
            found |= {f"{name} joint": places.joint, f"{name} keys": places.keys}
        return found

    def over(self, columns: Mapping[str, Tensor]) -> "Layout":
        """The same layout over other tensors."""
        own: dict[str, Any] = {name: columns[name] for name in LAYOUT_COLUMNS}
        own |= {name: HeadPlaces(columns[f"{name} joint"], columns[f"{name} keys"]) for name in LAYOUT_PLACES}
        return replace(self, **own)

    def join(self, text: Tensor, image: Tensor) -> Tensor:
        """[text tokens, ...] and [image tokens, ...] -> [joint tokens, ...]"""
        pairs = zip(text.split(self.num_text), image.split(self.num_image), strict=True)
        return torch.cat([part for pair in pairs for part in pair])

    def part(self, joint: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Of each branch [joint tokens, ...] -> [text tokens, ...] and [image tokens, ...]; views when there is one."""
        sizes = zip(self.num_text, self.num_image, strict=True)
        texts, images = zip(*(one.split(size) for one, size in zip(joint, sizes, strict=True)), strict=True)
        return concat(texts), concat(images)


@lru_cache(maxsize=16)  # jobs that stay together keep their layouts from step to step
def lay_out_shapes(shapes: tuple[Shape, ...], cached: tuple[bool, ...]) -> Layout:
    """What does not depend on where tokens are is counted in main memory, and moves to the device as one piece: every
    launch of a changed batch is waited for."""
    members = [(shape, own, num) for shape, own in zip(shapes, cached, strict=True) for num in shape.num_text]
    num_text = np.array([num for _, _, num in members])
    num_image = np.array([shape.num_image(own) for shape, own, _ in members])
    num_all = np.array([shape.num_all for shape, _, _ in members])
    first_text, first_image, first_key = (starts(nums) for nums in (num_text, num_image, num_text + num_all))
    counted = [rows(nums) for nums in (num_text, num_image, num_text + num_image)]
    texts, images, joint = (np.arange(len(found)) for found in counted)
    of_text, of_image, _ = counted
    counted += [joint, texts + first_image[of_text], images + (first_text + num_text)[of_image]]
    counted += [texts + (first_key - first_text)[of_text], (first_key + num_text)[of_image]]
    moved = to_device(counted, shapes[0].inside.device)
    text_rows, image_rows, joint_rows, joint_places, text_places, image_places, text_keys, image_starts = moved
    image_keys = image_starts + concat([shape.where(own) for shape, own, _ in members])
    joint_keys = torch.empty_like(joint_places)
    joint_keys[text_places], joint_keys[image_places] = text_keys, image_keys
    return Layout(
        cached=cached,
        num_branches=tuple(len(shape.num_text) for shape in shapes),
        num_text=tuple(num_text.tolist()),
        num_image=tuple(num_image.tolist()),
        num_all=tuple(num_all.tolist()),
        rotary=concat([table for shape, own in zip(shapes, cached, strict=True) for table in shape.tables(own)]),
        text_rows=text_rows,
        image_rows=image_rows,
        joint_rows=joint_rows,
        text_places=HeadPlaces(text_places, text_keys),
        image_places=HeadPlaces(image_places, image_keys),
        joint_places=HeadPlaces(joint_places, joint_keys),
    )


def to_device(columns: Sequence[NDArray[np.int64]], device: torch.device) -> Sequence[Tensor]:
    """In one copy, which nobody waits for. Each begins where kernels like it, at an even place."""
    places = starts(np.array([len(column) + len(column) % 2 for column in columns]))
    together = torch.empty(int(places[-1]) + len(columns[-1]), dtype=torch.int64, pin_memory=device.type == "cuda")
    for place, column in zip(places, columns, strict=True):
        together[place : place + len(column)] = torch.from_numpy(column)
    moved = together.to(device, non_blocking=True)
    return [moved[place : place + len(column)] for place, column in zip(places, columns, strict=True)]


def starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """(2, 3, 1) -> [0, 2, 5]"""
    return lengths.cumsum() - lengths


def rows(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """(2, 3) -> [0, 0, 1, 1, 1]"""
    return np.arange(len(lengths)).repeat(lengths)


@dataclass(frozen=True, eq=False)
class TemplateColumns:
    """What makes keys of a template's Y."""

    time: Tensor  # [jobs, width], what modulated the blocks
    rotary: tuple[Tensor, ...]  # of each job [image tokens, head channels / 2]


BATCH_COLUMNS = ("image", "text", "pooled", "sigma", "guidance")


@dataclass(frozen=True, eq=False)
class Batch:
    """One step of many jobs: what the model sees, and the layouts of its blocks."""

    jobs: tuple[Job, ...]
    kinds: tuple[Kind | None, ...]  # of each job, of the activations it reads
    cached: tuple[tuple[bool, ...], ...]  # of each block and of what comes after, of each job; the last stands for more
    shapes: tuple[Shape, ...]  # of each job
    layouts: Mapping[tuple[bool, ...], Layout]
    image: Tensor  # [image tokens, latent + conditioning channels]
    text: Tensor  # [text tokens, width]
    pooled: Tensor  # [branches, pooled channels]
    sigma: Tensor  # [branches]
    guidance: Tensor  # [branches]
    template: TemplateColumns | None  # where a job reads Y
    rows: Rows  # of the jobs' activations

    @property
    def layout(self) -> Layout:
        """Of the first block."""
        return self.layout_of(0)

    def layout_of(self, block: int) -> Layout:
        return self.layouts[self.cached[min(block, len(self.cached) - 1)]]

    @property
    def signature(self) -> Hashable:
        """Batches of one signature differ in nothing but the values of their columns and rows."""
        counts = tuple((shape.num_all, len(shape.inside), len(shape.rest), shape.num_text) for shape in self.shapes)
        return self.kinds, self.cached, counts, self.image.shape[1]

    @property
    def columns(self) -> dict[str, Tensor]:
        """All that one pass reads, but for rows."""
        found = {name: getattr(self, name) for name in BATCH_COLUMNS}
        for number, shape in enumerate(self.shapes):
            found |= {f"inside {number}": shape.inside, f"rest {number}": shape.rest}
        for number, layout in enumerate(self.layouts.values()):
            found |= {f"{name} {number}": column for name, column in layout.columns.items()}
        if self.template:
            found |= {"template time": self.template.time}
            found |= {f"template rotary {job}": table for job, table in enumerate(self.template.rotary)}
        return found

    def over(self, columns: Mapping[str, Tensor], rows: Rows) -> "Batch":
        """The same pass over other tensors."""
        shapes = tuple(
            replace(shape, inside=columns[f"inside {number}"], rest=columns[f"rest {number}"], rotary=())
            for number, shape in enumerate(self.shapes)
        )
        layouts = {
            cached: layout.over({name: columns[f"{name} {number}"] for name in layout.columns})
            for number, (cached, layout) in enumerate(self.layouts.items())
        }
        template = self.template
        if template:
            tables = tuple(columns[f"template rotary {job}"] for job in range(len(template.rotary)))
            template = TemplateColumns(columns["template time"], tables)
        own: dict[str, Any] = {name: columns[name] for name in BATCH_COLUMNS}
        return replace(self, jobs=(), shapes=shapes, layouts=layouts, template=template, rows=rows, **own)

    @property
    def readers(self) -> list[tuple[Job, int]]:
        """Whose rows are read, and of which branch. Both branches of a job read the same: a template is registered
        once, with the empty prompt."""
        return [(job, 0) for job in self.jobs]

    def turn(self, layout: Layout, image: Tensor, block: int) -> tuple[Layout, Tensor]:
        """The layout of a block and the image rows in it: where a job's plan turns, its unmasked tokens leave, or come
        back from the activations."""
        turned = self.layout_of(block)
        if turned is layout:
            return layout, image
        back = [before and not after for before, after in zip(layout.cached, turned.cached, strict=True)]
        sources: RowSources = self.rows.at(block, back) if any(back) else [None] * len(back)
        parts = iter(image.split(layout.num_image))
        return turned, concat([
            turn_one(next(parts), self.shapes[job], layout.cached[job], turned.cached[job], sources[job])
            for job, num in enumerate(layout.num_branches)
            for _ in range(num)
        ])  # fmt: skip

    def turn_joint(self, layout: Layout, joint: Tensor, block: int) -> tuple[Layout, Tensor]:
        if self.layout_of(block) is layout:
            return layout, joint
        text, image = layout.part(joint.split(layout.num_joint))
        turned, image = self.turn(layout, image, block)
        return turned, turned.join(text, image)

    def deal(self, velocity: Tensor) -> list[list[Tensor]]:
        """Velocity [image tokens, latent channels], of masked tokens alone where the job cached any block; to each job
        one for each of its branches."""
        last = self.layouts[self.cached[-1]]
        velocities = iter(velocity.split(last.num_image))
        return [
            [next(velocities)[: len(job.inside) if narrow else None] for _ in job.branches]
            for job, narrow in zip(self.jobs, last.cached, strict=True)
        ]


def turn_one(image: Tensor, shape: Shape, before: bool, after: bool, source: RowSource) -> Tensor:
    if before == after:
        return image
    if after:
        return image[shape.inside]
    assert source is not None  # of kind y: a plan that turns back was refused for kv
    y = image.new_empty(1, shape.num_all, image.shape[1])
    gather_rows(source, shape.rest, shape.num_all, y, shape.rest)
    return y[0].index_copy_(0, shape.inside, image)


def pack(jobs: Sequence[Job], pads: bool = False) -> Batch:
    """Where it pads, lists of masked tokens are as long as those of many other masks."""
    pairs = list(branches(jobs))
    shapes = tuple(job.padded_shape if pads else job.shape for job in jobs)
    num_blocks = max(len(job.plan) for job in jobs)
    cached = tuple(tuple(job.is_cached(block) for job in jobs) for block in range(num_blocks + 1))
    kinds = tuple(job.activations.kind if job.activations else None for job in jobs)
    seen = [inputs(job, shape) for job, shape in zip(jobs, shapes, strict=True)]
    image = concat([one for job, one in zip(jobs, seen, strict=True) for _ in job.branches])
    return Batch(
        jobs=tuple(jobs),
        kinds=kinds,
        cached=cached,
        shapes=shapes,
        layouts={narrow: lay_out_shapes(shapes, narrow) for narrow in dict.fromkeys(cached)},
        image=image.to(pairs[0][1].text.dtype),
        text=concat([branch.text for _, branch in pairs]),
        pooled=torch.stack([branch.pooled for _, branch in pairs]),
        sigma=torch.stack([job.timestep for job, _ in pairs]),
        guidance=torch.stack([job.guidance for job, _ in pairs]),
        template=template_columns(jobs) if "y" in kinds else None,
        rows=JobRows(tuple((job, 0) for job in jobs)),
    )


def template_columns(jobs: Sequence[Job]) -> TemplateColumns:
    times = [job.activations.time[job.step] if job.activations else None for job in jobs]
    anyone = next(time for time in times if time is not None)
    time = torch.stack([torch.zeros_like(anyone) if time is None else time for time in times])
    return TemplateColumns(time, tuple(job.image_rotary for job in jobs))


def inputs(job: Job, shape: Shape) -> Tensor:  # [image tokens that flow into the first block, channels]
    image = torch.cat([job.latents, job.conditioning], dim=1)
    return image[shape.inside] if job.is_cached(0) else image


def branches(jobs: Sequence[Job]) -> Iterator[tuple[Job, Branch]]:
    return ((job, branch) for job in jobs for branch in job.branches)


def concat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
