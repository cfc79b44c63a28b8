"""Jobs: guidance and the steps they take; no model."""

import torch
from helpers.jobs import CHANNELS, make_ragged

from instgenie.jobs.job import guide


def test_guide_without_a_second_branch_is_the_first() -> None:
    velocity = torch.randn(3, 2)
    assert torch.equal(guide([velocity], 1.0), velocity)


def test_guided_predictions_may_keep_the_length_of_the_prompts() -> None:
    positive, negative = torch.randn(2, 5, 3)
    plain, kept = guide([positive, negative], 3.0), guide([positive, negative], 3.0, keeps_norm=True)
    torch.testing.assert_close(plain, negative + 3 * (positive - negative))
    torch.testing.assert_close(kept.norm(dim=1), positive.norm(dim=1))
    torch.testing.assert_close(kept / kept.norm(dim=1, keepdim=True), plain / plain.norm(dim=1, keepdim=True))
    assert torch.equal(guide([positive], 3.0, keeps_norm=True), positive)


def test_a_step_moves_masked_tokens_and_pins_the_others() -> None:
    job, *_ = make_ragged()
    before = job.latents
    velocity = torch.randn(5, CHANNELS)
    job.advance([velocity])
    torch.testing.assert_close(job.latents[::3], (before - 0.5 * velocity)[::3])
    torch.testing.assert_close(job.latents[1::3], job.template.at(1, job.schedule)[1::3])
    assert (job.step, job.done) == (1, False)
    job.advance([velocity])
    assert job.done
    assert torch.equal(job.latents[1::3], job.template.clean[1::3])
