"""Edit pictures from Python. Ties prepare, the step loop and finish together in one process."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from instgenie.activations import NUM_PARTS, Activations, Key, Kind
from instgenie.batch import Job
from instgenie.cache.disk import DiskTier
from instgenie.engine.finish import finish
from instgenie.engine.loop import Engine
from instgenie.engine.prepare import prepare
from instgenie.engine.register import can_reuse, load_from_disk, make_key, register, register_on_disk, reuse
from instgenie.models.load import load
from instgenie.models.memory import memory_guard
from instgenie.models.model import Model
from instgenie.picture import check_edit
from instgenie.quality import DEFAULT, Quality, with_quality
from instgenie.types import Edit, OnStep, PixelMask, Pixels, Registered, Result, Tier, Timings

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True, eq=False)
class Found:
    """Activations, and where they were."""

    activations: Activations
    tier: Tier


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
    are kept on disk, for other editors too, and are in memory while edits use them; without one, they stay in memory.
    """

    cache: DiskTier | None = None

    def __init__(
        self, model: str = "builtin", device: str = "auto", dtype: str = "auto", cache: DiskTier | None = None
    ) -> None:
        self.model = load(model, device, dtype)
        self.cache = cache
        self.registered: dict[Key, Activations] = {}
        self.loaded: WeakValueDictionary[Key, Activations] = WeakValueDictionary()  # from disk, as long as in use

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
        on disk already are not computed again."""
        with memory_guard("the activations of a template"):
            if self.cache:
                return register_on_disk(self.cache, picture, self.model, size, steps, guidance, kind, on_step)
            activations = register(picture, self.model, size, steps, guidance, kind, on_step=on_step)
        self.registered[activations.key] = activations
        return Registered(activations.num_steps, activations.num_steps, activations.num_bytes)

    def edit_many(self, edits: Sequence[Edit], on_step: OnStep | None = None) -> list[Result]:
        """Edits that differ in anything take their steps together; results come in the order of the edits."""
        with memory_guard(f"a batch of {len(edits)} edits"):
            prepared = [self._prepare(edit) for edit in edits]
            denoising = self._denoise([one.job for one in prepared], on_step)
            return [self._result(one, denoising[one.job]) for one in prepared]

    def _prepare(self, edit: Edit) -> Prepared:
        job, preparing = self._timed(prepare, edit)
        found, loading = self._timed(self._find, edit) if can_reuse(job) else (None, 0.0)
        return Prepared(reuse(job, found.activations) if found else job, found, preparing, loading)

    def _find(self, edit: Edit, model: Model) -> Found | None:
        """Where both kinds are registered, the first: it computes less."""
        if not self.registered and not self.cache:
            return None
        key = make_key(edit, model, "kv")
        keys = [replace(key, kind=kind) for kind in NUM_PARTS]
        return self._find_in_memory(keys) or self._find_on_disk(keys, edit)

    def _find_in_memory(self, keys: Sequence[Key]) -> Found | None:
        places = (self.registered, self.loaded) if self.cache else (self.registered,)
        found = (place.get(key) for key in keys for place in places)
        activations = next((activations for activations in found if activations), None)
        return Found(activations, "gpu" if self.model.device.type == "cuda" else "host") if activations else None

    def _find_on_disk(self, keys: Sequence[Key], edit: Edit) -> Found | None:
        found = (load_from_disk(self.cache, key, edit, self.model) for key in keys if self.cache)
        activations = next((activations for activations in found if activations), None)
        if not activations:
            return None
        self.loaded[activations.key] = activations
        return Found(activations, "disk")

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
