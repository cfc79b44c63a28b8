"""A picture becomes a template with activations: teacher-forced dense passes over all its steps. Edits nothing.

All that unmasked tokens feed into the network is a fact of the template, so its steps do not wait for each other: those
of a span are the jobs of a batch. Every pass sees a picture in which nothing is masked and, unless told otherwise,
empty prompts; where an empty negative prompt is another thing than the prompt, both branches are kept, else one stands
for both.

Spans do not depend on each other either: a registration that was interrupted goes on with those that are missing, and
comes to the same numbers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from instgenie.cache.store import Store
from instgenie.cost.plan import Plan
from instgenie.engine.prepare import choose_size, make_job
from instgenie.errors import EditError
from instgenie.jobs.activations import (
    NUM_PARTS,
    NUM_STEPS_AT_ONCE,
    Activations,
    CacheDtype,
    Key,
    Kind,
    Span,
    join,
    split_steps,
)
from instgenie.jobs.job import Job
from instgenie.kernels.packed import pack_rows
from instgenie.models.model import Model
from instgenie.pictures.digest import digest
from instgenie.pictures.picture import check_edit
from instgenie.types import Edit, OnStep, Pixels, RegisterResult


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
    cache_dtype: CacheDtype = "model",
    on_step: OnStep | None = None,
) -> Activations:
    """On the model's device. More steps at once are faster and need more memory; the numbers stay the same. The prompt
    is what the passes see; isolated, they see no text at all."""
    edit = edit_of_nothing(picture, model, size, steps, guidance)
    check_registration(kind, num_steps_at_once)
    key = replace(make_key(edit, model, kind, cache_dtype), prompt=prompt, isolated=isolated)
    spans = split_steps(edit.steps, num_steps_at_once)
    seen = told(observe(edit, model, key, spans), 0, edit.steps, on_step)
    return make_activations(key, join(edit.steps, seen, model.device), model)


def register_in(
    store: Store,
    picture: Pixels,
    model: Model,
    size: tuple[int, int] | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    kind: Kind = "kv",
    cache_dtype: CacheDtype = "model",
    on_step: OnStep | None = None,
) -> RegisterResult:
    """Computes the spans that are missing and puts each into the store at once."""
    edit = edit_of_nothing(picture, model, size, steps, guidance)
    check_registration(kind, NUM_STEPS_AT_ONCE)
    key = make_key(edit, model, kind, cache_dtype)
    with store.pinned(key):
        missing = store.missing(key)
        num_missing = sum(map(len, missing))
        for span in told(observe(edit, model, key, missing), edit.steps - num_missing, edit.steps, on_step):
            store.put(key, span)
    return RegisterResult(edit.steps, num_missing, store.num_bytes(key))


def make_activations(key: Key, span: Span, model: Model) -> Activations:
    """What the store found, as the model reads it. Rows may lie on another device, time may not."""
    return Activations(key, model.run_lengths, num_tokens(key.size, model), span.rows, span.time.to(model.device))


@torch.inference_mode()
def observe(edit: Edit, model: Model, key: Key, spans: Sequence[range]) -> Iterator[Span]:
    """What a template leaves behind, a pass for each span."""
    if not spans:
        return
    job = template_job(edit, model, key.prompt, key.isolated)
    for steps in spans:
        yield observe_span(job, model, key.kind, key.cache_dtype, steps)


@torch.inference_mode()
def template_job(edit: Edit, model: Model, prompt: str = "", isolated: bool = False) -> Job:
    """The job whose steps a registration takes."""
    size = choose_size(edit, model)
    job = make_job(replace(edit, size=size), np.zeros(size, dtype=np.bool_), size, model)
    return replace(job, branches=model.template_branches(job.grid, prompt, isolated))


@torch.inference_mode()
def observe_span(job: Job, model: Model, kind: Kind, cache_dtype: CacheDtype, steps: range) -> Span:
    jobs = [replace(job, step=step, latents=job.template.at(step, job.schedule)) for step in steps]
    rows: list[Tensor] = []

    def keep(seen: Tensor) -> None:
        by_branch = seen.unflatten(0, (len(jobs), -1)).transpose(0, 1)  # [branches, steps, 2 or 1, tokens, width]
        packed = cache_dtype == "fp8"
        rows.append(pack_rows(by_branch) if packed else by_branch.clone(memory_format=torch.contiguous_format))

    time = model.observe_time(jobs)
    model.observe(jobs, kind, keep)
    return Span(steps, tuple(rows), time)


class Registration:
    """A template on its way to its activations, one of the missing spans at a time."""

    def __init__(self, key: Key, job: Job, missing: Sequence[range]) -> None:
        self.key, self.job = key, job
        self.missing = list(missing)

    @property
    def num_registered_steps(self) -> int:
        return self.key.num_steps - sum(map(len, self.missing))

    @property
    def done(self) -> bool:
        return not self.missing

    def advance(self, model: Model, store: Store) -> None:
        """Raises a CacheError if there is no room."""
        if self.missing:
            store.put(self.key, observe_span(self.job, model, self.key.kind, self.key.cache_dtype, self.missing.pop(0)))


def told(spans: Iterator[Span], num_done: int, num_steps: int, on_step: OnStep | None) -> Iterator[Span]:
    """The same spans; after each was taken care of, somebody is told."""
    if not on_step:
        yield from spans
        return
    on_step(num_done, num_steps)
    for span in spans:
        yield span
        num_done += len(span.steps)
        on_step(num_done, num_steps)


def check_registration(kind: Kind, num_steps_at_once: int) -> None:
    if kind not in NUM_PARTS or num_steps_at_once < 1:
        raise EditError(f"{num_steps_at_once} steps at once of kind {kind!r}: at least 1, of kv or y, are expected")


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


def make_key(edit: Edit, model: Model, kind: Kind, cache_dtype: CacheDtype = "model") -> Key:
    return name_key(digest(edit.picture), model.digest, edit, model, kind, cache_dtype)


def name_key(
    picture: str,
    identity: str,
    edit: Edit,
    model: Model,
    kind: Kind,
    cache_dtype: CacheDtype = "model",
    tenant: str = "",
) -> Key:
    """Of the whole schedule, whatever the edit's strength: one that is below 1 takes the last of the same steps. Looks
    neither at pixels, if the edit names its size, nor at weights."""
    size = choose_size(edit, model)
    schedule = model.schedule(replace(edit, strength=1.0), num_tokens(size, model))
    return Key(
        picture=picture,
        model=identity,
        size=size,
        num_steps=schedule.num_steps,
        levels=schedule.levels,
        guidance=model.embedded_guidance(edit),
        kind=kind,
        dtype=str(model.dtype),
        cache_dtype=cache_dtype,
        tenant=tenant,
    )


def num_tokens(size: tuple[int, int], model: Model) -> int:
    height, width = size
    return (height // model.patch) * (width // model.patch)


def may_reuse(edit: Edit) -> bool:
    """Whether activations might spare the edit anything, as far as can be told before it is a job."""
    return edit.dense_steps < edit.steps and not edit.mask.all()


def can_reuse(job: Job) -> bool:
    """Whether activations would spare the job anything."""
    return len(job.outside) > 0 and job.edit.dense_steps < job.num_steps


def reuse(job: Job, activations: Activations, plan: Plan | None = None) -> Job:
    """The job with its template's activations; by default every block is cached."""
    plan = (True,) * activations.num_blocks if plan is None else plan
    return replace(job, activations=activations.last(job.num_steps), plan=plan)
