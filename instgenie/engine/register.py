"""A picture becomes a template with activations: teacher-forced dense passes over all its steps. Edits nothing.

All that unmasked tokens feed into the network is a fact of the template, so its steps do not wait for each other: they
are the jobs of a batch. Every pass sees a picture in which nothing is masked and, unless told otherwise, empty prompts;
where an empty negative prompt is another thing than the prompt, both branches are kept, else one stands for both.
"""

from collections.abc import Iterator
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
    prompt: str = "",
    isolated: bool = False,
) -> Activations:
    """More steps at once are faster and need more memory; the numbers stay the same. The prompt is what the passes see;
    isolated, they see no text at all."""
    edit = edit_of_nothing(picture, model, size, steps, guidance)
    if kind not in NUM_PARTS or num_steps_at_once < 1:
        raise EditError(f"{num_steps_at_once} steps at once of kind {kind!r}: at least 1, of kv or y, are expected")
    size = choose_size(edit, model)
    job = make_job(edit, np.zeros(size, dtype=np.bool_), size, model)
    job = replace(job, branches=model.template_branches(job.grid, prompt, isolated))
    jobs = [replace(job, step=step, latents=job.template.at(step, job.schedule)) for step in range(job.num_steps)]
    key = replace(make_key(edit, model, kind), prompt=prompt, isolated=isolated)
    return fill(key, jobs, model, num_steps_at_once)


def fill(key: Key, jobs: list[Job], model: Model, num_steps_at_once: int) -> Activations:
    rows: list[Tensor] = []
    times = []
    num_branches = len(jobs[0].branches)
    for start in range(0, len(jobs), num_steps_at_once):
        chosen = jobs[start : start + num_steps_at_once]
        places = count()

        def keep(seen: Tensor, start: int = start, places: Iterator[int] = places) -> None:
            place = next(places)
            if place == len(rows):
                rows.append(seen.new_empty(num_branches, len(jobs), *seen.shape[1:]))
            by_branch = seen.unflatten(0, (-1, num_branches)).transpose(0, 1)  # [branches, steps, 2 or 1, ...]
            rows[place][:, start : start + by_branch.shape[1]] = by_branch

        times.append(model.observe_time(chosen))
        model.observe(chosen, key.kind, keep)
    return Activations(key, model.units, len(jobs[0].masked), tuple(rows), torch.cat(times))


def edit_of_nothing(
    picture: Pixels, model: Model, size: tuple[int, int] | None, steps: int | None, guidance: float | None
) -> Edit:
    """The edit whose steps a registration takes; checked as an edit of everything."""
    steps = model.steps if steps is None else steps
    guidance = model.guidance if guidance is None else guidance
    mask = np.ones(np.shape(picture)[:2], dtype=np.bool_)
    edit = Edit(picture, mask, prompt="", steps=steps, guidance=guidance, size=size)
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
