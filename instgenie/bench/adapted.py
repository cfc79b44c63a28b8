"""Our engine with edits that name LoRAs and ControlNets, each its own, as a function from edits to seconds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from instgenie.adapters.controlnets import ControlNetRegistry
from instgenie.adapters.tiers import LoraFetch
from instgenie.cluster.config import LoraConfig
from instgenie.engine.control_graphs import make_control_graphs
from instgenie.engine.controls import LocalControls
from instgenie.engine.graphs import make_graphs
from instgenie.engine.loop import Engine
from instgenie.engine.lora_shelf import LoraShelf
from instgenie.engine.merging import Merging
from instgenie.engine.own import reuse_own
from instgenie.engine.prepare import prepare
from instgenie.jobs.job import Job
from instgenie.machine.clock import now
from instgenie.models.model import Model
from instgenie.pictures.canny import canny
from instgenie.types import ControlUse, Edit, LoraUse

SCALE = 0.8


def with_adapters(
    edit: Edit, loras: Sequence[Path], controlnets: Sequence[Path], scales: Sequence[float] | None = None
) -> Edit:
    """An edit with LoRAs, by their paths, and with ControlNets that follow the picture's edges."""
    pairs = zip(loras, scales or [SCALE] * len(loras), strict=True)
    registry = ControlNetRegistry({path.name: str(path) for path in controlnets})
    uses = registry.resolve([ControlUse(path.name, SCALE) for path in controlnets])
    images = (canny(edit.picture),) * len(uses)
    return replace(
        edit, loras=tuple(LoraUse(str(path), scale) for path, scale in pairs), controls=uses, control_images=images
    )


@dataclass(eq=False)
class AdaptedEngine:
    """Keeps ControlNets in memory; LoRAs are in the shelf that a run is given."""

    model: Model

    def __post_init__(self) -> None:
        self.controls = LocalControls(self.model, graphs=make_control_graphs(self.model.device))
        self.graphs = make_graphs(self.model)
        self.free_steps = LoraConfig().num_free_steps

    def run(self, edits: Sequence[Edit], shelf: LoraShelf, reuses: bool, hides: bool = True) -> float:
        """Seconds of a batch up to its last latents. Edits reuse their own dense steps, or compute every token. LoRAs
        are loaded behind the first steps, as a worker does it, or the edit waits for them."""
        start = now(self.model.device)
        engine = Engine(self.model, len(edits), graphs=self.graphs, merging=Merging(True), controls=self.controls)
        loading: list[tuple[Job, LoraFetch]] = []
        jobs = []
        for edit in edits:
            named = shelf.resolve(edit)
            fetch = shelf.fetch(named)
            job = prepare(named, self.model, prompt_loras=shelf.prompts if fetch else None)
            jobs.append(reuse_own(job) if reuses else job)
            if fetch:
                loading.append((jobs[-1], fetch))
            self.controls.open(jobs[-1])
            engine.join(jobs[-1])
        while engine.jobs:
            loading = [pair for pair in loading if not self.settle(*pair, shelf, hides)]
            engine.step()
        seconds = now(self.model.device) - start
        engine.merging.undo()
        for job in jobs:
            self.controls.close(job)
        return seconds

    def settle(self, job: Job, fetch: LoraFetch, shelf: LoraShelf, hides: bool) -> bool:
        """Give a job its LoRAs if they have come, or if it may take no further step without them."""
        if hides and not fetch.is_done and job.step < self.free_steps(job.num_steps):
            return False
        shelf.give(job, fetch)
        return True
