"""Registers templates: computes a picture's activations in teacher-forced dense passes over the steps that are kept.

The inputs of unmasked tokens depend only on the template and are known for all steps in advance. So the steps of a span
run as the jobs of one batch. Every pass sees a picture in which nothing is masked and, by default, empty prompts. Where
an empty negative prompt differs from an empty prompt, both branches are kept; otherwise one serves as both.

Spans are independent: a registration that was interrupted computes the spans that are missing, with the same numbers.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from instgenie.adapters.applied import AppliedLoras
from instgenie.cache.store import Store
from instgenie.cache.tier import estimate
from instgenie.cost.kept_steps import stride_of
from instgenie.cost.plan import Plan
from instgenie.engine.prepare import choose_size, find_seen, make_job, sees_picture
from instgenie.errors import EditError, ModelError
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
from instgenie.jobs.job import Job, locate
from instgenie.kernels.packed import is_packed, pack_rows
from instgenie.models.identity import code_version
from instgenie.models.model import Model
from instgenie.pictures.digest import digest, digest_all
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
    stride: int = 1,
    keeps_text: bool = False,
    references: tuple[Pixels, ...] = (),
) -> Activations:
    """Register a picture on the model's device. More steps at once are faster and need more memory; the numbers stay
    the same. The passes see `prompt`, or no text at all if `isolated`. With `keeps_text` edits read the padding of
    their text from the template."""
    edit = template_edit(picture, model, size, steps, guidance, references)
    check_registration(kind, num_steps_at_once, stride)
    key = make_key(edit, model, kind, cache_dtype, stride, keeps_text)
    key = replace(key, prompt=prompt, isolated=isolated, num_text=0 if isolated else key.num_text)
    spans = split_steps(key.num_kept, num_steps_at_once)
    seen = with_progress(observe(edit, model, key, spans), key, 0, on_step)
    return make_activations(key, join(key.num_kept, seen, model.device), model)


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
    stride: int = 1,
    keeps_text: bool = False,
    loras: AppliedLoras | None = None,
    references: tuple[Pixels, ...] = (),
) -> RegisterResult:
    """Compute the missing spans of a template and put each into the store as it is done. With LoRAs it is a template of
    its own, for edits with the same ones."""
    edit = template_edit(picture, model, size, steps, guidance, references)
    check_registration(kind, NUM_STEPS_AT_ONCE, stride)
    key = make_key(edit, model, kind, cache_dtype, stride, keeps_text)
    key = replace(key, loras=name_loras(loras.names), tile=0) if loras else key
    with store.pinned(key):
        missing = store.missing(key)
        num_missing = key.num_served(missing)
        spans = observe(edit, model, key, missing, loras)
        for span in with_progress(spans, key, key.num_steps - num_missing, on_step):
            store.put(key, span)
    return RegisterResult(key.num_steps, num_missing, store.num_bytes(key))


def make_activations(key: Key, span: Span, model: Model) -> Activations:
    """Wrap a span of all kept steps, as found in the store, for the model. Rows may stay on another device; the time
    embeddings are moved to the model's."""
    time, steps = span.time.to(model.device), key.kept_steps if key.stride > 1 else None  # None: every step
    ranks = model.kept_convolutions.ranks if key.tile else ()
    return Activations(key, model.run_lengths, num_tokens(key.size, model), span.rows, time, steps, ranks)


@torch.inference_mode()
def observe(
    edit: Edit, model: Model, key: Key, spans: Sequence[range], loras: AppliedLoras | None = None
) -> Iterator[Span]:
    """Compute the activations of a template, in one pass per span."""
    if not spans:
        return
    job = replace(template_job(edit, model, key.prompt, key.isolated), loras=loras)
    for steps in spans:
        yield observe_span(job, model, key, steps)


@torch.inference_mode()
def template_job(edit: Edit, model: Model, prompt: str = "", isolated: bool = False) -> Job:
    """Make the job whose steps a registration runs."""
    size = choose_size(edit, model)
    grid = size[0] // model.patch, size[1] // model.patch
    branches = model.template_branches(grid, prompt, isolated, find_seen(edit, size, model))
    nothing = np.zeros(size, dtype=np.bool_)
    job = make_job(replace(edit, size=size), nothing, size, model, branches=branches)
    locate(job, model.describe().sides)
    return job


