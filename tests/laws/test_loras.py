"""The laws of LoRAs, on every family.

The truth is diffusers' own modules with W + scale * up @ down in the place of each weight, which is what its
`load_lora_weights` computes; PEFT, which diffusers asks for to load LoRAs, is not needed for that.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.cached import KINDS, register_for
from helpers.edits import CLOSE, apart, far, make_edit, prepare, run
from helpers.loras import applied, merged, run_copying, save_lora, tolerance

from instgenie.adapters.applied import AppliedLoras
from instgenie.engine.own import reuse_own
from instgenie.engine.register import observe_span, reuse, template_edit, template_job
from instgenie.jobs.activations import Activations, Kind
from instgenie.jobs.job import Job
from instgenie.models.families import FAMILIES
from instgenie.models.model import Model
from instgenie.types import Edit

GUIDED = {"true_guidance": 2.5, "negative_prompt": "sky"}


def with_loras(job: Job, loras: AppliedLoras | None) -> Job:
    return replace(job, loras=loras)


def register_with(model: Model, edit: Edit, kind: Kind, loras: AppliedLoras) -> Activations:
    """A registration that saw LoRAs."""
    plain = register_for(model, edit, kind)
    job = template_job(template_edit(edit.picture, model, edit.size, edit.steps, edit.guidance), model)
    span = observe_span(with_loras(job, loras), model, plain.key, plain.key.slots)
    return replace(plain, rows=span.rows, time=span.time)


def network_layers(model: Model) -> list[str]:
    """Layers that prompts do not pass before the first step."""
    return [name for name in model.layer_table.shapes["network"] if not FAMILIES[model.family].is_of_prompts(name)]


@pytest.fixture
def files(model: Model, tmp_path: Path) -> list[Path]:
    """LoRAs of different ranks for all layers of the network, convolutions and embeddings among them."""
    names = network_layers(model)
    return [
        save_lora(tmp_path / "one.safetensors", model, names, rank=3, seed=1, alpha=1.5),
        save_lora(tmp_path / "two.safetensors", model, names[::2], rank=1, seed=2),
        save_lora(tmp_path / "three.safetensors", model, names[::3], rank=4, seed=3, alpha=8.0),
    ]


def test_law_lora_is_the_merged_model_of_diffusers(model: Model, files: list[Path]) -> None:
    job = prepare(make_edit(steps=3, **GUIDED), model)
    uses = [(files[0], 0.8), (files[1], -0.5)]
    [found] = run(model, [with_loras(job, applied(model, *uses))])
    [expected], [without] = run(merged(model, *uses), [job]), run(model, [job])
    assert apart(found, expected) <= tolerance(model)
    assert apart(found, without) > far(model)
    copying = run_copying(model, [with_loras(job, applied(model, *uses)), job])
    assert max(map(apart, copying, [expected, without])) <= tolerance(model)
    assert apart(found, run(model, [with_loras(job, applied(model, uses[0]))])[0]) > far(model)


@pytest.mark.parametrize("kind", KINDS)
def test_law_lora_cached_is_the_merged_model(model: Model, files: list[Path], kind: Kind) -> None:
    """Over a registration that saw the LoRAs; rows that are kept as Y are projected with them."""
    edit = make_edit(steps=2, **GUIDED)
    loras, twin = applied(model, (files[0], 0.7)), merged(model, (files[0], 0.7))
    activations = register_with(model, edit, kind, loras)
    [found] = run(model, [with_loras(reuse(prepare(edit, model), activations), loras)])
    [expected] = run(twin, [reuse(prepare(edit, model), register_for(twin, edit, kind))])
    assert apart(found, expected) <= tolerance(model)
    assert apart(found, run(model, [reuse(prepare(edit, model), register_for(model, edit, kind))])[0]) > far(model)


def test_law_lora_own_reuse_is_the_merged_model(model: Model, files: list[Path]) -> None:
    edit = make_edit(steps=3, own_steps=(0, 2), **GUIDED)
    job, loras = reuse_own(prepare(edit, model)), applied(model, (files[0], 0.7))
    [found] = run(model, [with_loras(job, loras)])
    [expected] = run(merged(model, (files[0], 0.7)), [job])
    assert apart(found, expected) <= tolerance(model)


def eight_jobs(model: Model, files: Sequence[Path]) -> list[Job]:
    """Dense, registered and own jobs of several sizes, each with other LoRAs: one, several, and none."""
    uses = [[(files[0], 1.0)], [(files[1], 0.5)], [], [(files[2], 0.7)], [(files[0], -0.3), (files[1], 0.6)]]
    uses += [[(files[0], 0.2)], [(files[2], 0.4), (files[0], 0.1), (files[1], 1.0)], [(files[1], -1.0)]]
    jobs = []
    for seed, own in enumerate(uses):
        size = (64, 32) if seed % 4 == 1 else (32, 48)
        edit = make_edit(steps=2 + seed % 2, share=0.1 + 0.1 * seed, seed=seed, size=size, own_steps=(0,))
        edit = replace(edit, **GUIDED) if seed % 3 == 0 else edit
        job = prepare(edit, model)
        if seed % 3 == 1:
            job = reuse(job, register_for(model, edit, KINDS[seed % 2]))
        elif seed % 3 == 2:
            job = reuse_own(job)
        jobs.append(with_loras(job, applied(model, *own) if own else None))
    return jobs


def test_law_lora_eight_in_a_batch_are_each_alone(model: Model, files: list[Path]) -> None:
    jobs = eight_jobs(model, files)
    alone = [run(model, [job])[0] for job in jobs]
    assert max(map(apart, run(model, jobs), alone)) <= tolerance(model)
    copied = alone
    if model.dtype != torch.float32:  # weights of their own are rounded once more: an edit has them beside one without
        pairs = ([job, jobs[2]] if job.loras else None for job in jobs)
        copied = [run_copying(model, pair)[0] if pair else one for pair, one in zip(pairs, alone, strict=True)]
    assert max(map(apart, run_copying(model, jobs), copied)) <= tolerance(model)
    same_size = [latents for latents in alone if latents.shape == alone[0].shape]
    assert min(itertools.starmap(apart, itertools.combinations(same_size, 2))) > far(model)


def test_law_lora_that_overflows_harms_its_own_edit_alone(model: Model, files: list[Path]) -> None:
    """Others in the batch get the very pictures that they would get beside an honest edit, also where each has weights
    of its own."""
    jobs = [prepare(make_edit(steps=2, seed=seed, **GUIDED), model) for seed in range(3)]
    last, honest, wild = (applied(model, (files[0], scale)) for scale in (0.5, 0.5, 1e30))
    for take in (run, run_copying):
        beside_honest, beside_wild = (
            take(model, [jobs[0], with_loras(jobs[1], middle), with_loras(jobs[2], last)]) for middle in (honest, wild)
        )
        assert not beside_wild[1].isfinite().all()
        for one in (0, 2):
            assert torch.equal(beside_wild[one], beside_honest[one])


def test_law_lora_off_again_is_never_on(model: Model, files: list[Path]) -> None:
    """Bit-identical, also for what the model caches from step to step."""
    job = prepare(make_edit(steps=2, **GUIDED), model)
    [before] = run(model, [job])
    [on] = run(model, [with_loras(job, applied(model, (files[0], 1.0)))])
    copying = run_copying(model, [with_loras(job, applied(model, (files[0], 1.0))), job])
    [off] = run(model, [with_loras(job, None)])
    [nothing] = run(model, [with_loras(job, applied(model, (files[0], 0.0)))])
    assert torch.equal(before, off)
    assert torch.equal(before, nothing)
    assert apart(before, on) > far(model)
    assert max(map(apart, copying, [on, before])) <= tolerance(model)


def test_law_lora_changes_between_steps_are_seen(model: Model, files: list[Path]) -> None:
    """A LoRA that arrives at a step is applied from there on; nothing that was computed without it is read again."""
    job, loras = prepare(make_edit(steps=4, **GUIDED), model), applied(model, (files[0], 1.0))
    first = replace(job, loras=None)
    with torch.inference_mode():
        for _ in range(2):
            first.advance(model.predict([first])[0])
        late = replace(first, loras=loras)
        [expected] = run(merged(model, (files[0], 1.0)), [replace(first, loras=None)])
        first.loras = loras
        while not first.done:
            first.advance(model.predict([first])[0])
    assert apart(first.latents, expected) <= tolerance(model)
    assert apart(run(model, [late])[0], expected) <= tolerance(model)
    assert apart(first.latents, run(model, [with_loras(job, loras)])[0]) > CLOSE
