"""A picture becomes a template with activations: teacher-forced dense passes over all its steps. Edits nothing.

All that unmasked tokens feed into the network is a fact of the template, so its steps do not wait for each other: they
are the jobs of a batch. Every pass sees empty prompts and a picture in which nothing is masked; where an empty negative
prompt is another thing than an empty prompt, both branches are kept, else one stands for both.
"""

from dataclasses import replace
from itertools import count

import numpy as np
import torch
from torch import Tensor

from instgenie.activations import NUM_PARTS, Activations, Key, Kind, digest
from instgenie.batch import Job
from instgenie.engine.prepare import choose_size, make_job
from instgenie.errors import EditError
from instgenie.models.model import Model
from instgenie.picture import check_edit
from instgenie.planner import Plan
from instgenie.types import Edit, Pixels

NUM_STEPS_AT_ONCE = 4


@torch.inference_mode()
def register(
    picture: Pixels,
    model: Model,
    size: tuple[int, int] | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    kind: Kind = "kv",
    num_steps_at_once: int = NUM_STEPS_AT_ONCE,
) -> Activations:
    """More steps at once are faster and need more memory; the numbers stay the same."""
    job = template_job(picture, model, size, steps, guidance)
    if kind not in NUM_PARTS or num_steps_at_once < 1:
        raise EditError(f"{num_steps_at_once} steps at once of kind {kind!r}: at least 1, of kv or y, are expected")
    registration = Registration(make_key(job.edit, model, kind), job, model, num_steps_at_once)
    while not registration.done:
        registration.advance()
    return registration.activations


@torch.inference_mode()
def template_job(
    picture: Pixels,
    model: Model,
    size: tuple[int, int] | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    strength: float = 1.0,
) -> Job:
    """The job whose steps a registration takes."""
    edit = edit_of_nothing(picture, model, size, steps, guidance, strength)
    size = choose_size(edit, model)
    job = make_job(replace(edit, size=size), np.zeros(size, dtype=np.bool_), size, model)
    return replace(job, branches=model.template_branches(job.grid))


class Registration:
    """A template on its way to its activations, a few steps at a time."""

    def __init__(self, key: Key, job: Job, model: Model, num_steps_at_once: int = NUM_STEPS_AT_ONCE) -> None:
        self.key = key
        self.model = model
        self.num_steps_at_once = num_steps_at_once
        self.jobs = [
            replace(job, step=step, latents=job.template.at(step, job.schedule)) for step in range(job.num_steps)
        ]
        self.num_registered_steps = 0
        self._rows: list[Tensor] = []
        self._times: list[Tensor] = []

    @property
    def num_steps(self) -> int:
        return len(self.jobs)

    @property
    def done(self) -> bool:
        return self.num_registered_steps == self.num_steps

    @property
    def num_bytes(self) -> int:
        """Of all steps; known after the first few."""
        return sum(rows.nbytes for rows in self._rows)

    @torch.inference_mode()
    def advance(self) -> None:
        start = self.num_registered_steps
        chosen = self.jobs[start : start + self.num_steps_at_once]
        num_branches = len(chosen[0].branches)
        places = count()

        def keep(seen: Tensor) -> None:
            place = next(places)
            if place == len(self._rows):
                self._rows.append(seen.new_empty(num_branches, self.num_steps, *seen.shape[1:]))
            by_branch = seen.unflatten(0, (-1, num_branches)).transpose(0, 1)  # [branches, steps, 2 or 1, ...]
            self._rows[place][:, start : start + by_branch.shape[1]] = by_branch

        self._times.append(self.model.observe_time(chosen))
        self.model.observe(chosen, self.key.kind, keep)
        self.num_registered_steps += len(chosen)

    @property
    def activations(self) -> Activations:
        assert self.done
        num_tokens = len(self.jobs[0].masked)
        return Activations(self.key, self.model.units, num_tokens, tuple(self._rows), torch.cat(self._times))


def edit_of_nothing(
    picture: Pixels,
    model: Model,
    size: tuple[int, int] | None,
    steps: int | None,
    guidance: float | None,
    strength: float = 1.0,
) -> Edit:
    """The edit whose steps a registration takes; checked as an edit of everything."""
    steps = model.steps if steps is None else steps
    guidance = model.guidance if guidance is None else guidance
    mask = np.ones(np.shape(picture)[:2], dtype=np.bool_)
    edit = Edit(picture, mask, prompt="", steps=steps, guidance=guidance, size=size, strength=strength)
    check_edit(edit)
    return edit


def make_key(edit: Edit, model: Model, kind: Kind) -> Key:
    size = choose_size(edit, model)
    num_tokens = (size[0] // model.patch) * (size[1] // model.patch)
    return Key(
        picture=digest(edit.picture),
        model=model.name,
        size=size,
        levels=model.schedule(edit, num_tokens).levels,
        guidance=model.embedded_guidance(edit),
        kind=kind,
        dtype=str(model.dtype),
    )


def reuse(job: Job, activations: Activations, plan: Plan | None = None) -> Job:
    """The job with its template's activations; by default every block is cached."""
    return replace(job, activations=activations, plan=(True,) * activations.num_blocks if plan is None else plan)
