"""Jobs, and the ragged batch: tokens of all jobs packed into one tensor, what differs between jobs as columns.

Knows tokens, branches, steps and plans; knows no picture, no prompt and no module of a model. A job has one branch, or
two when its guidance is true (classifier-free): both branches share the job's latents and its template's activations.
Through a dense block all tokens of a job flow, through a cached block its text and its masked tokens.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from instgenie.activations import Activations
from instgenie.errors import PlanError
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
    def timestep(self) -> float:
        return self.schedule.timestep(self.step)

    @cached_property
    def inside(self) -> Tensor:  # [masked tokens], where they are
        return self.masked[:, 0].nonzero()[:, 0]

    @cached_property
    def outside(self) -> Tensor:  # [unmasked tokens], where they are
        return (~self.masked[:, 0]).nonzero()[:, 0]

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
            self.levels[num_tokens] = pool(self.masked, self.grid, num_tokens)
        return self.levels[num_tokens]

    def is_cached(self, block: int) -> bool:
        """Whether a block is cached at this step; see `planner.is_cached` for what comes after the last."""
        return self.step >= self.edit.dense_steps and is_cached(self.plan, block)

    @property
    def has_masked_velocity(self) -> bool:
        return self.is_cached(len(self.plan))

    def recall(self, index: int, branch: int = 0) -> Tensor:
        """What the activations keep at a place of the pass, at this step [2 or 1, tokens, width]. A branch that was
        not registered on its own reads the last that was."""
        assert self.activations is not None
        rows = self.activations.rows[index]
        return rows[min(branch, len(rows) - 1), self.step]

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
    """Which tokens flow through a block. Branches lie one after the other; rows say which branch a token belongs to."""

    jobs: tuple[Job, ...]
    cached: tuple[bool, ...]  # of each job: whether its masked tokens flow alone
    rotary: Tensor  # [joint tokens, head channels / 2], joint = each branch's text, then its image
    num_text: tuple[int, ...]  # of each branch
    num_image: tuple[int, ...]  # of each branch
    text_rows: Tensor  # [text tokens]
    image_rows: Tensor  # [image tokens]
    joint_rows: Tensor  # [joint tokens]

    @property
    def num_joint(self) -> tuple[int, ...]:
        return tuple(text + image for text, image in zip(self.num_text, self.num_image, strict=True))

    def join(self, text: Tensor, image: Tensor) -> Tensor:
        """[text tokens, ...] and [image tokens, ...] -> [joint tokens, ...]"""
        pairs = zip(text.split(self.num_text), image.split(self.num_image), strict=True)
        return torch.cat([part for pair in pairs for part in pair])

    def part(self, joint: Tensor) -> tuple[Tensor, Tensor]:
        """[joint tokens, ...] -> [text tokens, ...] and [image tokens, ...]; views when there is one branch."""
        sizes = [size for pair in zip(self.num_text, self.num_image, strict=True) for size in pair]
        parts = joint.split(sizes)
        return concat(parts[0::2]), concat(parts[1::2])

    def suits(self, block: int) -> bool:
        return self.cached == tuple(job.is_cached(block) for job in self.jobs)

    def turn(self, image: Tensor, block: int) -> tuple["Layout", Tensor]:
        """The layout of a block and the image rows in it: where a job's plan turns, its unmasked tokens leave, or come
        back from the activations."""
        if self.suits(block):
            return self, image
        layout = lay_out(self.jobs, block)
        parts = iter(image.split(self.num_image))
        turned = [
            turn_one(next(parts), job, before, after, block)
            for job, before, after in zip(self.jobs, self.cached, layout.cached, strict=True)
            for _ in job.branches
        ]
        return layout, concat(turned)

    def turn_joint(self, joint: Tensor, block: int) -> tuple["Layout", Tensor]:
        if self.suits(block):
            return self, joint
        text, image = self.part(joint)
        layout, image = self.turn(image, block)
        return layout, layout.join(text, image)


def turn_one(image: Tensor, job: Job, before: bool, after: bool, block: int) -> Tensor:
    if before == after:
        return image
    if after:
        return image[job.inside]
    y: Tensor
    [y] = job.recall(block)  # of kind y: a plan that turns back was refused for kv
    return y.index_copy(0, job.inside, image)


def lay_out(jobs: Sequence[Job], block: int) -> Layout:
    cached = tuple(job.is_cached(block) for job in jobs)
    triples = [(job, branch, narrow) for job, narrow in zip(jobs, cached, strict=True) for branch in job.branches]
    device = triples[0][1].text.device
    num_text = tuple(len(branch.text) for _, branch, _ in triples)
    num_image = tuple(len(job.inside if narrow else job.masked) for job, _, narrow in triples)
    rotary = [masked_rotary(job, branch) if narrow else branch.rotary for job, branch, narrow in triples]
    return Layout(
        jobs=tuple(jobs),
        cached=cached,
        rotary=concat(rotary),
        num_text=num_text,
        num_image=num_image,
        text_rows=rows(num_text, device),
        image_rows=rows(num_image, device),
        joint_rows=rows([len(table) for table in rotary], device),
    )


def masked_rotary(job: Job, branch: Branch) -> Tensor:  # [text tokens + masked tokens, head channels / 2]
    num_text = len(branch.text)
    return torch.cat([branch.rotary[:num_text], branch.rotary[num_text:][job.inside]])


@dataclass(frozen=True, eq=False)
class Batch(Layout):
    """One step of many jobs: the layout of the first block, and what the model sees."""

    image: Tensor  # [image tokens, latent + conditioning channels]
    text: Tensor  # [text tokens, width]
    pooled: Tensor  # [branches, pooled channels]
    sigma: Tensor  # [branches]
    guidance: Tensor  # [branches]

    def deal(self, velocity: Tensor) -> list[list[Tensor]]:
        """Velocity [image tokens, latent channels], of masked tokens alone where the job cached any block; to each job
        one for each of its branches."""
        sizes = [len(job.inside if job.has_masked_velocity else job.masked) for job, _ in branches(self.jobs)]
        velocities = iter(velocity.split(sizes))
        return [[next(velocities) for _ in job.branches] for job in self.jobs]


def pack(jobs: Sequence[Job]) -> Batch:
    pairs = list(branches(jobs))
    device, dtype = pairs[0][1].text.device, pairs[0][1].text.dtype
    return Batch(
        **vars(lay_out(jobs, 0)),
        image=concat([inputs(job) for job, _ in pairs]).to(dtype),
        text=concat([branch.text for _, branch in pairs]),
        pooled=torch.stack([branch.pooled for _, branch in pairs]),
        sigma=torch.tensor([job.timestep for job, _ in pairs], device=device),
        guidance=torch.tensor([job.edit.guidance for job, _ in pairs], dtype=torch.float32, device=device),
    )


def inputs(job: Job) -> Tensor:  # [image tokens that flow into the first block, latent + conditioning channels]
    image = torch.cat([job.latents, job.conditioning], dim=1)
    return image[job.inside] if job.is_cached(0) else image


def branches(jobs: Sequence[Job]) -> Iterator[tuple[Job, Branch]]:
    return ((job, branch) for job in jobs for branch in job.branches)


def rows(lengths: Sequence[int], device: torch.device) -> Tensor:
    """(2, 3) -> [0, 0, 1, 1, 1]"""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(device)


def concat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
