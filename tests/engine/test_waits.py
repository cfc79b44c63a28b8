"""No step waits for the device: what a job needs to know of its tokens, it finds out when it joins. This holds on any
device, and the tests on a GPU that let a wait fail see what happens below PyTorch's operations."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.cached import register_for
from helpers.edits import make_edit, prepare
from helpers.loras import applied, save_lora
from helpers.names import FAMILIES
from helpers.waits import Waits
from torch import Tensor

from instgenie.engine import register as registering
from instgenie.engine.changed import Changed
from instgenie.engine.loop import Engine
from instgenie.engine.own import OwnActivations, reuse_own
from instgenie.engine.register import make_key, observe_span, reuse, template_job
from instgenie.engine.reuse_predictor import ReusePredictor
from instgenie.jobs.job import Job
from instgenie.models.loading.load import load
from instgenie.models.model import Model


def make_jobs(model: Model) -> list[Job]:
    """One job that reads a template and one that reads what its own dense steps leave."""
    cached, own = make_edit(steps=3), make_edit(steps=3, share=0.2, seed=1, own_steps=(0,))
    template = register_for(model, cached, "kv", keeps_text=model.text_flows)
    return [reuse(prepare(cached, model), template), reuse_own(prepare(own, model))]


def waits_of(model: Model, given: list[Job], changed: Changed | None = None) -> list[str]:
    engine = Engine(model, own=OwnActivations(model, keeps_text=model.text_flows, changed=changed))
    for job in given:
        engine.join(replace(job))
    waits = Waits()
    while engine.jobs:
        with waits:
            engine.step()
    return waits.found


@pytest.mark.parametrize("family", FAMILIES)
def test_no_step_waits(family: str, folders: dict[str, Path]) -> None:
    model = load(str(folders[family]), "cpu")
    jobs = make_jobs(model)
    waits_of(model, jobs)  # what the model keeps for all jobs is there afterwards
    assert waits_of(model, jobs) == []


@pytest.mark.parametrize("family", ["blend", "sdxl"])
def test_no_step_that_reuses_steps_waits(family: str, folders: dict[str, Path]) -> None:
    """A step reads what the step before chose for it; on a GPU that is in main memory by then."""
    model = load(str(folders[family]), "cpu")
    predictor = ReusePredictor((0.0, 1.0, 0.0, 0.0, 0.0, 0.0), bias=1.0, tolerance=0.05, max_steps=2)
    changed = Changed(predictor, 0.5, model)
    jobs = [prepare(make_edit(steps=7, share=share, reuse="own"), model) for share in (1.0, 0.4)]
    waits_of(model, jobs, changed)
    assert waits_of(model, jobs, changed) == []


@pytest.mark.parametrize("family", ["blend", "sdxl"])
def test_no_step_with_loras_waits(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    model = load(str(folders[family]), "cpu")
    loras = [applied(model, (save_lora(tmp_path / "x.safetensors", model, seed=seed), 0.5)) for seed in (1, 2)]
    jobs = [replace(job, loras=own) for job, own in zip(make_jobs(model), loras, strict=True)]
    waits_of(model, jobs)
    assert waits_of(model, jobs) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_registration_waits_once(family: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last look for numbers that are not finite aside, nothing waits."""
    model, edit = load(str(folders[family]), "cpu"), make_edit(steps=4)
    job, key = template_job(edit, model), make_key(edit, model, "kv")
    observe_span(job, model, key, range(4))
    seen: list[Tensor] = []
    monkeypatch.setattr(registering, "check_finite", lambda bounds, steps: seen.append(bounds))
    with Waits() as waits:
        observe_span(job, model, key, range(4))
    assert waits.found == []
    assert len(seen) == 1


def test_waits_are_found() -> None:
    with Waits() as waits:
        values = torch.arange(3)
        values[values > 1].sum().item()
    assert len(waits.found) == 2
