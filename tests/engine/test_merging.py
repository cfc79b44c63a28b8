"""LoRAs merged into the weights while a batch shares them: the same pictures, and the very same weights afterwards."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.cached import make_cached
from helpers.edits import apart, far, make_edit, prepare, run
from helpers.loras import applied, save_lora, tolerance

from instgenie.adapters.keys import NETWORK
from instgenie.engine import merging as engine_merging
from instgenie.engine.graphs import Graphs
from instgenie.engine.loop import Engine
from instgenie.engine.merging import MIN_STEPS_LEFT, Merging
from instgenie.engine.own import reuse_own
from instgenie.jobs.job import Job
from instgenie.models.families import FAMILIES
from instgenie.models.model import Model


def weights(model: Model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.network.state_dict().items()}


def is_same(model: Model, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, before[name]) for name, tensor in model.network.state_dict().items())


def run_merging(model: Model, jobs: Sequence[Job], graphs: Graphs | None = None) -> tuple[list[torch.Tensor], Engine]:
    engine = Engine(model, merging=Merging(), graphs=graphs)
    jobs = [replace(job) for job in jobs]
    for job in jobs:
        engine.join(job)
    while engine.jobs:
        engine.step()
    return [job.latents for job in jobs], engine


@pytest.fixture
def files(model: Model, tmp_path: Path) -> list[Path]:
    family = FAMILIES[model.family]
    names = [name for name in model.layer_table.shapes[NETWORK] if not family.is_of_prompts(name)]
    return [save_lora(tmp_path / f"{seed}.safetensors", model, names, seed=seed, rank=2) for seed in (1, 2)]


def test_law_lora_merged_is_unmerged(model: Model, files: list[Path]) -> None:
    before, loras = weights(model), applied(model, (files[0], 0.7), (files[1], 0.4))
    edits = [make_edit(steps=6, seed=1, true_guidance=2.0), make_edit(steps=7, seed=2, share=0.2, own_steps=(0, 3))]
    jobs = [prepare(edits[0], model), reuse_own(prepare(edits[1], model)), make_cached(model, edits[0], "kv")]
    jobs = [replace(job, loras=loras) for job in jobs]
    apart_from = run(model, jobs)
    together, engine = run_merging(model, jobs)
    assert engine.merging.num_merges == 1
    assert engine.merging.merged is loras
    assert max(map(apart, together, apart_from)) <= tolerance(model)
    assert not is_same(model, before)
    engine.merging.undo()
    assert is_same(model, before)
    captured, engine = run_merging(model, jobs, Graphs(model))  # merged ones are no obstacle to capturing
    assert engine.graphs
    assert engine.graphs.seen
    assert max(map(apart, captured, apart_from)) <= tolerance(model)
    engine.merging.undo()
    assert is_same(model, before)


def test_law_lora_a_thousand_merges_change_nothing(models: dict[str, Model], tmp_path: Path) -> None:
    for family in ("blend", "sd"):
        model = models[family]
        names = list(model.layer_table.shapes[NETWORK])[::5]
        before, merging = weights(model), Merging()
        pair = [
            applied(model, (save_lora(tmp_path / "x.safetensors", model, names, seed=seed), 3.0)) for seed in (1, 2)
        ]
        for number in range(1000):
            merging.merge(pair[number % 2])
            merging.undo()
        assert is_same(model, before)
        assert merging.num_merges == 1000


def test_weights_are_put_back_when_another_edit_joins(models: dict[str, Model], tmp_path: Path) -> None:
    """The one beside it gets what it would get alone."""
    model = models["sd"]
    before = weights(model)
    loras = applied(model, (save_lora(tmp_path / "x.safetensors", model), 0.8))
    plain = prepare(make_edit(steps=4, seed=3), model)
    engine = Engine(model, merging=Merging())
    styled = replace(prepare(make_edit(steps=8), model), loras=loras)
    alone = run(model, [styled, plain])
    engine.join(styled)
    for _ in range(3):
        engine.step()
    assert engine.merging.merged is loras
    engine.join(plain)
    engine.step()
    assert engine.merging.merged is None
    assert is_same(model, before)
    while engine.jobs:
        engine.step()
    assert max(map(apart, (styled.latents, plain.latents), alone)) <= tolerance(model)
    assert apart(styled.latents, plain.latents) > far(model)
    assert engine.merging.merged is None  # the plain one ended too late for merging to pay again
    assert styled.num_steps - 8 < MIN_STEPS_LEFT


def test_a_batch_that_has_few_steps_left_is_not_merged(models: dict[str, Model], tmp_path: Path) -> None:
    model = models["sd"]
    loras = applied(model, (save_lora(tmp_path / "x.safetensors", model), 0.8))
    job = replace(prepare(make_edit(steps=MIN_STEPS_LEFT), model), loras=loras)
    _, engine = run_merging(model, [job])
    assert engine.merging.num_merges == 0
    off = Engine(model)
    off.join(replace(prepare(make_edit(steps=8), model), loras=loras))
    while off.jobs:
        off.step()
    assert off.merging.num_merges == 0


def test_without_room_for_the_originals_nothing_is_merged(
    models: dict[str, Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models["sd"]
    loras = applied(model, (save_lora(tmp_path / "x.safetensors", model), 0.8))
    job = replace(prepare(make_edit(steps=8), model), loras=loras)
    monkeypatch.setattr(engine_merging, "available_bytes", lambda device: 1000)
    _, engine = run_merging(model, [job])
    assert engine.merging.num_merges == 0
    assert engine.merging.is_on  # another time there may be room
