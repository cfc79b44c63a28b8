"""Captured passes of ControlNets against uncaptured ones. On a CPU nothing is captured, but the passes run over fixed
tensors, as they do in a graph."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.captured_controls import (
    GUIDED,
    UNGUIDED,
    are_equal,
    jobs_with_loras,
    later,
    make_job,
    residuals_of,
    run_jobs,
    save_nets,
)
from helpers.edits import apart, close, far, run
from helpers.loras import tolerance

from instgenie.engine import control_graphs
from instgenie.engine.control_graphs import ControlGraphs, make_control_graphs
from instgenie.engine.controls import ControlShelf, LocalControls, open_job, step_of
from instgenie.engine.graphs import Graphs
from instgenie.engine.loop import Engine
from instgenie.models.controlnet import BranchFacts, ControlBatch, Facts
from instgenie.models.model import Model


@pytest.fixture(params=["sd", "sdxl", "blend_guided"])
def model(request: pytest.FixtureRequest, models: dict[str, Model]) -> Model:
    return models[request.param]


@pytest.fixture
def nets(model: Model, tmp_path: Path) -> list[Path]:
    return save_nets(tmp_path, model)


def captured_controls(model: Model, **fields: Any) -> tuple[LocalControls, ControlGraphs]:
    graphs = ControlGraphs(model.device, **{"max_branches": 99} | fields)
    return LocalControls(model, graphs=graphs), graphs


def test_captured_is_uncaptured_at_every_step(model: Model, nets: list[Path]) -> None:
    """Two ControlNets, over two jobs of two branches and one of one."""
    uses = [{"scale": 0.6}, {"scale": -0.4}]
    jobs = [make_job(model, nets, uses, seed=1, **GUIDED), make_job(model, nets, uses[:1], seed=2, **UNGUIDED)]
    jobs.append(make_job(model, nets[1:], uses, seed=3, prompt="grass", **GUIDED))
    plain, (controls, graphs) = LocalControls(model), captured_controls(model)
    for num_captured in (0, 2, 2):
        assert are_equal(residuals_of(controls, jobs), residuals_of(plain, jobs))
        assert graphs.num_captured == num_captured  # one pass of each ControlNet holds both branches of all jobs
        jobs = [later(job) for job in jobs]


def test_what_changes_launches_is_part_of_the_key(model: Model, nets: list[Path]) -> None:
    one, other = (make_job(model, nets, seed=seed, prompt=f"a cat {seed}", **UNGUIDED) for seed in range(2))
    large = make_job(model, nets, size=(64, 32), **UNGUIDED)
    guided = make_job(model, nets, **GUIDED)
    second = make_job(model, nets[1:], **UNGUIDED)
    controls, graphs = captured_controls(model)
    plain = LocalControls(model)
    residuals_of(controls, [one])
    for num_captured, jobs in enumerate(([other], [one, other], [large], [guided, one], [second]), 1):
        for _ in range(2):  # the second time a key is known; [other] has that of [one]
            assert are_equal(residuals_of(controls, jobs), residuals_of(plain, jobs))
        assert graphs.num_captured == num_captured
    jobs = [guided]  # as many branches as two jobs have
    assert are_equal(residuals_of(controls, jobs), residuals_of(plain, jobs))
    assert graphs.num_captured == 5


def test_a_pass_of_another_dtype_is_another_one(models: dict[str, Model], tmp_path: Path) -> None:
    """Fixed tensors of one dtype never take values of another."""
    model = models["sd"]
    job = make_job(model, save_nets(tmp_path, model))
    net = ControlShelf(model.device, model.dtype).take(job.controls[0].use)
    graphs = ControlGraphs(model.device)
    with torch.inference_mode():
        batch = net.pack([(open_job(job, [net]), step_of(job, model), 0)])
        for _ in range(2):
            graphs.run(net, batch)
        doubled = ControlBatch(batch.sample, batch.timestep.double() + 0.25, batch.facts)
        expected = net.run(doubled)
        found = [graphs.run(net, doubled) for _ in range(2)]
    assert graphs.num_captured == 2
    assert all(are_equal([one], [expected]) for one in found)


def test_the_least_recently_used_is_dropped(model: Model, nets: list[Path]) -> None:
    one, other = make_job(model, nets, **UNGUIDED), make_job(model, nets, **GUIDED)
    controls, graphs = captured_controls(model, max_graphs=1)
    net = controls.shelf.take(one.controls[0].use)
    for _ in range(2):
        residuals_of(controls, [one])
    [known] = graphs.of(net).captured
    for _ in range(2):
        residuals_of(controls, [other])
    assert graphs.num_captured == 1
    assert known not in graphs.of(net).captured
    assert are_equal(residuals_of(controls, [one]), residuals_of(LocalControls(model), [one]))


def test_residuals_are_not_written_over(model: Model, nets: list[Path]) -> None:
    """Neither by the next step nor by another pass of the same step that has the same key."""
    jobs = [make_job(model, nets, seed=seed, **GUIDED) for seed in range(3)]
    controls, graphs = captured_controls(model)
    net = controls.shelf.take(jobs[0].controls[0].use)
    net.max_jobs = 1  # type: ignore[misc]  # as if attention reached across jobs: each has a pass of its own
    plain = LocalControls(model, controls.shelf)
    residuals_of(controls, jobs)
    assert graphs.num_captured == 1
    found = residuals_of(controls, jobs)
    copies = [[residual.clone() for residual in own] for own in found]
    assert are_equal(copies, residuals_of(plain, jobs))
    residuals_of(controls, [later(job) for job in jobs])
    assert are_equal(found, copies)


def test_jobs_join_and_leave_and_windows_open_and_close(model: Model, nets: list[Path]) -> None:
    """A job alone gives the same as one that shares captured passes, with others that come and go."""
    windows: list[list[dict[str, Any]]] = [[{"end": 0.5}], [{"start": 0.3}, {"scale": 0.5, "end": 0.8}], [{}], []]
    jobs = [
        make_job(model, nets, uses, seed=seed, steps=4 + seed % 2, share=0.2 + 0.2 * seed, **GUIDED)
        for seed, uses in enumerate(windows)
    ]
    alone = [run(model, [job])[0] for job in jobs]
    controls, graphs = captured_controls(model)
    for _ in range(2):
        joining = [replace(job) for job in jobs]
        engine, arrivals = Engine(model, graphs=Graphs(model), controls=controls), iter(joining)
        engine.join(next(arrivals))
        while engine.jobs:
            engine.step()
            if (arrival := next(arrivals, None)) is not None:
                engine.join(arrival)
        assert max(map(apart, (job.latents for job in joining), alone)) <= 5 * close(model)
        for job in joining:
            controls.close(job)
    assert graphs.num_captured > 2


def test_what_depends_on_no_step_is_put_together_once(
    model: Model, nets: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [make_job(model, nets, seed=seed, **UNGUIDED) for seed in range(2)]
    controls, graphs = captured_controls(model)
    net = controls.shelf.take(jobs[0].controls[0].use)
    calls, collect = [], net.collect

    def count(branches: Sequence[BranchFacts]) -> Facts:
        calls.append(len(branches))
        return collect(branches)

    monkeypatch.setattr(net, "collect", count)
    one, other = jobs
    for _ in range(3):
        residuals_of(controls, [one, other])
        one, other = later(one), later(other)
    assert calls == [2]
    residuals_of(controls, [one])  # the other one has left
    assert calls == [2, 1]
    [captured] = graphs.of(net).captured.values()
    copied = [fixed.source() for fixed in captured.columns.fixed if fixed.source]
    assert sum(source is not None for source in copied) == len(copied) - 2  # latents and times were of one step


def test_graphs_go_with_their_controlnet(model: Model, nets: list[Path]) -> None:
    jobs = [make_job(model, [net]) for net in nets]
    graphs = ControlGraphs(model.device)
    shelf = ControlShelf(model.device, model.dtype, max_bytes=1)  # the last one stays
    controls = LocalControls(model, shelf, graphs=graphs)
    gc.collect()
    gc.disable()  # nothing refers to itself, so that memory is free at once
    try:
        for job in jobs:
            for _ in range(2):
                residuals_of(controls, [job])
            controls.close(job)
            job.residuals = None
        assert len(shelf.versions) == 1
        assert graphs.num_captured == 1
        assert list(graphs._of) == [shelf.take(jobs[1].controls[0].use)]
    finally:
        gc.enable()


def test_a_pass_that_cannot_be_captured_still_runs(
    models: dict[str, Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory left\nlong story")

    monkeypatch.setattr(control_graphs, "capture", fail)
    model = models["sd"]
    job = make_job(model, save_nets(tmp_path, model))
    controls, graphs = captured_controls(model)
    for _ in range(3):
        assert are_equal(residuals_of(controls, [job]), residuals_of(LocalControls(model), [job]))
    captures = graphs.of(controls.shelf.take(job.controls[0].use))
    assert captures.reasons == {"no memory left"}
    assert len(captures.refused) == 1
    assert not graphs.num_captured


def test_large_batches_are_not_captured(model: Model, nets: list[Path]) -> None:
    jobs = [make_job(model, nets, seed=seed, **GUIDED) for seed in range(2)]
    controls, graphs = captured_controls(model, max_branches=3)
    for _ in range(2):
        residuals_of(controls, jobs)
    assert not graphs.num_captured
    for _ in range(2):
        residuals_of(controls, jobs[:1])
    assert graphs.num_captured == 1


def test_a_cpu_has_no_graphs() -> None:
    assert make_control_graphs(torch.device("cpu")) is None


def test_pictures_of_other_shapes_with_as_many_tokens(models: dict[str, Model], tmp_path: Path) -> None:
    """Each has the positions of its own tokens."""
    model = models["blend_guided"]
    nets = save_nets(tmp_path, model)
    jobs = [make_job(model, nets, size=size) for size in ((64, 32), (32, 64))]
    assert jobs[0].latents.shape == jobs[1].latents.shape
    controls = LocalControls(model)
    alone = [residuals_of(controls, [job])[0] for job in jobs]
    for found, expected in zip(residuals_of(controls, jobs), alone, strict=True):
        assert max(map(apart, found, expected)) <= close(model)


@pytest.mark.parametrize("merges", [False, True])
def test_loras_and_controlnets_in_captured_passes(models: dict[str, Model], merges: bool, tmp_path: Path) -> None:
    model = models["sdxl"]
    jobs = jobs_with_loras(model, tmp_path, merges)
    expected = run_jobs(model, jobs, None, LocalControls(model), merges=False)
    (controls, control_passes), graphs = captured_controls(model), Graphs(model)
    for _ in range(2):
        found = run_jobs(model, jobs, graphs, controls, merges)
        assert max(map(apart, found, expected)) <= tolerance(model)
    assert control_passes.num_captured == 2
    assert {has_residuals for *_, has_residuals in graphs.captured} == {True}
    without = run_jobs(model, [replace(job, loras=None) for job in jobs], graphs, controls, merges)
    assert max(map(apart, without, expected)) > far(model)
