"""The ragged batch: tokens of all jobs packed into one tensor, what differs between jobs as columns.

Knows tokens, branches and steps; knows no picture, no prompt and no module of a model. A job has one branch, or two
when its guidance is true (classifier-free): both branches share the job's latents.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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

    @property
    def num_steps(self) -> int:
        return len(self.sigmas) - 1

    @property
    def done(self) -> bool:
        return self.step == self.num_steps

    @property
    def sigma(self) -> float:
        return self.sigmas[self.step]

    def advance(self, velocities: Sequence[Tensor]) -> None:
        """Masked tokens follow the velocity, one per branch; the others stay on the template's trajectory."""
        sigma_next = self.sigmas[self.step + 1]
        velocity = guide(velocities, self.edit.true_guidance)
        moved = flow_euler(self.latents, velocity, self.sigma, sigma_next)
        self.latents = torch.where(self.masked, moved, self.template.at(sigma_next))
        self.step += 1


def guide(velocities: Sequence[Tensor], scale: float) -> Tensor:
    positive, *negative = (velocity.float() for velocity in velocities)
    return negative[0] + scale * (positive - negative[0]) if negative else positive


@dataclass(frozen=True, eq=False)
class Batch:
    """One step of many jobs. Branches lie one after the other; rows say which branch a token belongs to."""

    jobs: tuple[Job, ...]
    image: Tensor  # [image tokens, latent + conditioning channels]
    text: Tensor  # [text tokens, width]
    rotary: Tensor  # [joint tokens, head channels / 2], joint = each branch's text, then its image
    pooled: Tensor  # [branches, pooled channels]
    sigma: Tensor  # [branches]
    guidance: Tensor  # [branches]
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

    def advance(self, velocity: Tensor) -> None:  # velocity [image tokens, latent channels]
        velocities = iter(velocity.split(self.num_image))
        for job in self.jobs:
            job.advance([next(velocities) for _ in job.branches])


def pack(jobs: Sequence[Job]) -> Batch:
    pairs = [(job, branch) for job in jobs for branch in job.branches]
    device, dtype = pairs[0][1].text.device, pairs[0][1].text.dtype
    num_text = tuple(len(branch.text) for _, branch in pairs)
    num_image = tuple(len(job.latents) for job, _ in pairs)
    num_joint = tuple(len(branch.rotary) for _, branch in pairs)
    return Batch(
        jobs=tuple(jobs),
        image=concat([torch.cat([job.latents, job.conditioning], dim=1) for job, _ in pairs]).to(dtype),
        text=concat([branch.text for _, branch in pairs]),
        rotary=concat([branch.rotary for _, branch in pairs]),
        pooled=torch.stack([branch.pooled for _, branch in pairs]),
        sigma=torch.tensor([job.sigma for job, _ in pairs], device=device),
        guidance=torch.tensor([job.edit.guidance for job, _ in pairs], dtype=torch.float32, device=device),
        num_text=num_text,
        num_image=num_image,
        text_rows=rows(num_text, device),
        image_rows=rows(num_image, device),
        joint_rows=rows(num_joint, device),
    )


def rows(lengths: Sequence[int], device: torch.device) -> Tensor:
    """(2, 3) -> [0, 0, 1, 1, 1]"""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(device)


def concat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
