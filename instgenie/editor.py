"""Edit pictures from Python. Ties prepare, the step loop and finish together in one process."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from instgenie.cache.gpu import GpuTier
from instgenie.cache.host import HostTier
from instgenie.cache.store import Found, Handle, Lookup, Store
from instgenie.engine.finish import finish
from instgenie.engine.loop import Engine
from instgenie.engine.prepare import prepare
from instgenie.engine.register import can_reuse, make_activations, make_key, may_reuse, register_in, reuse
from instgenie.jobs.activations import NUM_PARTS, CacheDtype, Key, Kind
from instgenie.jobs.job import Job
from instgenie.jobs.quality import DEFAULT, Quality, with_quality
from instgenie.machine.device import memory_guard
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.pictures.picture import check_edit
from instgenie.types import Edit, OnStep, PixelMask, Pixels, Registered, Result, Timings

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True, eq=False)
class Queued:
    """An edit that waits. If its template is known, it is on its way meanwhile."""

    edit: Edit
    loading: tuple[Key, Handle] | None
    looking: float  # seconds


@dataclass(frozen=True, eq=False)
class Prepared:
    """A job that may start, and the seconds it took."""

    job: Job
    found: Found | None
    preparing: float
    loading: float


class Editor:
    """
    editor = Editor()
    result = editor.edit(picture, mask, "a ginger cat")
    save_picture(result.picture, "cat.png")

    After `editor.register(picture)`, edits of that picture compute its masked tokens alone. With a cache, activations
    are kept where its tiers are; without one, they stay in memory, next to the model. With cache_dtype fp8 they take
    half the bytes of bfloat16, and are a little less exact.
    """

    cache_dtype: CacheDtype = "model"

    def __init__(
        self,
        model: str = "builtin",
        device: str = "auto",
        dtype: str = "auto",
        cache: Store | None = None,
        cache_dtype: CacheDtype = "model",
    ) -> None:
        self.model = load(model, device, dtype)
        self.cache = cache
        self.cache_dtype = cache_dtype
        self.store = cache or make_store(self.model.device)

    def edit(self, picture: Pixels, mask: PixelMask, prompt: str, quality: Quality = DEFAULT, **options: Any) -> Result:
        """Options are the other fields of `Edit`; steps and guidance default to what suits the model, dense steps and
        halo to what the quality says."""
        suited = {"steps": self.model.steps, "guidance": self.model.guidance}
        edit = Edit(picture, mask, prompt, **(suited | options))
        check_edit(edit)
        own = {name: options[name] for name in ("dense_steps", "halo") if name in options}
        [result] = self.edit_many([replace(with_quality(edit, quality), **own)])
        return result

    def register(
        self,
        picture: Pixels,
        size: tuple[int, int] | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        kind: Kind = "kv",
        on_step: OnStep | None = None,
    ) -> Registered:
        """Keeps the picture's activations; edits that match in size, steps and guidance will use them. Steps that are
        kept already are not computed again."""
        with memory_guard("the activations of a template"):
            return register_in(self.store, picture, self.model, size, steps, guidance, kind, self.cache_dtype, on_step)

    def edit_many(self, edits: Sequence[Edit], on_step: OnStep | None = None) -> list[Result]:
        """Edits that differ in anything take their steps together; results come in the order of the edits."""
        with memory_guard(f"a batch of {len(edits)} edits"):
            queued = [self._queue(edit) for edit in edits]
            prepared = [self._prepare(one) for one in queued]
            denoising = self._denoise([one.job for one in prepared], on_step)
            return [self._result(one, denoising[one.job]) for one in prepared]

    def _queue(self, edit: Edit) -> Queued:
        """Loading starts now, so that it is done, or well under way, when the job may start."""
        check_edit(edit)
        if self.store.is_empty or not may_reuse(edit):
            return Queued(edit, None, 0.0)
        key, looking = self._timed(self._find, edit)
        return Queued(edit, (key, self.store.prefetch(key, self.model.device)) if key else None, looking)

    def _find(self, edit: Edit, model: Model) -> Key | None:
        """Where both kinds are registered, the first: it computes less."""
        key = make_key(edit, model, "kv", self.cache_dtype)
        keys = (replace(key, kind=kind) for kind in NUM_PARTS)
        return next((key for key in keys if self.store.find(key) is not Lookup.MISS), None)

    def _prepare(self, queued: Queued) -> Prepared:
        job, preparing = self._timed(prepare, queued.edit)
        if not queued.loading or not can_reuse(job):
            return Prepared(job, None, preparing, queued.looking)
        key, handle = queued.loading
        found, waiting = self._timed(lambda handle, _: handle.result(), handle)
        if found:
            job = reuse(job, make_activations(key, found.span, self.model))
        return Prepared(job, found, preparing, queued.looking + waiting)

    def _denoise(self, jobs: Sequence[Job], on_step: OnStep | None) -> dict[Job, float]:
        """Runs the jobs to their end; for each, the seconds until it was handed over."""
        engine = Engine(self.model)
        for job in jobs:
            engine.join(job)
        seconds: dict[Job, float] = {}
        start = self._now()
        while engine.jobs:
            if finished := engine.step():
                seconds |= dict.fromkeys(finished, self._now() - start)
            if on_step:
                on_step(sum(job.step for job in jobs), sum(job.num_steps for job in jobs))
        return seconds

    def _result(self, prepared: Prepared, denoising: float) -> Result:
        job, found = prepared.job, prepared.found
        picture, finishing = self._timed(finish, job)
        return Result(
            picture=picture,
            seed=job.edit.seed,
            num_tokens=len(job.masked),
            num_masked_tokens=int(job.masked.sum()),
            num_computed_tokens=job.num_computed_tokens,
            can_reuse=can_reuse(job),
            cache_tier=found.tier if found else None,
            seconds=Timings(prepared.preparing, prepared.loading, denoising, finishing),
        )

    def _timed(self, work: Callable[[In, Model], Out], given: In) -> tuple[Out, float]:
        start = self._now()
        return work(given, self.model), self._now() - start

    def _now(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()


def make_store(device: torch.device) -> Store:
    """All there is of memory, next to the model."""
    if device.type == "cuda":
        return Store(gpu=GpuTier(device, sys.maxsize))
    return Store(host=HostTier(sys.maxsize))
