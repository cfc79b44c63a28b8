"""What the ControlNets of a worker cost, by where they run."""

from pathlib import Path

import pytest
from helpers.controlnets import controlled, save_controlnet
from helpers.edits import make_edit

from instgenie.cluster.config import ClusterConfig, ControlConfig, ProcessConfig, process_config, resolve
from instgenie.cost.table import DEFAULT_COSTS, StepCosts
from instgenie.engine.prepare import prepare
from instgenie.engine.pricing import price_of, price_steps, priced
from instgenie.models.model import Model
from instgenie.workers.control_prices import with_controls


@pytest.fixture
def nets(models: dict[str, Model], tmp_path: Path) -> dict[str, str]:
    fitting = {name: save_controlnet(tmp_path / name, models["sd"]) for name in ("edges", "pose")}
    return {
        name: str(path) for name, path in (fitting | {"other": save_controlnet(tmp_path / "x", models["sdxl"])}).items()
    }


def configured(nets: dict[str, str], device: str, *places: str) -> ProcessConfig:
    controls = ControlConfig(tuple(nets.items()), devices=places)
    config = resolve(ClusterConfig(model="any", devices=(device,), controls=controls), 2**30)
    return process_config(config, "0.denoise.1", device, "ipc://x", worker=0)


def costs_of(model: Model, config: ProcessConfig) -> StepCosts:
    return with_controls(price_steps(model, "any", "cached", "model"), config, model)


def test_those_on_the_device_of_the_steps_cost_their_seconds(models: dict[str, Model], nets: dict[str, str]) -> None:
    model = models["sd"]
    in_the_worker, beside_it = (costs_of(model, configured(nets, "cpu", *places)) for places in ((), ("cpu",)))
    assert in_the_worker == beside_it  # they share the cores
    assert len(in_the_worker.controls) == 2  # one of them does not fit
    assert {(one.device, one.hidden) for one in in_the_worker.controls.values()} == {("", 0.0)}
    dense = in_the_worker.per_step + in_the_worker.dense.compute
    assert all(0.1 * dense < one.seconds < dense for one in in_the_worker.controls.values())


def test_those_on_other_devices_run_beside_the_encoder(models: dict[str, Model], nets: dict[str, str]) -> None:
    costs = costs_of(models["sd"], configured(nets, "cpu", "cuda:1", "cuda:2"))
    assert sorted(one.device for one in costs.controls.values()) == ["cuda:1", "cuda:2"]
    assert all(0.1 < one.hidden < 1 for one in costs.controls.values())
    config = configured(nets, "cuda:1", "cuda:1", "cuda:2")
    assert config.control_places == ("", "cuda:2")


def test_a_job_is_priced_by_the_steps_that_are_guided(models: dict[str, Model], nets: dict[str, str]) -> None:
    model = models["sd"]
    costs = costs_of(model, configured(nets, "cpu"))
    plain, guided = (
        prepare(edit, model) for edit in (make_edit(), controlled(make_edit(), (Path(nets["edges"]), {"start": 0.5})))
    )
    [seconds] = {costs.controls[control.use.version].seconds for control in guided.controls}
    seconds *= len(plain.masked) / costs.num_tokens
    added = [price_of(guided, costs).compute - price_of(plain, costs).compute]
    mean = priced(guided, costs).price.compute - priced(plain, costs).price.compute
    guided.step = plain.step = 2
    added.append(price_of(guided, costs).compute - price_of(plain, costs).compute)
    assert added == pytest.approx([0.0, seconds])
    assert mean == pytest.approx(seconds / 2)
    assert price_of(guided, DEFAULT_COSTS) == price_of(plain, DEFAULT_COSTS)
