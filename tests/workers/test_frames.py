"""Jobs as frames, and back."""

from dataclasses import fields

import pytest
import torch
from helpers.edits import make_edit

from instgenie.cluster.wire import Denoise, Denoising, decode, encode
from instgenie.engine.loop import Engine
from instgenie.engine.prepare import prepare
from instgenie.models.model import Model
from instgenie.workers.frames import job_frames, job_tensors, read_job, read_tensor, tensor_frame, tensor_head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.bool])
@pytest.mark.parametrize("shape", [(3, 4), (0, 5), (2, 0), (1,)])
def test_tensors_survive(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    again = read_tensor(tensor_head(tensor), bytes(tensor_frame(tensor)))
    assert again.dtype == dtype
    assert again.shape == shape
    assert torch.equal(again, tensor)


def test_tensors_of_any_layout() -> None:
    tensor = torch.arange(24).view(4, 6).T[::2]
    assert torch.equal(read_tensor(tensor_head(tensor), tensor_frame(tensor)), tensor)


def test_a_job_that_travelled_takes_the_same_steps(model: Model) -> None:
    edit = make_edit(steps=3, true_guidance=2.0, negative_prompt="sky", guidance=2.5)
    job = prepare(edit, model)
    head, frames = job_frames(job)
    message = decode(encode(Denoise((Denoising("a", 1, head, None, False, 0),))))
    assert isinstance(message, Denoise)
    again = read_job(message.jobs[0].job, [bytes(frame) for frame in frames], model.device)
    for mine, other in zip(job_tensors(job), job_tensors(again), strict=True):
        assert torch.equal(mine, other)
    assert again.schedule == job.schedule
    kept = [field.name for field in fields(edit) if field.name not in ("picture", "mask")]
    assert {name: getattr(again.edit, name) for name in kept} == {name: getattr(edit, name) for name in kept}
    for one in (job, again):
        engine = Engine(model)
        engine.join(one)
        while engine.jobs:
            engine.step()
    assert torch.equal(job.latents, again.latents)
