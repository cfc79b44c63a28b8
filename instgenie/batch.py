"""Jobs, and the ragged batch: tokens of all jobs packed into one tensor, what differs between jobs as columns.

Knows tokens, branches, steps and plans; knows no picture, no prompt and no module of a model. A job has one branch, or
two when its guidance is true (classifier-free): both branches share the job's latents and its template's activations.
Through a dense block all tokens of a job flow, through a cached block its text, its masked tokens and their halo. Halo
tokens are computed, so that they see what the masked ones become, and stay on the template's trajectory.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from instgenie.activations import Activations, Reader
from instgenie.errors import PlanError
from instgenie.kernels.heads import Places
from instgenie.planner import DENSE, Plan, check_plan, is_cached
from instgenie.sampler import Schedule
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

    inside: Tensor  # [masked tokens]
    outside: Tensor  # [unmasked tokens]


@dataclass(frozen=True, eq=False)
class Shape:
    """Where a job's tokens are. Layouts are made of shapes, not of jobs, so that a layout that is kept keeps no job."""

    num_all: int  # image tokens
    inside: Tensor  # [masked tokens], where they are
    num_text: tuple[int, ...]  # of each branch
    rotary: tuple[Tensor, ...]  # of each branch

    def num_image(self, cached: bool) -> int:
        """Image tokens that flow."""
        return len(self.inside) if cached else self.num_all

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
            check_plan(self.plan, cache.kind, cache.units)
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
        return Shape(len(self.masked), self.inside, num_text, tuple(branch.rotary for branch in self.branches))

    @cached_property
    def outside_rotary(self) -> Tensor:  # [unmasked tokens, head channels / 2], the same in all branches
        branch = self.branches[0]
        return branch.rotary[len(branch.text) :][self.outside]

    @cached_property
    def levels(self) -> dict[int, Level]:
        return {}

    def level(self, num_tokens: int) -> Level:
        """The level that has so many tokens; found once."""
        if num_tokens not in self.levels:
            self.levels[num_tokens] = pool(self.computed, self.grid, num_tokens)
        return self.levels[num_tokens]

    def is_cached(self, block: int) -> bool:
        """Whether a block is cached at this step; see `planner.is_cached` for what comes after the last."""
        return self.step >= self.edit.dense_steps and is_cached(self.plan, block)

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


def spread(masked: Tensor, grid: tuple[int, int], halo: int) -> Tensor:
    """[tokens, 1]: what is masked or within `halo` tokens of it, corners included."""
    wide = F.max_pool2d(masked.view(1, 1, *grid).float(), 2 * halo + 1, stride=1, padding=halo)
    return wide.view(-1, 1) > 0


