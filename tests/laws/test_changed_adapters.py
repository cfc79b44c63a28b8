"""The laws of blocks that choose what they compute, for jobs with LoRAs and ControlNets."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.changed import blocks_of, check_equal_inputs, lax, run_changed, sure, whole
from helpers.controlnets import controlled, save_controlnet
from helpers.edits import apart, far, prepare
from helpers.loras import applied, save_lora, tolerance

from instgenie.jobs.job import Job
from instgenie.models.families import FAMILIES
from instgenie.models.model import Model


def with_lora(model: Model, folder: Path, **fields: Any) -> Job:
    """A LoRA patches all layers of the network, convolutions among them."""
    of_prompts = FAMILIES[model.family].is_of_prompts
    layers = [name for name in model.layer_table.shapes["network"] if not of_prompts(name)]
    path = save_lora(folder / "one.safetensors", model, layers, seed=1)
    return replace(prepare(whole(**fields), model), loras=applied(model, (path, 0.7)))


def with_controlnet(model: Model, folder: Path, **fields: Any) -> Job:
    return prepare(controlled(whole(**fields), (save_controlnet(folder / "net", model), {"scale": 0.8})), model)


def test_law_blocks_with_loras_over_equal_inputs_are_dense(model: Model, tmp_path: Path) -> None:
    check_equal_inputs(model, with_lora(model, tmp_path, steps=5, true_guidance=2.0))


def test_law_blocks_with_controlnets_over_equal_inputs_are_dense(model: Model, tmp_path: Path) -> None:
    if model.family not in ("flux", "unet"):
        pytest.skip("the family has no ControlNets")
    check_equal_inputs(model, with_controlnet(model, tmp_path, steps=5, true_guidance=2.0))


@pytest.mark.parametrize("name", ["blend", "sdxl"])
def test_law_blocks_with_adapters_in_a_batch_are_alone(name: str, models: dict[str, Model], tmp_path: Path) -> None:
    model = models[name]
    jobs = [prepare(whole(steps=5, seed=1), model), with_lora(model, tmp_path, steps=5, seed=1)]
    jobs += [with_controlnet(model, tmp_path, steps=5, seed=1, true_guidance=2.0)]
    jobs += [with_lora(model, tmp_path, steps=3, reuse="off")]
    way = blocks_of(model)
    # in bfloat16 rounding turns choices near their threshold, so a batch would choose other tokens than a job alone
    predictor, threshold = (lax(model, way), 0.5) if model.dtype == torch.float32 else (sure(way), 0.6)
    together = run_changed(model, jobs, predictor, threshold)
    alone = [run_changed(model, [job], predictor, threshold)[0].latents for job in jobs]
    assert max(apart(job.latents, latents) for job, latents in zip(together, alone, strict=True)) <= tolerance(model)
    assert min(apart(alone[0], alone[1]), apart(alone[0], alone[2])) > far(model)
    assert all(job.num_taken_tokens < 5 * len(job.masked) for job in together[:3])
