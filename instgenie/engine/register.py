"""A picture becomes a template with activations: teacher-forced dense passes over all its steps. Edits nothing.

All that unmasked tokens feed into the network is a fact of the template, so its steps do not wait for each other: they
are the jobs of a batch. Every pass sees the empty prompt and a picture in which nothing is masked.
"""

from dataclasses import replace

import numpy as np
import torch

from instgenie.activations import NUM_PARTS, Activations, Key, Kind, digest
from instgenie.batch import Job, pack
from instgenie.engine.prepare import choose_size, make_job
from instgenie.errors import EditError
from instgenie.models.flux import embed_time, num_blocks, observe
from instgenie.models.load import Model
from instgenie.picture import check_edit
from instgenie.planner import Plan
from instgenie.sampler import flow_sigmas
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
    edit = edit_of_nothing(picture, model, size, steps, guidance)
    if kind not in NUM_PARTS or num_steps_at_once < 1:
        raise EditError(f"{num_steps_at_once} steps at once of kind {kind!r}: at least 1, of kv or y, are expected")
    size = choose_size(edit, model)
    job = make_job(edit, np.zeros(size, dtype=np.bool_), size, model)
    jobs = [replace(job, step=step, latents=job.template.at(job.sigmas[step])) for step in range(job.num_steps)]
    return fill(make_key(edit, model, kind), jobs, model, num_steps_at_once)


def fill(key: Key, jobs: list[Job], model: Model, num_steps_at_once: int) -> Activations:
    num_tokens, width = len(jobs[0].masked), model.transformer.inner_dim
    shape = len(jobs), num_blocks(model.transformer), NUM_PARTS[key.kind], num_tokens, width
    rows = torch.empty(shape, dtype=model.dtype, device=model.device)
    time = torch.empty(len(jobs), width, dtype=model.dtype, device=model.device)
    for start in range(0, len(jobs), num_steps_at_once):
        chosen = slice(start, start + num_steps_at_once)
        batch = pack(jobs[chosen])
        time[chosen] = embed_time(model.transformer, batch)
        for block, seen in enumerate(observe(model.transformer, batch, key.kind)):
            rows[chosen, block] = seen.unflatten(1, (-1, num_tokens)).transpose(0, 1)  # steps first
    return Activations(key, rows, time)


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
        sigmas=tuple(flow_sigmas(model.scheduler, edit.steps, num_tokens, edit.strength).tolist()),
        guidance=float(edit.guidance) if model.transformer.config.guidance_embeds else 0.0,
        kind=kind,
        dtype=str(model.dtype),
    )


def reuse(job: Job, activations: Activations, plan: Plan | None = None) -> Job:
    """The job with its template's activations; by default every block is cached."""
    return replace(job, activations=activations, plan=(True,) * activations.num_blocks if plan is None else plan)