@torch.inference_mode()
def observe_span(job: Job, model: Model, key: Key, slots: range) -> Span:
    """Compute the kept steps with these numbers in one pass. Raise a ModelError if a value is no finite number: a row
    with such a value would spoil every edit that reads it."""
    steps = [key.kept_steps.steps[slot] for slot in slots]
    jobs = [at_step(job, step) for step in steps]
    tiled = places_of_tiles(model) if key.tile else ()
    rows: dict[int, Tensor] = {}
    bounds: dict[int, Tensor] = {}  # per place, the smallest and the largest value

    def keep(seen: Tensor, place: int | None = None, /) -> None:
        by_branch = seen.unflatten(0, (len(jobs), -1)).transpose(0, 1)  # [branches, steps, 2 or 1, tokens, width]
        number = len(rows) if place is None else place
        bounds[number] = torch.stack(torch.aminmax(seen)).float()
        rows[number] = keep_rows(by_branch, "model" if number in tiled else key.cache_dtype)

    time = model.observe_time(jobs)
    model.observe(jobs, key.kind, keep, key.num_text, key.tile > 0)
    places = range(len(rows))
    check_finite(torch.stack([bounds[place] for place in places]), steps)
    return Span(slots, tuple(rows[place] for place in places), time)


def places_of_tiles(model: Model) -> frozenset[int]:
    """Places that keep numbers of tiles, which are never packed."""
    network = model.describe()
    first = len(network.blocks) + len(network.run_lengths)
    return frozenset(first + number for number, shape in enumerate(network.convolutions) if shape.rows == "tiles")


def at_step(job: Job, step: int) -> Job:
    """Return a copy of a template's job at a step. It shares what the job knows of its tokens."""
    there = copy(job)
    there.step, there.latents = step, job.template.at(step, job.schedule)
    return there


def keep_rows(rows: Tensor, dtype: CacheDtype) -> Tensor:
    """A copy of rows in the format of a cache."""
    return pack_rows(rows, dtype) if is_packed(dtype) else rows.clone(memory_format=torch.contiguous_format)


def check_finite(bounds: Tensor, steps: Sequence[int]) -> None:
    """Raise a ModelError if any of the bounds [places, 2] is no finite number; a NaN among values is a bound of them.
    One wait for the device serves all places."""
    bad = (~bounds.isfinite()).any(dim=1).cpu()
    if bad.any():
        numbers = ", ".join(map(str, steps))
        raise ModelError(
            f"the template cannot be registered: {int(bad.sum())} of {len(bad)} places, the first of them number "
            f"{int(bad.nonzero()[0])}, have values that are not finite numbers in the steps {numbers}"
        )


class Registration:
    """The registration of a template in progress, one missing span at a time."""

    def __init__(self, key: Key, job: Job, missing: Sequence[range]) -> None:
        self.key, self.job = key, job
        self.missing = list(missing)
        self.num_bytes = 0  # of the whole template; 0 until its first span is computed

    @property
    def num_registered_steps(self) -> int:
        return self.key.num_steps - self.key.num_served(self.missing)

    @property
    def done(self) -> bool:
        return not self.missing

    def has_room(self, store: Store) -> bool:
        """Return whether the store would take the next span now, or refuse it for good."""
        return not self.num_bytes or store.has_room(self.key, self.num_bytes)

    def advance(self, model: Model, store: Store) -> None:
        """Compute the next span, without waiting for slow tiers. A span for which there will be room later is dropped
        and stays missing. Raises a CacheError if the store has no room."""
        if self.missing:
            span = observe_span(self.job, model, self.key, self.missing[0])
            self.num_bytes = estimate(self.key, span)
            if store.offer(self.key, span):
                self.missing.pop(0)


