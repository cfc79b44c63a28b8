"""Edit pictures from Python. Ties prepare, the step loop and finish together in one process."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from instgenie.activations import NUM_PARTS, Activations, Key, Kind
from instgenie.batch import Job
from instgenie.engine.finish import finish
from instgenie.engine.loop import Engine
from instgenie.engine.prepare import prepare
from instgenie.engine.register import make_key, register, reuse
from instgenie.models.load import load
from instgenie.models.memory import memory_guard
from instgenie.models.model import Model
from instgenie.picture import check_edit
from instgenie.quality import DEFAULT, Quality, with_quality
from instgenie.types import Edit, PixelMask, Pixels, Result, Timings

In = TypeVar("In")
Out = TypeVar("Out")
OnStep = Callable[[int, int], None]  # steps taken so far, steps to take, both over all edits


class Editor:
    """
    editor = Editor()
    result = editor.edit(picture, mask, "a ginger cat")
    save_picture(result.picture, "cat.png")

    After `editor.register(picture)`, edits of that picture compute its masked tokens alone.
    """

    def __init__(self, model: str = "builtin", device: str = "auto", dtype: str = "auto") -> None:
        self.model = load(model, device, dtype)
        self.registered: dict[Key, Activations] = {}

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
    ) -> Activations:
        """Keeps the picture's activations in memory; edits that match in size, steps and guidance will use them."""
        with memory_guard("the activations of a template"):
            activations = register(picture, self.model, size, steps, guidance, kind)
        self.registered[activations.key] = activations
        return activations

    def edit_many(self, edits: Sequence[Edit], on_step: OnStep | None = None) -> list[Result]:
        """Edits that differ in anything take their steps together; results come in the order of the edits."""
        with memory_guard(f"a batch of {len(edits)} edits"):
            prepared = [self._timed(self._prepare, edit) for edit in edits]
            denoising = self._denoise([job for job, _ in prepared], on_step)
            return [self._result(job, preparing, denoising[job]) for job, preparing in prepared]

    def _prepare(self, edit: Edit, model: Model) -> Job:
        job = prepare(edit, model)
        activations = None if edit.dense_steps >= edit.steps else self._find(edit)
        return reuse(job, activations) if activations else job

    def _find(self, edit: Edit) -> Activations | None:
        """Where both kinds are registered, the first: it computes less."""
        if not self.registered:
            return None
        key = make_key(edit, self.model, "kv")
        found = (self.registered.get(replace(key, kind=kind)) for kind in NUM_PARTS)
        return next((activations for activations in found if activations), None)

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

    def _result(self, job: Job, preparing: float, denoising: float) -> Result:
        picture, finishing = self._timed(finish, job)
        return Result(
            picture=picture,
            seed=job.edit.seed,
            num_tokens=len(job.masked),
            num_masked_tokens=int(job.masked.sum()),
            num_computed_tokens=job.num_computed_tokens,
            cache_hit=job.activations is not None,
            seconds=Timings(preparing, denoising, finishing),
        )

    def _timed(self, work: Callable[[In, Model], Out], given: In) -> tuple[Out, float]:
        start = self._now()
        return work(given, self.model), self._now() - start

    def _now(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()
