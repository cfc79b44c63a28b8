"""Jobs and tensors as bytes, and back. The pixels of an edit are left out, because no step reads them."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from instgenie.cluster.wire import Frame, JobHead, TensorHead
from instgenie.jobs.controls import JobControl
from instgenie.jobs.job import Branch, Job, Template
from instgenie.jobs.sampler import DdimSchedule, EulerSchedule, FlowSchedule, Schedule
from instgenie.types import ControlUse, Edit, LoraUse

SCHEDULES: dict[str, Any] = {kind.__name__: kind for kind in (FlowSchedule, DdimSchedule, EulerSchedule)}
PIXELS = ("picture", "mask", "source", "whole", "references", "control_images")


def job_frames(job: Job) -> tuple[JobHead, list[Frame]]:
    tensors = list(job_tensors(job))
    head = JobHead(
        edit={field.name: getattr(job.edit, field.name) for field in fields(Edit) if field.name not in PIXELS},
        grid=job.grid,
        scale=float(job.scale),
        keeps_norm=job.keeps_norm,
        schedule_kind=type(job.schedule).__name__,
        schedule=msgspec.Raw(msgspec.msgpack.encode(job.schedule)),
        num_prompts=tuple(branch.num_prompt for branch in job.branches),
        num_facts=job.branches[0].num_facts,
        has_words=bool(job.controls) and job.branches[0].words is not None,
        tensors=tuple(tensor_head(tensor) for tensor in tensors),
    )
    return head, [tensor_frame(tensor) for tensor in tensors]


def job_tensors(job: Job) -> Iterator[Tensor]:
    yield from (job.template.clean, job.template.noise, job.masked, job.conditioning, job.latents)
    yield job.latents[:0] if job.reference is None else job.reference
    for branch in job.branches:
        yield from (branch.text, branch.pooled, branch.rotary)
    yield from (control.hint for control in job.controls)
    yield from (branch.words for branch in job.branches if job.controls and branch.words is not None)


def read_job(head: JobHead, frames: Sequence[Frame], device: torch.device) -> Job:
    """Read a job at its first step. Its edit has no pixels."""
    tensors = (read_tensor(*pair).to(device) for pair in zip(head.tensors, frames, strict=True))
    clean, noise, masked, conditioning, latents, reference = (next(tensors) for _ in range(6))
    schedule: Schedule = msgspec.msgpack.decode(head.schedule, type=SCHEDULES[head.schedule_kind])
    edit = read_edit(head.edit)
    branches = [
        Branch(next(tensors), next(tensors), next(tensors), num, num_facts=head.num_facts) for num in head.num_prompts
    ]
    controls = tuple(JobControl(use, next(tensors)) for use in edit.controls)
    if head.has_words:
        branches = [replace(branch, words=next(tensors)) for branch in branches]
    return Job(
        edit=edit,
        grid=head.grid,
        template=Template(clean, noise),
        masked=masked,
        conditioning=conditioning,
        branches=tuple(branches),
        scale=head.scale,
        keeps_norm=head.keeps_norm,
        schedule=schedule,
        latents=latents,
        controls=controls,
        reference=reference if len(reference) else None,
    )


def read_edit(given: dict[str, Any]) -> Edit:
    tuples = {name: given[name] and tuple(given[name]) for name in ("size", "own_steps")}
    uses = {
        "loras": tuple(LoraUse(*lora) for lora in given["loras"]),
        "controls": tuple(read_control(control) for control in given["controls"]),
    }
    return Edit(**given | tuples | uses, picture=np.empty((0, 0, 3), np.uint8), mask=np.empty((0, 0), np.bool_))


def read_control(given: Sequence[Any]) -> ControlUse:
    use = ControlUse(*given)
    return use._replace(places=(use.places[0], use.places[1]))


def tensor_head(tensor: Tensor) -> TensorHead:
    return TensorHead(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def tensor_frame(tensor: Tensor) -> Frame:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def read_tensor(head: TensorHead, frame: Frame) -> Tensor:
    dtype: torch.dtype = getattr(torch, head.dtype)
    if not len(frame):  # torch refuses an empty buffer
        return torch.empty(head.shape, dtype=dtype)
    return torch.frombuffer(bytearray(frame), dtype=dtype).view(head.shape)  # a copy, because frames are read-only
