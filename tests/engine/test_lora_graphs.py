"""Captured passes of edits with LoRAs: a captured pass is bound to slots and not to LoRAs, so others may come into
them. On a CPU nothing is captured, but products are found through the slots, as in a graph."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.cached import register_for
from helpers.edits import apart, make_edit, prepare, run
from helpers.loras import applied, save_lora, tolerance
from torch import Tensor

from instgenie.adapters.applied import AppliedLoras
from instgenie.engine.copying import Copying
from instgenie.engine.graphs import Graphs
from instgenie.engine.loop import Engine
from instgenie.engine.merging import Merging
from instgenie.engine.register import reuse
from instgenie.jobs.activations import Kind
from instgenie.jobs.job import Job
from instgenie.models.layers import linear
from instgenie.models.model import Model

NUM_JOBS = 3


@pytest.fixture(params=["blend", "sdxl", "sd3", "klein", "zimage"])
def model(request: pytest.FixtureRequest, models: dict[str, Model]) -> Model:
    return models[request.param]


def make_jobs(model: Model, kind: Kind | None, more: float = 0.0) -> list[Job]:
    """Jobs whose masks share a captured pass with others that are a little larger."""
    shares = [0.2 + 0.2 * seed + more * (seed + 1) for seed in range(NUM_JOBS)]
    edits = [make_edit(steps=2, share=share, seed=seed, true_guidance=2.0) for seed, share in enumerate(shares)]
    jobs = [prepare(edit, model) for edit in edits]
    if kind is None:
        return jobs
    return [reuse(job, register_for(model, edit, kind)) for job, edit in zip(jobs, edits, strict=True)]


def with_loras(jobs: Sequence[Job], loras: Sequence[AppliedLoras | None]) -> list[Job]:
    return [replace(job, loras=own) for job, own in zip(jobs, loras, strict=True)]


def run_captured(graphs: Graphs, given: Sequence[Job], copying: Copying | None = None) -> list[Tensor]:
    jobs = [replace(job) for job in given]
    engine = Engine(graphs.model, graphs=graphs, merging=Merging(False), copying=copying)
    for job in jobs:
        engine.join(job)
    while engine.jobs:
        engine.step()
    return [job.latents for job in jobs]


def save_loras(folder: Path, model: Model, num: int) -> list[Path]:
    """LoRAs for all layers whose products are those of rows."""
    shapes = model.layer_table.shapes["network"]
    names = [name for name, shape in shapes.items() if shape.kernel in (None, (1, 1))]
    return [save_lora(folder / f"{seed}.safetensors", model, names, rank=8, seed=seed) for seed in range(num)]


@pytest.mark.parametrize("kind", ["kv", "y", None])
def test_law_lora_captured_is_uncaptured(model: Model, kind: Kind | None, tmp_path: Path) -> None:
    """One edit with two LoRAs, one with one and one with none; then others take their slots, and then none does."""
    first, second, third = save_loras(tmp_path, model, 3)
    both = applied(model, (first, 0.7), (second, -0.3))
    one, other = applied(model, (second, 1.0)), applied(model, (third, 0.5))
    jobs, graphs = make_jobs(model, kind), Graphs(model, max_readers=99)
    never = [run_captured(graphs, jobs) for _ in range(2)][-1]
    num_without = len(graphs.captured)
    adapted = with_loras(jobs, [both, one, None])
    expected = run(model, adapted)
    for _ in range(2):
        assert max(map(apart, run_captured(graphs, adapted), expected)) <= tolerance(model)
    num_captured = len(graphs.captured)
    assert num_captured > num_without
    for loras in ([other, None, both], [None, other, one]):
        adapted = with_loras(jobs, loras)
        found = run_captured(graphs, adapted)
        assert max(map(apart, found, run(model, adapted))) <= tolerance(model)
        assert max(map(apart, found, never)) > tolerance(model)
    assert len(graphs.captured) == num_captured  # other LoRAs, but no other signature
    assert all(map(torch.equal, run_captured(graphs, jobs), never))
    adapted = with_loras(make_jobs(model, kind, more=0.04), [other, None, both])
    assert max(map(apart, run_captured(graphs, adapted), run(model, adapted))) <= tolerance(model)
    if model.family == "unet":
        assert len(graphs.captured) == num_captured  # nor do other masks make one
    assert not graphs.refused
    assert not graphs.reasons


@pytest.mark.parametrize("name", ["blend", "sdxl"])
def test_law_lora_captured_with_weights_of_their_own(
    name: str, models: dict[str, Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One capture serves any sets, whose copies come and go; a pass without copies is another."""
    monkeypatch.setattr(linear, "MIN_ROWS", 0)
    model = models[name]
    sets = [applied(model, (file, 0.7)) for file in save_loras(tmp_path, model, 3)]
    jobs, graphs = make_jobs(model, "kv"), Graphs(model, max_readers=99)
    copying = Copying(2 * Copying().plan(sets[0]).num_bytes)
    batches = [[sets[0], None, sets[1]], [sets[0], sets[1], None], [sets[2], sets[0], None], [None, sets[1], sets[0]]]
    for loras in batches:
        adapted = with_loras(jobs, loras)
        assert max(map(apart, run_captured(graphs, adapted, copying), run(model, adapted))) <= tolerance(model)
    assert copying.num_copied == 4  # one was dropped and made again
    assert len(graphs.captured) == 1
    adapted = with_loras(jobs, sets)  # three do not fit
    for _ in range(2):
        assert max(map(apart, run_captured(graphs, adapted, copying), run(model, adapted))) <= tolerance(model)
    assert len(graphs.captured) == 2


@pytest.mark.parametrize("name", ["blend", "sdxl"])
def test_law_lora_comes_late_to_a_captured_pass(name: str, models: dict[str, Model], tmp_path: Path) -> None:
    model = models[name]
    files = save_loras(tmp_path, model, 2)
    early, late = (applied(model, (file, 0.8)) for file in files)
    graphs = Graphs(model, max_readers=99)

    def paint(captures: bool) -> list[Tensor]:
        jobs = with_loras(make_jobs(model, "kv"), [early, None, None])
        engine = Engine(model, graphs=graphs if captures else None, merging=Merging(False))
        for job in jobs:
            engine.join(job)
        engine.step()
        jobs[1].loras = late
        while engine.jobs:
            engine.step()
        return [job.latents for job in jobs]

    expected = paint(captures=False)
    for _ in range(2):
        assert max(map(apart, paint(captures=True), expected)) <= tolerance(model)
    assert len(graphs.captured) == 1


def test_loras_for_convolutions_are_not_captured(models: dict[str, Model], tmp_path: Path) -> None:
    model = models["sdxl"]
    loras = applied(model, (save_lora(tmp_path / "all.safetensors", model), 0.5))
    jobs, graphs = with_loras(make_jobs(model, "kv"), [loras, None, loras]), Graphs(model, max_readers=99)
    for _ in range(2):
        assert max(map(apart, run_captured(graphs, jobs), run(model, jobs))) <= tolerance(model)
    assert not graphs.captured
    assert graphs.reasons == {"a LoRA patches convolutions"}
