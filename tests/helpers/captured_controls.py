"""Edits with ControlNets whose passes are captured or not, and how their residuals are compared."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helpers.controlnets import controlled, save_controlnet
from helpers.edits import make_edit, prepare
from helpers.loras import applied, save_lora
from instgenie.engine.controls import LocalControls
from instgenie.engine.graphs import Graphs
from instgenie.engine.loop import Engine
from instgenie.engine.merging import Merging
from instgenie.engine.own import reuse_own
from instgenie.jobs.job import Job
from instgenie.models.model import Model

GUIDED: dict[str, Any] = {"true_guidance": 2.5}
UNGUIDED: dict[str, Any] = {"guidance": 1.0}


def save_nets(folder: Path, model: Model) -> list[Path]:
    return [save_controlnet(folder / f"net-{seed}", model, seed) for seed in range(2)]


def make_job(model: Model, nets: Sequence[Path], uses: Sequence[dict[str, Any]] = ({},), **fields: Any) -> Job:
    return prepare(controlled(make_edit(**fields), *zip(nets, uses, strict=False)), model)


def residuals_of(controls: LocalControls, jobs: Sequence[Job]) -> list[Sequence[Tensor]]:
    controls.begin(jobs)
    return [job.residuals.result() for job in jobs if job.residuals]


def are_equal(found: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]]) -> bool:
    pairs = [pair for own in zip(found, expected, strict=True) for pair in zip(*own, strict=True)]
    return bool(pairs) and all(torch.equal(*pair) for pair in pairs)


def later(job: Job) -> Job:
    """The job at its next step, with other latents."""
    return replace(job, step=job.step + 1, latents=job.latents.flip(0) * 0.9)


def jobs_with_loras(model: Model, folder: Path, merges: bool) -> list[Job]:
    """Edits with two ControlNets, one of which ends, and LoRAs that are merged because they are the same or are not."""
    nets = save_nets(folder, model)
    shapes = model.layer_table.shapes["network"]
    layers = [layer for layer, shape in shapes.items() if shape.kernel in (None, (1, 1))]
    files = [save_lora(folder / f"{seed}.safetensors", model, layers, rank=8, seed=seed) for seed in range(2)]
    loras = [applied(model, (files[0], 0.7), (files[1], -0.3)), applied(model, (files[1], 0.5))]
    uses = [{"scale": 0.8}, {"scale": 0.4, "end": 0.5}]
    edits = [make_job(model, nets, uses, seed=seed, steps=8, own_steps=(0,), **GUIDED) for seed in range(2)]
    chosen = [loras[0], loras[0] if merges else loras[1]]
    return [replace(reuse_own(job), loras=own) for job, own in zip(edits, chosen, strict=True)]


def run_jobs(
    model: Model, given: Sequence[Job], graphs: Graphs | None, controls: LocalControls, merges: bool
) -> list[Tensor]:
    jobs = [replace(job) for job in given]
    engine = Engine(model, graphs=graphs, controls=controls, merging=Merging(merges))
    for job in jobs:
        engine.join(job)
    while engine.jobs:
        engine.step()
    engine.merging.undo()
    return [job.latents for job in jobs]