def pool(masked: Tensor, grid: tuple[int, int], num_tokens: int) -> Level:
    """A token of a coarser level is masked if any of the tokens under it is."""
    side = math.isqrt(len(masked) // num_tokens)
    pooled = F.max_pool2d(masked.view(1, 1, *grid).float(), side).flatten() > 0
    assert len(pooled) == num_tokens, (grid, num_tokens)
    return Level(inside=pooled.nonzero()[:, 0], outside=(~pooled).nonzero()[:, 0])


def guide(predictions: Sequence[Tensor], scale: float) -> Tensor:
    positive, *negative = (prediction.float() for prediction in predictions)
    return negative[0] + scale * (positive - negative[0]) if negative else positive


@dataclass(frozen=True, eq=False)
class Layout:
    """Which tokens flow through a block, and where they lie: one branch after the other, joint = a branch's text, then
    its image. Rows say which branch a token belongs to, places where it goes."""

    cached: tuple[bool, ...]  # of each job: whether its masked tokens flow alone
    num_branches: tuple[int, ...]  # of each job
    num_text: tuple[int, ...]  # of each branch
    num_image: tuple[int, ...]  # of each branch
    num_rest: tuple[int, ...]  # of each branch, image tokens that do not flow: their keys lie behind those that do
    rotary: Tensor  # [joint tokens, head channels / 2]
    text_rows: Tensor  # [text tokens]
    image_rows: Tensor  # [image tokens]
    joint_rows: Tensor  # [joint tokens]
    text_places: Places
    image_places: Places
    joint_places: Places

    @cached_property
    def num_joint(self) -> tuple[int, ...]:
        return tuple(text + image for text, image in zip(self.num_text, self.num_image, strict=True))

    @cached_property
    def num_keys(self) -> tuple[int, ...]:
        return tuple(joint + rest for joint, rest in zip(self.num_joint, self.num_rest, strict=True))

    @cached_property
    def rests(self) -> list[list[slice]]:
        """Of each job, of each branch: where among the keys those of tokens that do not flow are."""
        ends = accumulate(self.num_keys)
        slices = iter([slice(end - rest, end) for end, rest in zip(ends, self.num_rest, strict=True)])
        return [[next(slices) for _ in range(num)] for num in self.num_branches]

    def join(self, text: Tensor, image: Tensor) -> Tensor:
        """[text tokens, ...] and [image tokens, ...] -> [joint tokens, ...]"""
        pairs = zip(text.split(self.num_text), image.split(self.num_image), strict=True)
        return torch.cat([part for pair in pairs for part in pair])

    def part(self, joint: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Of each branch [joint tokens, ...] -> [text tokens, ...] and [image tokens, ...]; views when there is one."""
        sizes = zip(self.num_text, self.num_image, strict=True)
        texts, images = zip(*(one.split(size) for one, size in zip(joint, sizes, strict=True)), strict=True)
        return concat(texts), concat(images)


def lay_out(jobs: Sequence[Job], block: int) -> Layout:
    return lay_out_shapes(tuple(job.shape for job in jobs), tuple(job.is_cached(block) for job in jobs))


@lru_cache(maxsize=16)  # jobs that stay together keep their layouts from step to step
def lay_out_shapes(shapes: tuple[Shape, ...], cached: tuple[bool, ...]) -> Layout:
    pairs = list(zip(shapes, cached, strict=True))
    device = shapes[0].inside.device
    num_text = [num for shape in shapes for num in shape.num_text]
    num_image = [shape.num_image(narrow) for shape, narrow in pairs for _ in shape.num_text]
    num_rest = [shape.num_all - shape.num_image(narrow) for shape, narrow in pairs for _ in shape.num_text]
    text_rows, image_rows = rows(num_text), rows(num_image)
    joint_rows = rows([text + image for text, image in zip(num_text, num_image, strict=True)])
    texts, images, rests = (torch.tensor(counts).cumsum(0) for counts in (num_text, num_image, num_rest))
    joint = torch.arange(len(joint_rows))
    text = torch.arange(len(text_rows)) + (images - torch.tensor(num_image))[text_rows]
    image = torch.arange(len(image_rows)) + texts[image_rows]
    keys = joint + (rests - torch.tensor(num_rest))[joint_rows]

    def places(tokens: Tensor) -> Places:
        return Places(joint=tokens.to(device), keys=keys[tokens].to(device))

    return Layout(
        cached=cached,
        num_branches=tuple(len(shape.num_text) for shape in shapes),
        num_text=tuple(num_text),
        num_image=tuple(num_image),
        num_rest=tuple(num_rest),
        rotary=concat([table for shape, narrow in pairs for table in shape.tables(narrow)]),
        text_rows=text_rows.to(device),
        image_rows=image_rows.to(device),
        joint_rows=joint_rows.to(device),
        text_places=places(text),
        image_places=places(image),
        joint_places=places(joint),
    )


def rows(lengths: Sequence[int]) -> Tensor:
    """(2, 3) -> [0, 0, 1, 1, 1]"""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


@dataclass(frozen=True, eq=False)
class Batch:
    """One step of many jobs: what the model sees, and the layout of the first block."""

    jobs: tuple[Job, ...]
    layout: Layout
    image: Tensor  # [image tokens, latent + conditioning channels]
    text: Tensor  # [text tokens, width]
    pooled: Tensor  # [branches, pooled channels]
    sigma: Tensor  # [branches]
    guidance: Tensor  # [branches]

    def suits(self, layout: Layout, block: int) -> bool:
        return layout.cached == tuple(job.is_cached(block) for job in self.jobs)

    def turn(self, layout: Layout, image: Tensor, block: int) -> tuple[Layout, Tensor]:
        """The layout of a block and the image rows in it: where a job's plan turns, its unmasked tokens leave, or come
        back from the activations."""
        if self.suits(layout, block):
            return layout, image
        turned = lay_out(self.jobs, block)
        parts = iter(image.split(layout.num_image))
        return turned, concat([
            turn_one(next(parts), job, before, after, block)
            for job, before, after in zip(self.jobs, layout.cached, turned.cached, strict=True)
            for _ in job.branches
        ])  # fmt: skip

    def turn_joint(self, layout: Layout, joint: Tensor, block: int) -> tuple[Layout, Tensor]:
        if self.suits(layout, block):
            return layout, joint
        text, image = layout.part(joint.split(layout.num_joint))
        turned, image = self.turn(layout, image, block)
        return turned, turned.join(text, image)

    def deal(self, velocity: Tensor) -> list[list[Tensor]]:
        """Velocity [image tokens, latent channels], of masked tokens alone where the job cached any block; to each job
        one for each of its branches."""
        sizes = [len(job.inside if job.has_masked_velocity else job.masked) for job, _ in branches(self.jobs)]
        velocities = iter(velocity.split(sizes))
        return [[next(velocities) for _ in job.branches] for job in self.jobs]


def turn_one(image: Tensor, job: Job, before: bool, after: bool, block: int) -> Tensor:
    if before == after:
        return image
    if after:
        return image[job.inside]
    y: Tensor
    [y] = job.recall(block)  # of kind y: a plan that turns back was refused for kv
    return y.index_copy(0, job.inside, image)


def pack(jobs: Sequence[Job]) -> Batch:
    pairs = list(branches(jobs))
    return Batch(
        jobs=tuple(jobs),
        layout=lay_out(jobs, 0),
        image=concat([inputs(job) for job, _ in pairs]).to(pairs[0][1].text.dtype),
        text=concat([branch.text for _, branch in pairs]),
        pooled=torch.stack([branch.pooled for _, branch in pairs]),
        sigma=torch.stack([job.timestep for job, _ in pairs]),
        guidance=torch.stack([job.guidance for job, _ in pairs]),
    )


def inputs(job: Job) -> Tensor:  # [image tokens that flow into the first block, latent + conditioning channels]
    image = torch.cat([job.latents, job.conditioning], dim=1)
    return image[job.inside] if job.is_cached(0) else image


def branches(jobs: Sequence[Job]) -> Iterator[tuple[Job, Branch]]:
    return ((job, branch) for job in jobs for branch in job.branches)


def concat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
