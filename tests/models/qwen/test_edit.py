"""Qwen-Image-Edit: the network sees the picture, and a language model reads it with the instruction.

The stock pipelines work at a size of their own, so they are told that of the edit. They get transformers' own
processor, with its picture processor that needs no torchvision.
"""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImageEditPipeline
from diffusers.pipelines.qwenimage import (
    pipeline_qwenimage_edit,
    pipeline_qwenimage_edit_inpaint,
    pipeline_qwenimage_edit_plus,
)
from helpers.cached import KINDS, feasible, predict, register_for
from helpers.edits import apart, close, far, make_edit, quiet_pipeline, run, stock_arguments
from helpers.loras import applied, merged, save_lora, tolerance
from helpers.qwen import several_pictures
from PIL import Image
from torch import Tensor
from transformers import Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from instgenie.bench.stock import stock_pipeline, stock_system
from instgenie.engine.demand import make_demand
from instgenie.engine.graphs import Graphs
from instgenie.engine.loop import Engine
from instgenie.engine.own import OwnActivations, reuse_own
from instgenie.engine.prepare import Encodings, draw_noise, prepare
from instgenie.engine.pricing import job_shape
from instgenie.engine.register import make_key, reuse
from instgenie.errors import EditError, ModelError
from instgenie.jobs.activations import Kind
from instgenie.jobs.job import Job
from instgenie.models.families import FAMILIES
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.models.qwen.model import MOST_READ, QwenEditModel, QwenEditPlusModel
from instgenie.models.qwen.vision import PictureReader, VisionProcessor
from instgenie.types import Edit, Pixels
from instgenie.workers.frames import job_frames, read_job


@pytest.fixture
def model(models: dict[str, Model]) -> QwenEditModel:
    return models["qwen_edit"]


class PilProcessor(Qwen2VLProcessor):
    """transformers' processor; it would look for a processor of films, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> type:
        return type(argument)


def stock_processor(model: QwenEditModel) -> PilProcessor:
    reader = model.processor
    size = {"shortest_edge": reader.min_pixels, "longest_edge": reader.max_pixels}
    return PilProcessor(Qwen2VLImageProcessorPil(patch_size=reader.patch, size=size), model.tokenizer, None)


def noise_of(edit: Edit, model: QwenEditModel) -> Tensor:  # [1, tokens, channels]
    height, width = edit.picture.shape[:2]
    return draw_noise(edit.seed, (height // model.patch, width // model.patch), model)[None].to(model.dtype)


def work_at_own_size(module: ModuleType, edit: Edit, monkeypatch: pytest.MonkeyPatch) -> None:
    height, width = edit.picture.shape[:2]
    monkeypatch.setattr(module, "calculate_dimensions", lambda *_: (width, height, None))


def guided(edit: Edit) -> dict[str, Any]:
    return {"true_cfg_scale": edit.guidance, "negative_prompt": edit.negative_prompt, "guidance_scale": None}


@torch.no_grad()
def stock_latents(model: QwenEditModel, edit: Edit, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """It draws its latents from the autoencoder's distribution and takes no noise: it is given both."""
    pipeline = quiet_pipeline(model)
    pipeline.register_modules(processor=stock_processor(model))
    work_at_own_size(pipeline_qwenimage_edit_inpaint, edit, monkeypatch)
    noise, clean = noise_of(edit, model), prepare(edit, model).template.clean[None].to(model.dtype)
    monkeypatch.setattr(pipeline, "prepare_latents", lambda *_: (noise, noise, clean))
    return pipeline(**stock_arguments(edit) | guided(edit)).images[0].float()


