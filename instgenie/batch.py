"""The ragged batch: tokens of all jobs packed into one tensor, what differs between jobs as columns.

Knows tokens, branches, steps and plans; knows no picture, no prompt and no module of a model. A job has one branch, or
two when its guidance is true (classifier-free): both branches share the job's latents and its template's activations.
Through a dense block all tokens of a job flow, through a cached block its text and its masked tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from instgenie.activations import Activations
from instgenie.errors import PlanError
from instgenie.planner import DENSE, Plan, check_plan, is_cached
from instgenie.sampler import flow_euler, flow_noise
from instgenie.types import Edit


@dataclass(frozen=True, eq=False)
class Template:
    """A picture's own trajectory: what its tokens are at every sigma, whoever edits it."""

    clean: Tensor  # [tokens, channels]
    noise: Tensor  # [tokens, channels]

    def at(self, sigma: float) -> Tensor:
        return flow_noise(self.clean, self.noise, sigma)


@dataclass(frozen=True, eq=False)
class Branch:
    """One sequence [text | image] of a job: what the model sees at every step besides the image tokens."""

    text: Tensor  # [text tokens, width], embedded
    pooled: Tensor  # [pooled channels]
    rotary: Tensor  # [text tokens + image tokens, head channels / 2], complex


@dataclass(eq=False)
class Job:
    """An edit on a worker. One owner advances it step by step."""

    edit: Edit
    grid: tuple[int, int]  # rows and columns of image tokens
    template: Template
    masked: Tensor  # [tokens, 1], bool
    conditioning: Tensor  # [tokens, channels that fill models see beside the latents; 0 for the others]
    branches: tuple[Branch, ...]  # the prompt's, then the negative prompt's where guidance is true
    sigmas: list[float]  # [steps + 1]
    latents: Tensor  # [tokens, channels]
    step: int = 0
    activations: Activations | None = None  # of the template
    plan: Plan = DENSE  # of the steps after the edit's dense steps

    def __post_init__(self) -> None:
        cache = self.activations
        if cache is None and any(self.plan):
            raise PlanError(f"the plan caches {sum(self.plan)} blocks: the template has no activations")
        if cache is not None:
            check_plan(self.plan, cache.kind, cache.num_blocks)
            assert (cache.num_steps, cache.num_tokens) == (self.num_steps, len(self.masked))

    @property
    def num_steps(self) -> int:
        return len(self.sigmas) - 1

    @property
    def done(self) -> bool:
        return self.step == self.num_steps

    @property
    def sigma(self) -> float:
        return self.sigmas[self.step]

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

    def is_cached(self, block: int) -> bool:
        """Whether a block is cached at this step; see `planner.is_cached` for what comes after the last."""
        return self.step >= self.edit.dense_steps and is_cached(self.plan, block)

    @property
    def has_masked_velocity(self) -> bool:
        return self.is_cached(len(self.plan))

    def recall(self, block: int) -> Tensor:
        """What the activations know of a block at this step [2 or 1, tokens, width]"""
        assert self.activations is not None
        return self.activations.rows[self.step, block]

    @property
    def num_computed_tokens(self) -> int:
        """Image tokens computed, in the mean over steps and blocks."""
        cached_steps = max(self.num_steps - self.edit.dense_steps, 0) / self.num_steps
        cached_blocks = sum(self.plan) / max(len(self.plan), 1)
        return round(len(self.masked) - cached_steps * cached_blocks * len(self.outside))

    def advance(self, velocities: Sequence[Tensor]) -> None:
        """Masked tokens follow the velocity, one per branch; the others stay on the template's trajectory."""
        sigma_next = self.sigmas[self.step + 1]
        velocity = guide(velocities, self.edit.true_guidance)
        if self.has_masked_velocity:
            velocity = torch.zeros_like(self.latents).index_copy(0, self.inside, velocity)
        moved = flow_euler(self.latents, velocity, self.sigma, sigma_next)
        self.latents = torch.where(self.masked, moved, self.template.at(sigma_next))
        self.step += 1


def guide(velocities: Sequence[Tensor], scale: float) -> Tensor:
    positive, *negative = (velocity.float() for velocity in velocities)
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

    def advance(self, velocity: Tensor) -> None:
        """Velocity [image tokens, latent channels], of masked tokens alone where the job cached any block."""
        sizes = [len(job.inside if job.has_masked_velocity else job.masked) for job, _ in branches(self.jobs)]
        velocities = iter(velocity.split(sizes))
        for job in self.jobs:
            job.advance([next(velocities) for _ in job.branches])


def pack(jobs: Sequence[Job]) -> Batch:
    pairs = list(branches(jobs))
    device, dtype = pairs[0][1].text.device, pairs[0][1].text.dtype
    return Batch(
        **vars(lay_out(jobs, 0)),
        image=concat([inputs(job) for job, _ in pairs]).to(dtype),
        text=concat([branch.text for _, branch in pairs]),
        pooled=torch.stack([branch.pooled for _, branch in pairs]),
        sigma=torch.tensor([job.sigma for job, _ in pairs], device=device),
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