def with_progress(spans: Iterator[Span], key: Key, num_done: int, on_step: OnStep | None) -> Iterator[Span]:
    """Yield the spans, and call `on_step` after each was stored, with the number of steps that are served."""
    if not on_step:
        yield from spans
        return
    on_step(num_done, key.num_steps)
    for span in spans:
        yield span
        num_done += key.num_served([span.steps])
        on_step(num_done, key.num_steps)


def check_registration(kind: Kind, num_steps_at_once: int, stride: int) -> None:
    if kind not in NUM_PARTS or num_steps_at_once < 1 or stride < 1:
        raise EditError(
            f"{num_steps_at_once} steps at once, kind {kind!r}, stride {stride}: at least 1 step, kind kv or y, and a "
            "stride of at least 1 are expected"
        )


def template_edit(
    picture: Pixels,
    model: Model,
    size: tuple[int, int] | None,
    steps: int | None,
    guidance: float | None,
    references: tuple[Pixels, ...] = (),
) -> Edit:
    """Make the edit whose steps a registration runs. Its picture and options are checked."""
    steps = model.steps if steps is None else steps
    guidance = model.guidance if guidance is None else guidance
    mask = np.ones(np.shape(picture)[:2], dtype=np.bool_)
    edit = Edit(picture, mask, prompt="", steps=steps, guidance=guidance, size=size, references=references)
    check_edit(edit)
    return edit


def make_key(
    edit: Edit,
    model: Model,
    kind: Kind,
    cache_dtype: CacheDtype = "model",
    stride: int = 1,
    keeps_text: bool = False,
) -> Key:
    named = digest(edit.picture), model.digest, edit, model, kind, cache_dtype
    return name_key(*named, stride=stride, keeps_text=keeps_text, references=digest_all(edit.references))


def name_key(
    picture_digest: str,
    model_digest: str,
    edit: Edit,
    model: Model,
    kind: Kind,
    cache_dtype: CacheDtype = "model",
    tenant: str = "",
    stride: int = 1,
    keeps_text: bool = False,
    references: str = "",
) -> Key:
    """Make the key of a template from the digests of its picture, its references and the model's weights. The key
    covers the whole schedule: an edit with a strength below 1 takes the last of the same steps. If the edit has a size,
    its pixels are not looked at."""
    size = choose_size(edit, model)
    schedule = model.schedule(replace(edit, strength=1.0), num_tokens(size, model))
    return Key(
        picture=picture_digest,
        model=model_digest,
        size=size,
        num_steps=schedule.num_steps,
        levels=schedule.levels,
        guidance=float(edit.guidance) if model.embeds_guidance else 0.0,
        kind=kind,
        dtype=str(model.dtype),
        cache_dtype=cache_dtype,
        tenant=tenant,
        code=code_version(),
        stride=stride_of(stride, schedule.num_steps),
        num_text=model.num_kept_text(find_seen(edit, size, model).grids, keeps_text),
        references=references,
        tile=model.kept_convolutions.tile,
    )


def name_loras(names: Sequence[tuple[str, float]]) -> tuple[str, ...]:
    """The LoRAs of a registration as its key names them."""
    return tuple(f"{version} {scale:g}" for version, scale in names)


def num_tokens(size: tuple[int, int], model: Model) -> int:
    height, width = size
    return (height // model.patch) * (width // model.patch)


def may_reuse(edit: Edit, model: Model) -> bool:
    """Return whether a template's activations may save the edit any work, as far as its fields tell. A model that sees
    pictures has templates of pictures that it saw."""
    has_rest = sees_picture(edit, model) if model.sees_picture else not edit.mask.all()
    return edit.reuse in ("auto", "template") and edit.dense_steps < edit.steps and has_rest


def can_reuse(job: Job) -> bool:
    """Return whether activations would save the job any work."""
    return len(job.rest) > 0 and job.edit.dense_steps < job.num_steps


def reuse(job: Job, activations: Activations, plan: Plan | None = None) -> Job:
    """Return a copy of the job that uses its template's activations; by default every block is cached."""
    plan = (True,) * activations.num_blocks if plan is None else plan
    return replace(job, activations=activations.last(job.num_steps), plan=plan)