@torch.no_grad()
def stock_latents_without_mask(model: QwenEditModel, edit: Edit, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    pipeline = stock_pipeline(model, QwenImageEditPipeline.__name__)
    pipeline.register_modules(processor=stock_processor(model))
    pipeline.set_progress_bar_config(disable=True)
    work_at_own_size(pipeline_qwenimage_edit, edit, monkeypatch)
    given = {name: one for name, one in stock_arguments(edit).items() if name not in ("mask_image", "strength")}
    return pipeline(**given | guided(edit), latents=noise_of(edit, model)).images[0].float()


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_law_1_full_mask_is_the_stock_pipeline(
    model: QwenEditModel, guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit = make_edit(share=1.0, seed=7, guidance=guidance, negative_prompt="nothing blue")
    [latents] = run(model, [edit])
    assert apart(latents, stock_latents(model, edit, monkeypatch)) <= close(model)
    assert latents.std() > 0.1
    for other in (replace(edit, prompt="a blue dog"), replace(edit, picture=edit.picture[::-1].copy())):
        assert apart(latents, stock_latents(model, other, monkeypatch)) > far(model)


def test_law_1_without_a_mask_it_is_the_stock_pipeline_for_whole_pictures(
    model: QwenEditModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit = make_edit(share=1.0, size=(48, 32), seed=7, guidance=2.5, negative_prompt="sky")
    [latents] = run(model, [edit])
    assert apart(latents, stock_latents_without_mask(model, edit, monkeypatch)) <= close(model)


@pytest.mark.parametrize("size", [(28, 28), (20, 300), (97, 61), (512, 384)])
def test_pictures_are_read_as_transformers_reads_them(size: tuple[int, int]) -> None:
    picture = np.random.default_rng(3).integers(0, 256, (*size, 3), dtype=np.uint8)
    for pixels in ((3136, 12845056), (3136, 50_000)):
        edges = dict(zip(("shortest_edge", "longest_edge"), pixels, strict=True))
        truth = Qwen2VLImageProcessorPil(size=edges)(Image.fromarray(picture), return_tensors="pt")
        reader = PictureReader(*pixels)
        patches, grid = reader.read(picture)
        assert truth["image_grid_thw"].tolist() == [[1, *grid]]
        assert len(patches) // 4 == reader.num_words(*size)
        torch.testing.assert_close(patches, truth["pixel_values"], rtol=0, atol=1e-6)


def test_prompts_are_read_as_transformers_reads_them(model: QwenEditModel) -> None:
    pictures = [Image.fromarray(make_edit(size=size).picture) for size in ((32, 48), (48, 32))]
    given = {"text": ["a <|image_pad|> cat", "<|image_pad|> red dog on"], "images": pictures, "padding": True}
    truth = stock_processor(model)(**given, return_tensors="pt")
    found = VisionProcessor(model.tokenizer, model.processor)(**given)
    for name in ("input_ids", "attention_mask", "image_grid_thw"):
        assert torch.equal(found[name], truth[name])
    torch.testing.assert_close(found["pixel_values"], truth["pixel_values"], rtol=0, atol=1e-6)


def test_facts_come_last_and_are_the_same_for_every_prompt(model: QwenEditModel) -> None:
    prompts = "a red cat on grass", "a"
    [first], [second] = (prepare(make_edit(prompt, guidance=1.0), model).branches for prompt in prompts)
    num = first.num_facts
    assert num == second.num_facts == model.num_facts([(8, 12)])
    assert len(first.text) == len(second.text) + 4
    assert apart(first.text[-num:], second.text[-num:]) <= close(model)
    assert torch.equal(first.rotary[-num - 192 :], second.rotary[-num - 192 :])
    [other] = prepare(make_edit(picture_seed=2, guidance=1.0), model).branches
    assert apart(first.text[-num:], other.text[-num:]) > far(model)


@torch.no_grad()
@pytest.mark.parametrize("share", [0.4, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_law_3_facts_and_the_reference_are_read(model: QwenEditModel, kind: Kind, share: float) -> None:
    edit = make_edit(prompt="", share=share, guidance=1.0)
    job = prepare(edit, model)
    job = replace(job, step=1, latents=job.template.at(1, job.schedule))
    activations = register_for(model, edit, kind)
    assert activations.num_text == job.tokens.num_facts
    assert activations.rows[0].shape[3] == job.tokens.num_facts + 2 * len(job.masked)
    [expected] = predict(model, job)
    for plan in feasible(kind, model.run_lengths):
        cached = reuse(job, activations, plan)
        [text] = model.pack([replace(cached, plan=(True,) * sum(model.run_lengths))]).layout.num_text
        assert text == len(job.branches[0].text) - job.tokens.num_facts
        assert apart(*predict(model, cached), expected) <= close(model), plan
    for part in (slice(job.tokens.num_facts), slice(job.tokens.num_facts, None)):
        spoiled = [rows.clone() for rows in activations.rows]
        for rows in spoiled:
            rows[:, :, :, part] = rows[:, :, :, part].flip(-1)
        assert apart(*predict(model, reuse(job, replace(activations, rows=tuple(spoiled)))), expected) > far(model, 10)


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_law_own_rows_are_those_of_the_dense_step(model: QwenEditModel, kind: Kind, share: float, clean: bool) -> None:
    """Both branches, of different lengths, keep their facts."""
    model = several_pictures(model, clean) if clean else model
    engine = Engine(model)
    engine.own = OwnActivations(model, kind)
    edit = make_edit(share=share, own_steps=(0,), guidance=4.0, negative_prompt="a blue dog on grass")
    engine.join(job := reuse_own(prepare(edit, model)))
    start = job.latents
    engine.step()
    assert job.own_steps is not None
    assert job.activations is not None
    assert job.activations.num_text == job.tokens.num_facts
    later = replace(job.own_steps, steps=(job.num_steps - 1,))
    again = replace(job, step=0, latents=start, own_steps=later, kept_step=0)
    dense = replace(again, activations=None, plan=(), own_steps=None)
    with torch.no_grad():
        assert max(map(apart, predict(model, again), predict(model, dense))) <= close(model)


def test_prompts_are_remembered_by_picture_and_instruction(
    model: QwenEditModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    whole = QwenEditModel.read_instruction

    def note(self: QwenEditModel, prompt: str, pictures: list[Pixels]) -> tuple[Tensor, int]:
        read.append(prompt)
        return whole(self, prompt, pictures)

    monkeypatch.setattr(QwenEditModel, "read_instruction", note)
    encodings = Encodings()
    edits = [make_edit("a"), make_edit("a", seed=2), make_edit("red"), make_edit("a", picture_seed=1), make_edit("a")]
    for edit in edits:
        prepare(replace(edit, guidance=1.0), model, encodings)
    assert read == ["a", "red", "a"]


def test_a_job_travels_with_its_facts(model: QwenEditModel) -> None:
    job = prepare(make_edit(), model)
    read = read_job(*job_frames(job), model.device)
    assert read.tokens.num_facts == job.tokens.num_facts > 0
    assert torch.equal(*run(model, [read]), *run(model, [job]))


def test_prices_count_what_is_computed_of_the_text(model: QwenEditModel) -> None:
    edit = make_edit(guidance=1.0)
    job = reuse(prepare(edit, model), register_for(model, edit, "kv"))
    demand = make_demand(job, model.describe())
    assert demand.num_padding == job.tokens.num_facts
    assert demand.num_flowing_text(cached=True) == len(job.branches[0].text) - job.tokens.num_facts
    shape = job_shape(model, 4)
    assert shape.num_text - shape.num_prompt == model.num_facts([(256, 256)])


def test_a_word_of_a_picture_in_a_prompt_is_no_picture(model: QwenEditModel) -> None:
    """Nor is one that appears when another is taken out."""
    plain, *others = (
        prepare(make_edit(said), model).branches[0]
        for said in ("a cat", "a <|image_pad|>cat", "a <|image_<|image_pad|>pad|>cat")
    )
    assert all(torch.equal(plain.text, other.text) for other in others)


def test_long_prompts_are_cut(model: QwenEditModel) -> None:
    """There are positions for so many tokens only."""
    branch = prepare(make_edit("a cat " * 3000), model).branches[0]
    assert len(branch.text) - branch.num_facts == MOST_READ
    assert len(branch.rotary) == len(branch.text) + 2 * len(prepare(make_edit(), model).masked)


def test_large_pictures_have_no_more_words_than_those_of_the_own_size(model: QwenEditModel) -> None:
    assert model.read_size((256, 256)) == (1024, 1024)
    assert model.read_size((1024, 256)) == (2048, 512)


@pytest.fixture(params=[False, True], ids=["noisy", "clean"])
def plus(request: pytest.FixtureRequest, model: QwenEditModel) -> QwenEditPlusModel:
    """As published in 2509, and as in 2511: references are modulated as at time 0."""
    return several_pictures(model, clean=request.param)


@torch.no_grad()
def test_law_1_several_pictures_are_those_of_the_stock_pipeline(
    plus: QwenEditPlusModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither side resizes the reference, which has another shape and as many pixels."""
    reference = make_edit(size=(48, 32), picture_seed=4).picture
    edit = make_edit(share=1.0, seed=7, guidance=2.5, references=(reference,))
    [latents] = run(plus, [edit])
    pipeline = quiet_pipeline(plus)
    pipeline.register_modules(processor=stock_processor(plus))
    own_size = pipeline_qwenimage_edit_plus.calculate_dimensions

    def by_area(area: int, ratio: float) -> tuple[int, int]:
        is_read = area == pipeline_qwenimage_edit_plus.CONDITION_IMAGE_SIZE
        return own_size(area, ratio) if is_read else (round((1536 * ratio) ** 0.5), round((1536 / ratio) ** 0.5))

    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "calculate_dimensions", by_area)
    given = {name: one for name, one in stock_arguments(edit).items() if name not in ("mask_image", "strength")}
    pictures = [Image.fromarray(picture) for picture in (edit.picture, reference)]
    stock, other = (
        pipeline(**given | {"image": order} | guided(edit), latents=noise_of(edit, plus)).images[0].float()
        for order in (pictures, pictures[::-1])
    )
    assert apart(latents, stock) <= close(plus)
    assert apart(latents, other) > far(plus)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_law_3_several_pictures_are_read(plus: QwenEditPlusModel, kind: Kind) -> None:
    references = (make_edit(size=(48, 32), picture_seed=4).picture,)
    edit = make_edit(prompt="", guidance=1.0, references=references)
    job = prepare(edit, plus)
    job = replace(job, step=1, latents=job.template.at(1, job.schedule))
    activations = register_for(plus, edit, kind, references=references)
    assert len(activations.rows[0][0, 0, 0]) == job.tokens.num_facts + 3 * len(job.masked)
    [expected] = predict(plus, job)
    for plan in feasible(kind, plus.run_lengths):
        assert apart(*predict(plus, reuse(job, activations, plan)), expected) <= close(plus), plan


@torch.no_grad()
def test_law_1_clean_references_are_modulated_as_at_time_0(model: QwenEditModel) -> None:
    """By one call of diffusers' network, beside another job; without, the prediction is another."""
    noisy, clean = several_pictures(model), several_pictures(model, clean=True)
    jobs = [prepare(make_edit(seed=seed, guidance=guidance), clean) for seed, guidance in ((1, 1.0), (2, 4.0))]
    (_, [found, _]), [other] = clean.predict(jobs), noisy.predict(jobs)[0]
    job, branch = jobs[1], jobs[1].branches[0]
    assert job.reference is not None
    ordered = torch.cat([branch.text[-branch.num_facts :], branch.text[: -branch.num_facts]])
    network = copy.copy(clean.transformer)
    network._modules = network._modules | {"txt_norm": torch.nn.Identity(), "txt_in": torch.nn.Identity()}
    [truth] = network(
        hidden_states=torch.cat([job.latents, job.reference])[None].to(clean.dtype),
        encoder_hidden_states=ordered[None],
        timestep=job.timestep[None],
        img_shapes=[[(1, *job.grid)] * 2],
    ).sample
    assert apart(found, truth[: len(found)]) <= close(clean)
    assert apart(other, clean.predict(jobs)[0][0]) > far(clean)


@pytest.mark.parametrize("kind", KINDS)
def test_law_lora_with_clean_references_is_the_merged_model(model: QwenEditModel, tmp_path: Path, kind: Kind) -> None:
    """LoRAs for all layers, those of the time and of modulation among them, on rows that are computed and on kept
    ones."""
    clean = several_pictures(model, clean=True)
    names = [name for name in clean.layer_table.shapes["network"] if not FAMILIES["qwen"].is_of_prompts(name)]
    lora = save_lora(tmp_path / "lora.safetensors", clean, names), 0.7
    job = reuse_own(prepare(make_edit(steps=3, own_steps=(0,), negative_prompt="sky"), clean))
    found, expected, without = (
        run_own(one, replace(job, loras=loras), kind)
        for one, loras in ((clean, applied(clean, lora)), (merged(clean, lora), None), (clean, None))
    )
    assert apart(found, expected) <= tolerance(clean)
    assert apart(found, without) > far(clean)


@pytest.mark.parametrize("kind", KINDS)
def test_law_own_captured_with_clean_references_is_uncaptured(model: QwenEditModel, kind: Kind) -> None:
    """On a CPU the passes that would be captured run uncaptured."""
    clean = several_pictures(model, clean=True)
    job = reuse_own(prepare(make_edit(steps=5, own_steps=(0, 3)), clean))
    captured, uncaptured = (run_own(clean, replace(job), kind, graphs) for graphs in (Graphs(clean), None))
    assert apart(captured, uncaptured) <= close(clean)


def run_own(model: Model, job: Job, kind: Kind, graphs: Graphs | None = None) -> Tensor:
    engine = Engine(model, graphs=graphs)
    engine.own = OwnActivations(model, kind)
    engine.join(job)
    while engine.jobs:
        engine.step()
    return job.latents


def test_diffusers_runs_one_picture_after_the_other(model: QwenEditModel, monkeypatch: pytest.MonkeyPatch) -> None:
    edits = [make_edit(steps=2, seed=seed, guidance=1.0) for seed in (1, 2)]
    seen: list[int] = []
    hook = model.transformer.register_forward_pre_hook(
        lambda _, given, options: seen.append(len(options["hidden_states"])), with_kwargs=True
    )
    work_at_own_size(pipeline_qwenimage_edit_inpaint, edits[0], monkeypatch)
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "calculate_dimensions", lambda *_: (48, 32))
    for one in (model, several_pictures(model)):
        stock_system(one).run(edits)
    hook.remove()
    assert seen == [1] * 8


def test_references_are_refused(model: QwenEditModel) -> None:
    with pytest.raises(EditError, match="1 picture beside the edited one: this model takes none"):
        prepare(make_edit(references=(make_edit(picture_seed=1).picture,)), model)


def test_keys_differ_from_those_of_other_sizes(model: QwenEditModel) -> None:
    keys = [make_key(make_edit(size=size), model, "kv") for size in ((32, 48), (16, 16))]
    assert [key.num_text for key in keys] == [model.num_facts([(8, 12)]), model.num_facts([(4, 4)])]


def test_settings_of_the_processor_are_read_from_both_files(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["qwen_edit"], tmp_path / "model")
    settings = folder / "processor" / "preprocessor_config.json"
    known = json.loads(settings.read_text())
    (folder / "processor" / "processor_config.json").write_text(json.dumps({"image_processor": known}))
    settings.unlink()
    model = load(str(folder), "cpu", weights=frozenset())
    assert model.processor == PictureReader(64, 512, 2)
    shutil.rmtree(folder / "processor")
    (folder / "processor").mkdir()
    with pytest.raises(ModelError, match=r"holds no settings of a processor: preprocessor_config\.json or"):
        load(str(folder), "cpu", weights=frozenset())
