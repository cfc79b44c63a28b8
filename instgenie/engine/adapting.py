"""LoRAs of jobs: the part that prompts pass, and the part that steps apply. Knows models and jobs; the tiers know where
LoRAs are."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from weakref import WeakValueDictionary

from instgenie.adapters.applied import AppliedLoras, PatchableLayers, apply_loras, batch_loras, hooked
from instgenie.adapters.fitting import Fitted
from instgenie.adapters.keys import NETWORK
from instgenie.adapters.tiers import DISK_BYTES, LoraFetch, LoraTiers
from instgenie.jobs.job import Job
from instgenie.models.families import FAMILIES
from instgenie.models.model import Model
from instgenie.types import LoraUse

PROMPT_BYTES = 512 * 2**20  # of the parts of LoRAs that patch text encoders, in the process that encodes prompts


def is_of_prompts(fitted: Fitted, model: Model) -> bool:
    """True if prompts pass the layers before the first step: those of text encoders, and of the network those that
    embed text."""
    return fitted.part != NETWORK or FAMILIES[model.family].is_of_prompts(fitted.layers[0])


class PromptLoras:
    """The parts of LoRAs that change how a prompt is encoded. An edit waits for them: they are small."""

    def __init__(self, model: Model, max_bytes: int = PROMPT_BYTES, disk_bytes: int = DISK_BYTES) -> None:
        self.model = model
        self.tiers = LoraTiers(
            model.layer_table,
            model.device,
            model.dtype,
            max_bytes,
            max_bytes,
            wants=lambda one: is_of_prompts(one, model),
            disk_bytes=disk_bytes,
        )

    @cached_property
    def _layers(self) -> PatchableLayers:
        return PatchableLayers(self.model.patchable)

    @contextmanager
    def applied(self, uses: Sequence[LoraUse]) -> Iterator[None]:
        """While inside, text encoders and layers that embed text apply the LoRAs."""
        if not uses:
            yield
            return
        fetch = self.tiers.fetch(uses)
        try:
            found = apply_loras(self._layers, fetch.result())
            loras = batch_loras([found])
            with ExitStack() as hooks:
                if loras:
                    for module in self.model.patchable.values():
                        hooks.enter_context(hooked(module, loras, None))
                yield
        finally:
            self.tiers.release(fetch)


class JobLoras:
    """Gives jobs their LoRAs once these have come. Jobs with the same LoRAs and scales share one object."""

    def __init__(self, model: Model, tiers: LoraTiers) -> None:
        self.model, self.tiers = model, tiers
        self._shared: WeakValueDictionary[tuple[tuple[str, float], ...], AppliedLoras] = WeakValueDictionary()

    @cached_property
    def _layers(self) -> PatchableLayers:
        return PatchableLayers({NETWORK: self.model.network})

    def give(self, job: Job, fetch: LoraFetch) -> None:
        """Apply LoRAs that have come from the job's present step on. Raises the LoraError of one that cannot be
        loaded."""
        job.loras = self.bind(fetch)
        job.history, job.idle_step = None, -1  # predictions without them say nothing of the next
        if job.blocks:
            job.blocks.forget()
        if job.own_steps and job.kept_step is not None:  # what it has kept was computed without them
            steps = sorted({*job.own_steps.steps, job.step})
            job.own_steps = replace(job.own_steps, steps=tuple(steps))

    def bind(self, fetch: LoraFetch) -> AppliedLoras:
        """LoRAs at the layers of the network; waits for them."""
        found = fetch.result()
        applied = self._shared.get(fetch.names)
        if applied is None:
            applied = apply_loras(self._layers, found, fetch.names)
            self._shared[fetch.names] = applied
        return applied


def make_tiers(model: Model, host_bytes: int, gpu_bytes: int, disk_bytes: int = DISK_BYTES) -> LoraTiers:
    """Tiers for the layers that steps apply."""
    return LoraTiers(
        model.layer_table,
        model.device,
        model.dtype,
        host_bytes,
        gpu_bytes,
        wants=lambda one: not is_of_prompts(one, model),
        disk_bytes=disk_bytes,
    )
