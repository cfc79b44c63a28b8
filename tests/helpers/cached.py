"""Jobs that reuse activations, and every plan they may have."""

import itertools
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from helpers.edits import encodings_of, prepare
from instgenie.cost.plan import Plan
from instgenie.engine.prepare import make_job
from instgenie.engine.register import register, reuse
from instgenie.jobs.activations import Activations, Kind
from instgenie.jobs.job import Job
from instgenie.models.model import Model
from instgenie.types import Edit

KINDS: tuple[Kind, ...] = ("kv", "y")


def register_for(model: Model, edit: Edit, kind: Kind, **options: Any) -> Activations:
    """Activations for an edit. They are made once and shared by all tests, unless the options have pictures: nothing
    writes to them."""
    given = edit.size, edit.steps, edit.guidance, kind
    if "references" in options:
        return register(edit.picture, model, *given, **options)
    return register_once(model, edit.picture.tobytes(), edit.picture.shape, *given, tuple(sorted(options.items())))


@lru_cache(maxsize=100)
def register_once(
    model: Model,
    pixels: bytes,
    shape: tuple[int, ...],
    size: tuple[int, int] | None,
    steps: int,
    guidance: float,
    kind: Kind,
    options: tuple[tuple[str, Any], ...],
) -> Activations:
    picture = np.frombuffer(pixels, np.uint8).reshape(shape).copy()
    return register(picture, model, size, steps, guidance, kind, **dict(options))


def make_cached(model: Model, edit: Edit, kind: Kind, plan: Plan | None = None) -> Job:
    return reuse(prepare(edit, model), register_for(model, edit, kind), plan)


def feasible(kind: Kind, run_lengths: tuple[int, ...]) -> list[Plan]:
    """Every dense prefix; for y also every single dense block, every single cached one, and alternating ones. For kv
    also the dense prefixes of each run, with the other runs cached. Each plan once."""
    num_blocks = sum(run_lengths)
    prefixes = [(False,) * dense + (True,) * (num_blocks - dense) for dense in range(num_blocks)]
    lone = [tuple(block == index for block in range(num_blocks)) for index in range(num_blocks)]
    missing = [tuple(not cached for cached in plan) for plan in lone]
    turns = [tuple(block % 2 == odd for block in range(num_blocks)) for odd in (0, 1)]
    in_runs = [
        tuple(not start <= block < end for block in range(num_blocks))
        for start, length in zip(itertools.accumulate(run_lengths, initial=0), run_lengths, strict=False)
        for end in range(start + 1, start + length + 1)
    ]
    plans = prefixes + in_runs if kind == "kv" else prefixes + lone + missing + turns
    return list(dict.fromkeys(plans))


def on_trajectory(model: Model, edit: Edit, step: int) -> Job:
    """A job whose masked tokens are, at a step, those of the registration."""
    job = prepare(edit, model)
    untouched = make_job(edit, np.zeros(edit.size, dtype=np.bool_), edit.size, model, encodings_of(model))
    latents = job.template.at(step, job.schedule)
    return replace(job, step=step, latents=latents, conditioning=untouched.conditioning)


def predict(model: Model, job: Job) -> list[Tensor]:
    """The predictions for masked tokens, per branch."""
    [predictions] = model.predict([job])
    return [prediction if len(prediction) == len(job.inside) else prediction[job.inside] for prediction in predictions]
