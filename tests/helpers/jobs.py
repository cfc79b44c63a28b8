"""Jobs with random tokens and no model."""

import torch

from helpers.edits import make_edit
from instgenie.jobs.job import Branch, Job, Template
from instgenie.jobs.sampler import FlowSchedule

CHANNELS, WIDTH, POOLED, HEAD = 4, 6, 3, 2


def make_job(
    num_image: int, num_text: tuple[int, ...], sigmas: tuple[float, ...], scale: float = 1.0, **fields: float
) -> Job:
    generator = torch.Generator().manual_seed(num_image)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    branches = tuple(
        Branch(random(length, WIDTH), random(POOLED), random(length + num_image, HEAD)) for length in num_text
    )
    return Job(
        edit=make_edit(**fields),
        grid=(1, num_image),
        template=Template(random(num_image, CHANNELS), random(num_image, CHANNELS)),
        masked=torch.arange(num_image)[:, None] % 3 == 0,
        conditioning=random(num_image, 2),
        branches=branches,
        scale=scale,
        schedule=FlowSchedule(sigmas),
        latents=random(num_image, CHANNELS),
    )


def make_ragged() -> list[Job]:
    """Three jobs of other sizes and schedules; the second has two branches."""
    return [
        make_job(5, (2,), (1.0, 0.5, 0.0), guidance=1.0),
        make_job(7, (3, 1), (0.8, 0.0), scale=3.0, guidance=2.0),
        make_job(4, (2,), (0.9, 0.6, 0.3, 0.0), guidance=3.0),
    ]
