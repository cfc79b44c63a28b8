"""Weights with LoRAs merged into them, kept beside the model's own in a limited number of bytes."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.cached import make_cached
from helpers.edits import apart, make_edit, prepare, run
from helpers.loras import applied, load_lora, merged, run_copying, save_lora, tolerance
from torch import Tensor

from instgenie.adapters import copies
from instgenie.adapters.applied import AppliedLoras, PatchableLayers, apply_loras
from instgenie.adapters.copies import WeightCopies, find_joined
from instgenie.adapters.keys import NETWORK
from instgenie.engine.copying import Copying
from instgenie.engine.loop import Engine
from instgenie.engine.merging import Merging
from instgenie.jobs.job import Job
from instgenie.kernels.merge_weights import view_at
from instgenie.models.families import FAMILIES
from instgenie.models.layers import linear
from instgenie.models.model import Model

LAYERS = {
    "blend": ["transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_out.0"],
    "sd": ["down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q", "down_blocks.0.resnets.0.conv1"],
}


@pytest.fixture(params=LAYERS)
def named(request: pytest.FixtureRequest, models: dict[str, Model]) -> tuple[str, Model]:
    return request.param, models[request.param]


@pytest.fixture
def model(models: dict[str, Model]) -> Model:
    return models["sd"]


def make_sets(model: Model, folder: Path, num: int) -> list[AppliedLoras]:
    """Sets of one LoRA each, for every layer."""
    return [applied(model, (save_lora(folder / f"{one}.safetensors", model, seed=one), 0.5)) for one in range(num)]


def make_jobs(model: Model, sets: Sequence[AppliedLoras | None]) -> list[Job]:
    job = prepare(make_edit(steps=2), model)
    return [replace(job, loras=one) for one in sets]


def joined_twin(model: Model) -> Model:
    """The same model with joined layers, as it is loaded to a GPU."""
    network = copy.deepcopy(model.network)
    if join := FAMILIES[model.family].join_layers:
        join(network)
    return replace(model, **{model.network_name: network})


def copied_weights(copies: WeightCopies) -> dict[int, Tensor]:
    """By number of the layer."""
    plan, memory = copies.plan, copies.memory
    triples = zip(plan.numbers, plan.places, plan.weights, strict=True)
    return {number: view_at(memory, place, weight) for number, place, weight in triples}


def has_copies(sets: Sequence[AppliedLoras]) -> list[bool]:
    return [one.merging.copies is not None for one in sets]


def test_copies_are_what_merging_writes(named: tuple[str, Model], tmp_path: Path) -> None:
    """Bit-identical, beside weights that are not written to. What is joined is joined in the copies, too."""
    name, model = named[0], joined_twin(named[1])
    loras = applied(model, (save_lora(tmp_path / "one.safetensors", model, LAYERS[name]), 0.7))
    before = {layer: layer.get_parameter("weight").clone() for layer in loras.numbers}
    copying, merging = Copying(2**30), Merging()
    copying.settle(make_jobs(model, [loras, None]))
    found = loras.merging.copies
    assert found
    assert all(torch.equal(layer.get_parameter("weight"), weight) for layer, weight in before.items())
    joined = find_joined(loras.numbers)
    copied = {layer for patched in loras.layers for layer in joined.get(patched, ())}
    weights = copied_weights(found)
    assert weights.keys() == {loras.numbers[layer] for layer in copied}
    assert len(copied) == (4 if name == "blend" else 3)  # Q, K and V are one product; a convolution sees pictures
    merging.merge(loras)
    for layer in copied:
        assert torch.equal(weights[loras.numbers[layer]], layer.get_parameter("weight").flatten(1))
    merging.undo()
    for group in {joined[layer] for layer in copied}:
        assert linear.as_one([weights[loras.numbers[layer]] for layer in group]) is not None


@pytest.mark.parametrize("name", ["blend", "sdxl", "sd3", "qwen_edit", "zimage"])
def test_law_lora_joined_layers_are_one_product(name: str, models: dict[str, Model], tmp_path: Path) -> None:
    """LoRAs that patch some of them, and others of them."""
    model = joined_twin(models[name])
    names = [one for one in model.layer_table.shapes[NETWORK] if not FAMILIES[model.family].is_of_prompts(one)]
    sets = [
        applied(model, (save_lora(tmp_path / f"{first}.safetensors", model, names[first::3], seed=first), 0.7))
        for first in range(2)
    ]
    jobs = [*make_jobs(model, [*sets, None]), replace(make_cached(model, make_edit(steps=2), "y"), loras=sets[0])]
    assert max(map(apart, run_copying(model, jobs), run(model, jobs))) <= tolerance(model)


def test_the_least_recently_used_go_first(model: Model, tmp_path: Path) -> None:
    sets = make_sets(model, tmp_path, 3)
    one_set = Copying().plan(sets[0]).num_bytes
    copying = Copying(2 * one_set + 1)
    copying.settle(make_jobs(model, [sets[0], None, sets[1]]))
    assert has_copies(sets) == [True, True, False]
    assert copying.num_bytes == 2 * one_set
    copying.settle(make_jobs(model, [None, sets[0]]))
    copying.settle(make_jobs(model, [None, sets[2]]))
    assert has_copies(sets) == [True, False, True]
    assert copying.num_bytes == 2 * one_set
    assert copying.num_copied == 3


def test_a_batch_that_does_not_fit_has_products_of_low_rank(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told once, and nothing that others have is dropped for it."""
    monkeypatch.setattr(linear, "MIN_ROWS", 0)
    sets = make_sets(model, tmp_path, 3)
    one_set = Copying().plan(sets[0]).num_bytes
    engine = Engine(model, copying=Copying(2 * one_set))
    engine.copying.settle(make_jobs(model, [sets[0], None]))
    jobs = make_jobs(model, [sets[0], sets[1], sets[2]])
    for job in jobs:
        engine.join(job)
    while engine.jobs:
        engine.step()
    assert has_copies(sets) == [True, False, False]
    [record] = [one for one in caplog.records if one.name == "instgenie.engine.copying"]
    told = vars(record)
    assert (told["num_sets"], told["num_bytes"], told["max_bytes"]) == (3, 3 * one_set, 2 * one_set)
    expected = run(model, make_jobs(model, sets))
    assert max(map(apart, [job.latents for job in jobs], expected)) <= tolerance(model)


