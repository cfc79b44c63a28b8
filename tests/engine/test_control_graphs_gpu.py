"""Captured passes of ControlNets on a GPU: residuals and edits are bit-identical to uncaptured ones."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.captured_controls import (
    GUIDED,
    are_equal,
    jobs_with_loras,
    later,
    make_job,
    residuals_of,
    run_jobs,
    save_nets,
)
from helpers.cuda import waiting_is_an_error

from instgenie.engine.control_graphs import ControlGraphs
from instgenie.engine.controls import ControlShelf, LocalControls, open_job, step_of
from instgenie.engine.graphs import Graphs
from instgenie.engine.loop import Engine
from instgenie.models.controlnet import compute
from instgenie.models.loading.load import load
from instgenie.models.model import Model


def load_on_gpu(name: str, models: dict[str, Model]) -> Model:
    return load(models[name].name, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sd", "sdxl", "blend_guided"])
def test_captured_residuals_are_bit_identical(name: str, models: dict[str, Model], tmp_path: Path) -> None:
    """Two ControlNets on streams of their own, while the stream of the steps is busy before and behind them."""
    model = load_on_gpu(name, models)
    nets = save_nets(tmp_path, model)
    uses = [{"scale": 0.6}, {"scale": -0.4}]
    jobs = [make_job(model, nets, uses, seed=seed, **GUIDED) for seed in range(2)]
    shelf = ControlShelf(model.device, model.dtype)
    graphs = ControlGraphs(model.device, max_branches=99)
    controls, plain = LocalControls(model, shelf, graphs=graphs), LocalControls(model, shelf)
    steps = [jobs]
    for _ in range(jobs[0].num_steps - 1):
        steps.append([later(job) for job in steps[-1]])
    expected = [[[part.clone() for part in own] for own in residuals_of(plain, at)] for at in steps]
    torch.cuda.synchronize()
    found = []
    for at in steps:
        torch.cuda._sleep(20_000_000)  # the ControlNets wait for what comes before them
        controls.begin(at)
        torch.cuda._sleep(20_000_000)  # the host goes on, and so do the ControlNets, while nobody reads what they left
        found.append([[part.clone() for part in job.residuals.result()] for job in at if job.residuals])
    torch.cuda.synchronize()
    assert graphs.num_captured == 2
    assert not any(graphs.of(net).reasons for net in graphs._of)
    assert all(are_equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.gpu
def test_captured_residuals_of_several_passes_of_one_key(models: dict[str, Model], tmp_path: Path) -> None:
    """The copies of one replay are made before the next writes over them."""
    model = load_on_gpu("sd", models)
    nets = save_nets(tmp_path, model)
    jobs = [make_job(model, nets, seed=seed, **GUIDED) for seed in range(4)]
    shelf = ControlShelf(model.device, model.dtype)
    shelf.take(jobs[0].controls[0].use).max_jobs = 1  # type: ignore[misc]
    controls, graphs = LocalControls(model, shelf), ControlGraphs(model.device)
    expected = [[part.clone() for part in own] for own in residuals_of(controls, jobs)]
    captured = LocalControls(model, shelf, graphs=graphs)
    for _ in range(3):
        found = residuals_of(captured, jobs)
        torch.cuda.synchronize()
        assert are_equal(found, expected)
    assert graphs.num_captured == 1


@pytest.mark.gpu
@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("name", ["sdxl", "blend_guided"])
def test_edits_with_controlnets_and_loras_are_captured(
    name: str, merges: bool, models: dict[str, Model], tmp_path: Path
) -> None:
    """Whole edits in captured passes, with captured ControlNets and without: the results are bit-identical, and no pass
    is refused."""
    model = load_on_gpu(name, models)
    jobs = jobs_with_loras(model, tmp_path, merges)
    shelf = ControlShelf(model.device, model.dtype)
    control_passes = ControlGraphs(model.device, max_branches=99)
    results = []
    for captured in (None, control_passes):
        graphs, controls = Graphs(model, max_readers=99), LocalControls(model, shelf, graphs=captured)
        for _ in range(3):
            latents = run_jobs(model, jobs, graphs, controls, merges)
        results.append(latents)
        assert graphs.captured
        assert not graphs.reasons
    assert control_passes.num_captured >= 2
    assert not any(control_passes.of(net).reasons for net in control_passes._of)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sdxl", "blend_guided"])
def test_no_captured_step_waits(name: str, models: dict[str, Model], tmp_path: Path) -> None:
    """Once all passes are known, the host waits for the device in no step."""
    model = load_on_gpu(name, models)
    jobs, graphs = jobs_with_loras(model, tmp_path, merges=False), Graphs(model, max_readers=99)
    controls = LocalControls(model, graphs=ControlGraphs(model.device, max_branches=99))
    for _ in range(3):
        run_jobs(model, jobs, graphs, controls, merges=False)
    engine = Engine(model, graphs=graphs, controls=controls)
    for job in jobs:
        engine.join(replace(job))
    engine.step()
    while engine.jobs:
        with waiting_is_an_error():
            engine.step()


@pytest.mark.gpu
def test_a_process_of_controlnets_captures_them_too(models: dict[str, Model], tmp_path: Path) -> None:
    """There passes run on the default stream, one after the other."""
    model = load_on_gpu("sdxl", models)
    nets = save_nets(tmp_path, model)
    uses = [{"scale": 0.6}, {"scale": -0.4}]
    jobs = [make_job(model, nets, uses, seed=seed, **GUIDED) for seed in range(2)]
    shelf, graphs = ControlShelf(model.device, model.dtype), ControlGraphs(model.device)
    with torch.inference_mode():
        opened = [open_job(job, [shelf.take(control.use) for control in job.controls]) for job in jobs]
        for _ in range(3):
            asked = [(one, step_of(job, model)) for one, job in zip(opened, jobs, strict=True)]
            assert are_equal(compute(asked, graphs.run), compute(asked))
            jobs = [later(job) for job in jobs]
    assert graphs.num_captured == 2


@pytest.mark.gpu
def test_graphs_on_a_gpu_go_with_their_controlnet(models: dict[str, Model], tmp_path: Path) -> None:
    model = load_on_gpu("sd", models)
    jobs = [make_job(model, [net]) for net in save_nets(tmp_path, model)]
    graphs, shelf = ControlGraphs(model.device), ControlShelf(model.device, model.dtype, max_bytes=1)
    controls = LocalControls(model, shelf, graphs=graphs)
    for job in jobs:
        for _ in range(2):
            residuals_of(controls, [job])
        controls.close(job)
        job.residuals = None
        assert graphs.num_captured == 1  # without those of the one before, which is gone at once
    torch.cuda.synchronize()
    assert list(graphs._of) == [shelf.take(jobs[1].controls[0].use)]
