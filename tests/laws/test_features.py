"""Edits that use different features of a family share one batch, and each is what it would be alone: masked and whole
pictures of several sizes, with guidance and without, with references and without, of no picture, from a template and
dense."""

from dataclasses import replace

import pytest
from helpers.cached import KINDS, make_cached
from helpers.edits import apart, close, far, make_edit, prepare, run
from helpers.names import FAMILIES
from helpers.qwen import several_pictures

from instgenie.jobs.job import Job
from instgenie.models.model import Model

GUIDED = {"steps": 3, "guidance": 2.5, "true_guidance": 2.5, "negative_prompt": "sky"}
PLUS = {"qwen_plus": False, "qwen_plus_clean": True}  # models of several pictures, and whether these are clean


@pytest.fixture(params=[*FAMILIES, *PLUS])
def model(request: pytest.FixtureRequest, models: dict[str, Model]) -> Model:
    name = request.param
    return several_pictures(models["qwen_edit"], PLUS[name]) if name in PLUS else models[name]


def make_jobs(model: Model) -> list[Job]:
    off = next(value for value in (1.0, 0.0) if model.guidance_scale(make_edit(guidance=value)) <= 1)
    plain = {"steps": 2, "guidance": off}
    edits = [
        make_edit(share=0.2, seed=1, **plain),
        make_edit("a blue dog on grass", size=(64, 32), share=0.5, seed=2, **GUIDED),
        make_edit(size=(32, 32), share=1.0, seed=3, **plain),
        make_edit(share=1.0, seed=4, **GUIDED),
    ]
    if model.sees_picture:
        edits.append(replace(edits[3], from_nothing=True))
    others = tuple(make_edit(size=(48, 32), picture_seed=seed).picture for seed in (4, 5))[: model.max_references]
    if others:
        edits += [replace(edits[0], references=others[:1]), replace(edits[1], references=others)]
        edits += [replace(edits[3], references=others)]
    cached = [make_cached(model, edit, kind) for edit, kind in zip(edits, KINDS, strict=False)]
    return [*(prepare(edit, model) for edit in edits), *cached]


def test_law_2_features_share_a_batch(model: Model) -> None:
    jobs = make_jobs(model)
    assert {len(job.branches) for job in jobs} == {1, 2}
    together, alone = run(model, jobs), [run(model, [job])[0] for job in jobs]
    assert max(map(apart, together, alone)) <= close(model)
    for first, job in enumerate(jobs):
        for other in range(first):
            if job.grid == jobs[other].grid:
                assert apart(alone[first], alone[other]) > far(model, 10)
