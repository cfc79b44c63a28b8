"""The ragged batch of a Flux: packing, splitting, advancing; no model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.jobs import CHANNELS, WIDTH, make_ragged

from instgenie.jobs.activations import Activations, Key
from instgenie.jobs.job import Job
from instgenie.jobs.rows import OWN_ROWS
from instgenie.models.joint.batch import pack
from instgenie.models.joint.layout import rows


@pytest.fixture
def jobs() -> list[Job]:
    return make_ragged()


def test_rows() -> None:
    assert rows(np.array([2, 0, 3])).tolist() == [0, 0, 2, 2, 2]


def test_differences_are_columns(jobs: list[Job]) -> None:
    jobs[2].step = 1
    batch = pack(jobs)
    assert batch.layout.num_image == (5, 7, 7, 4)
    assert batch.layout.num_text == (2, 3, 1, 2)
    assert batch.layout.num_joint == (7, 10, 8, 6)
    assert batch.image.shape == (23, CHANNELS + 2)
    assert torch.equal(batch.image[5:12], batch.image[12:19])  # two branches, one state
    torch.testing.assert_close(batch.sigma, torch.tensor([1.0, 0.8, 0.8, 0.6]))
    assert batch.guidance.tolist() == [1.0, 2.0, 2.0, 3.0]
    assert batch.layout.image_rows.bincount().tolist() == [5, 7, 7, 4]
    assert batch.layout.text_rows.bincount().tolist() == [2, 3, 1, 2]
    assert batch.layout.joint_rows.bincount().tolist() == [7, 10, 8, 6]
    assert batch.layout.rotary.shape[0] == 31


@pytest.mark.parametrize("num_jobs", [1, 2, 3])
def test_part_undoes_join(jobs: list[Job], num_jobs: int) -> None:
    batch = pack(jobs[:num_jobs])
    image = batch.image[:, :WIDTH]
    joint = batch.layout.join(batch.text, image)
    text_again, image_again = batch.layout.part(joint.split(batch.layout.num_joint))
    assert torch.equal(text_again, batch.text)
    assert torch.equal(image_again, image)
    first = jobs[0].branches[0]
    assert torch.equal(joint[: len(first.text)], first.text)
    assert torch.equal(joint[len(first.text) :][:5], image[:5])


def test_advance_moves_masked_tokens_and_pins_the_others(jobs: list[Job]) -> None:
    before = [job.latents for job in jobs]
    velocity = torch.arange(23.0)[:, None].expand(23, CHANNELS)
    for job, velocities in zip(jobs, pack(jobs).deal(velocity), strict=True):
        job.advance(velocities)
    positive, negative = velocity[5:12], velocity[12:19]
    moved = before[1] + (0.0 - 0.8) * (negative + 3.0 * (positive - negative))
    torch.testing.assert_close(jobs[1].latents[::3], moved[::3])
    torch.testing.assert_close(jobs[1].latents[1::3], jobs[1].template.clean[1::3])
    torch.testing.assert_close(jobs[0].latents[::3], (before[0] - 0.5 * velocity[:5])[::3])
    halfway = 0.5 * jobs[0].template.clean + 0.5 * jobs[0].template.noise
    torch.testing.assert_close(jobs[0].latents[1::3], halfway[1::3])
    assert [job.done for job in jobs] == [False, True, False]


def with_activations(job: Job, plan: tuple[bool, ...]) -> Job:
    num_tokens = len(job.masked)
    rows = tuple(torch.randn(1, job.num_steps, 1, num_tokens, WIDTH) for _ in plan)
    key = Key("picture", "model", (1, 1), job.num_steps, (1.0,), 1.0, "y", "float32")
    time = torch.randn(job.num_steps, WIDTH)
    return replace(job, activations=Activations(key, (len(plan),), num_tokens, rows, time, key.kept_steps), plan=plan)


def test_masked_tokens_are_computed_alone_where_a_job_is_cached(jobs: list[Job]) -> None:
    jobs[1] = with_activations(jobs[1], (True, False, True))
    batch = pack(jobs)
    assert batch.layout.cached == (False, True, False)
    assert batch.layout.num_image == (5, 3, 3, 4)
    assert batch.layout.num_joint == (7, 6, 4, 6)
    assert batch.layout.rotary.shape[0] == 23
    seen = torch.cat([jobs[1].latents, jobs[1].conditioning], dim=1)
    assert torch.equal(batch.image[5:8], seen[::3])
    table = jobs[1].branches[0].rotary  # three text tokens, then the image tokens
    assert torch.equal(batch.layout.rotary[7:13], torch.cat([table[:3], table[3:][::3]]))


def test_layouts_are_kept_while_jobs_stay_together(jobs: list[Job]) -> None:
    first = pack(jobs).layout
    jobs[2].step += 1
    assert pack(jobs).layout is first
    assert pack(jobs[::-1]).layout is not first
    assert pack([*jobs[:2], replace(jobs[2])]).layout is not first


def test_places(jobs: list[Job]) -> None:
    jobs[1] = with_activations(jobs[1], (True,))
    layout = pack(jobs).layout
    assert layout.num_keys == (7, 10, 8, 6)
    assert layout.text_places.joint.tolist() == [0, 1, 7, 8, 9, 13, 17, 18]
    assert layout.image_places.joint.tolist() == [*range(2, 7), *range(10, 13), *range(14, 17), *range(19, 23)]
    narrow = [*range(7), *(7, 8, 9), *(10, 13, 16), 17, *(18, 21, 24)]  # with gaps for tokens that are not computed
    assert layout.joint_places.keys.tolist() == [*narrow, *range(25, 31)]
    assert torch.equal(layout.image_places.keys, layout.joint_places.keys[layout.image_places.joint])
    assert layout.kept_keys((0, 0, 0)) == [[slice(2, 7)], [slice(10, 17), slice(18, 25)], [slice(27, 31)]]
    assert layout.kept_keys((2, 0, 2)) == [[slice(0, 7)], [slice(10, 17), slice(18, 25)], [slice(25, 31)]]


def test_unmasked_tokens_come_back_and_leave(jobs: list[Job]) -> None:
    jobs[1] = with_activations(jobs[1], (True, False, True))
    batch = pack(jobs)
    image = batch.image[:, :WIDTH]
    same, _, untouched = batch.turn(batch.layout, batch.text, image, 0)
    assert same is batch.layout
    assert untouched is image
    wide, text, turned = batch.turn(batch.layout, batch.text, image, 1)
    assert text is batch.text
    assert wide.num_image == (5, 7, 7, 4)
    assert torch.equal(turned[5:12][::3], image[5:8])
    assert torch.equal(turned[5:12][1::3], OWN_ROWS.read(jobs[1], 1, 0)[0][1::3])
    narrow, _, again = batch.turn(wide, text, turned, 2)
    assert narrow is batch.layout  # cached
    assert torch.equal(again, image)
    _, joint = batch.turn_joint(batch.layout, batch.layout.join(batch.text, image), 1)
    assert torch.equal(joint, wide.join(batch.text, turned))


def test_advance_with_velocities_of_masked_tokens_alone(jobs: list[Job]) -> None:
    cached = with_activations(jobs[0], (True, False))
    velocity = torch.randn(5, CHANNELS)
    jobs[0].advance(*pack([jobs[0]]).deal(velocity))
    cached.advance(*pack([cached]).deal(velocity[::3]))
    assert torch.equal(cached.latents, jobs[0].latents)
    assert cached.step == 1