def test_nothing_is_copied_unless_sets_differ(model: Model, tmp_path: Path) -> None:
    """One set for all is merged, and none needs nothing."""
    [one] = make_sets(model, tmp_path, 1)
    copying = Copying(2**30)
    for batch in ([one, one], [None, None], [None], [one], []):
        copying.settle(make_jobs(model, batch))
    off = Copying()
    off.settle(make_jobs(model, [one, None]))
    assert copying.num_copied == off.num_copied == 0


def test_edits_that_come_later_find_the_copies_of_their_names(model: Model, tmp_path: Path) -> None:
    lora = load_lora(save_lora(tmp_path / "one.safetensors", model), model)
    layers = PatchableLayers({NETWORK: model.network})
    first, again, other = (apply_loras(layers, [(lora, scale)], (("version", scale),)) for scale in (0.5, 0.5, 0.6))
    copying = Copying(2**30)
    for one in (first, again, other):
        copying.settle(make_jobs(model, [one, None]))
    assert first.merging.copies is again.merging.copies
    assert first.merging.copies is not other.merging.copies
    assert copying.num_copied == 2
    for one in (first, again):
        one.merging.kept = None
    copying.settle(make_jobs(model, [first, again]))
    assert first.merging.copies is again.merging.copies is not None


def test_law_lora_that_patches_no_copied_layer_shares_the_batch(model: Model, tmp_path: Path) -> None:
    file = save_lora(tmp_path / "one.safetensors", model, [LAYERS["sd"][1]])
    [whole], convolution = make_sets(model, tmp_path, 1), applied(model, (file, 0.7))
    jobs = make_jobs(model, [convolution, whole, None])
    assert max(map(apart, run_copying(model, jobs), run(model, jobs))) <= tolerance(model)
    assert Copying().plan(convolution).num_bytes == 0


def test_without_memory_for_copies_none_are_made(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = make_sets(model, tmp_path, 2)

    def refuse(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    copying = Copying(2**30)
    copying.settle(make_jobs(model, [sets[0], None]))
    monkeypatch.setattr(copies, "merge_weights", refuse)
    copying.settle(make_jobs(model, sets))
    assert has_copies(sets) == [False, False]
    assert copying.max_bytes == copying.num_bytes == 0


def test_few_rows_are_multiplied_by_the_weights_of_the_model(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are there, but no branch has enough rows for them."""
    sets = make_sets(model, tmp_path, 2)
    engine, jobs = Engine(model, copying=Copying(2**30)), make_jobs(model, sets)
    monkeypatch.setattr(linear, "grouped_linear", lambda *args: pytest.fail("a product with weights of its own"))
    for job in jobs:
        engine.join(job)
    while engine.jobs:
        engine.step()
    assert has_copies(sets) == [True, True]


def test_law_lora_that_comes_late_gets_weights_of_its_own(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "MIN_ROWS", 0)
    file = save_lora(tmp_path / "one.safetensors", model)
    late, other = applied(model, (file, 0.8)), applied(model, (file, 0.3))
    engine, jobs = Engine(model, copying=Copying(2**30)), make_jobs(model, [None, other])
    for job in jobs:
        engine.join(job)
    engine.step()
    [expected] = run(merged(model, (file, 0.8)), [replace(jobs[0])])
    jobs[0].loras = late
    while engine.jobs:
        engine.step()
    assert late.merging.copies
    assert apart(jobs[0].latents, expected) <= tolerance(model)
