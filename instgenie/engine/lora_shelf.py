"""The LoRAs of a process that prepares and runs edits by itself."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from instgenie.adapters.applied import AppliedLoras
from instgenie.adapters.registry import SHARED, LoraRegistry
from instgenie.adapters.tiers import LoraFetch
from instgenie.engine.adapting import JobLoras, PromptLoras, make_tiers
from instgenie.errors import EditError
from instgenie.jobs.job import Job
from instgenie.models.model import Model
from instgenie.types import Edit, LoraUse


class LoraShelf:
    """Names, files and memory of unlimited size."""

    def __init__(self, model: Model, modules: Mapping[str, str] | None = None, folder: str | None = None) -> None:
        self.registry = LoraRegistry(modules, folder)
        self.registry.table = model.layer_table
        self.prompts = PromptLoras(model, sys.maxsize)
        self.tiers = make_tiers(model, sys.maxsize, sys.maxsize)
        self.jobs = JobLoras(model, self.tiers)

    def resolve(self, edit: Edit) -> Edit:
        """The edit with the files of its LoRAs; a name that is a path stands for that file."""
        return replace(edit, loras=self._resolved(edit.loras)) if edit.loras else edit

    def _resolved(self, uses: Sequence[LoraUse]) -> tuple[LoraUse, ...]:
        for use in uses:
            if "/" in use.name or use.name.endswith(".safetensors"):
                self.registry.open(use.name, Path(use.name))
        return self.registry.resolve(uses, SHARED)

    def fetch(self, edit: Edit) -> LoraFetch | None:
        """Begin to load the LoRAs of an edit."""
        return self.tiers.fetch(edit.loras) if edit.loras else None

    def apply(self, uses: Sequence[LoraUse]) -> AppliedLoras | None:
        """LoRAs for a registration; waits for them."""
        edit_loras = self._resolved(uses)
        return self.jobs.bind(self.tiers.fetch(edit_loras)) if edit_loras else None

    def give(self, job: Job, fetch: LoraFetch | None) -> None:
        """Give a job its LoRAs; waits for them."""
        if fetch:
            self.jobs.give(job, fetch)


def read_uses(given: Iterable[Any]) -> tuple[LoraUse, ...]:
    """LoRAs as users write them: a name, (name, scale), or {"name": ..., "scale": ...}."""
    uses = []
    for one in given:
        match one:
            case str():
                uses.append(LoraUse(one))
            case {"name": str(name), **rest} if set(rest) <= {"scale"}:
                scale: Any = rest.get("scale", 1.0)
                uses.append(LoraUse(name, scale))
            case (str(name), *rest):
                uses.append(LoraUse(name, *rest))
            case _:
                raise EditError(f"a LoRA is {one!r}: a name, a name and a scale, or both by name are expected")
    return tuple(uses)
