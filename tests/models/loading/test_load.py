"""Loading: facts about valid folders, and a typed error for each kind of damage."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.edits import make_edit
from helpers.names import FAMILIES, FLUX_FAMILIES, UNET_FAMILIES

import instgenie
from instgenie.editor import Editor
from instgenie.engine.finish import finish
from instgenie.engine.loop import Engine
from instgenie.engine.prepare import prepare
from instgenie.errors import InstGenieError, ModelError, OutOfMemoryError
from instgenie.machine.device_memory import memory_guard
from instgenie.models.families import PIPELINES
from instgenie.models.loading import folder as folder_module
from instgenie.models.loading.load import load
from instgenie.models.model import Model


def test_facts(models: dict[str, Model]) -> None:
    facts = {
        name: (model.is_fill, model.patch, model.latent_channels, model.num_text_tokens, model.steps, model.guidance)
        for name, model in models.items()
        if name in FLUX_FAMILIES
    }
    assert facts == {
        "blend": (False, 4, 4, 5, 4, 0.0),
        "blend_guided": (False, 4, 4, 7, 28, 3.5),
        "fill": (True, 8, 5, 6, 50, 30.0),
        "kontext": (False, 4, 4, 6, 28, 3.5),
    }


def test_builtin_facts(models: dict[str, Model]) -> None:
    model = models["builtin"]
    assert model.is_fill
    assert (model.patch, model.own_size) == (16, 256)


def test_auto_is_float32_on_cpu(models: dict[str, Model]) -> None:
    assert models["fill"].dtype == models["fill"].transformer.dtype == torch.float32


def test_dtype_is_honoured(folders: dict[str, Path]) -> None:
    model = load(str(folders["fill"]), device="cpu", dtype="bfloat16")
    assert model.transformer.dtype == model.text_encoder_2.dtype == model.vae.dtype == torch.bfloat16


def test_loading_says_nothing(folders: dict[str, Path], capfd: pytest.CaptureFixture[str]) -> None:
    load(str(folders["fill"]), device="cpu")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "device", "dtype", "says"),
    [
        ("no-such-model", "cpu", "auto", "unknown model 'no-such-model'.*builtin, a pipeline folder or a hub id"),
        ("/no/such/folder", "cpu", "auto", "unknown model"),
        ("", "cpu", "auto", "unknown model|not a pipeline folder"),
        ("builtin", "abacus", "auto", "unknown device 'abacus'.*cpu, cuda"),
        ("builtin", "cuda:x", "auto", "unknown device"),
        ("builtin", "cuda:99", "auto", "does not exist.*CUDA devices"),
        ("builtin", "cpu", "float7", "unknown dtype 'float7'.*float32 or bfloat16"),
    ],
)
def test_bad_names(name: str, device: str, dtype: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        load(name, device, dtype)


def test_the_hub_does_not_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, **_: object) -> str:
        raise OSError(f"{name} is not a valid model identifier\nand much more")

    monkeypatch.setattr(folder_module.diffusers.DiffusionPipeline, "download", refuse)
    with pytest.raises(ModelError, match=r"'owner/name'.*not a valid model identifier"):
        load("owner/name", "cpu")


def edit_index(folder: Path, **changes: object) -> None:
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def only_bin(folder: Path) -> None:
    weights = next((folder / "transformer").glob("*.safetensors"))
    weights.rename(weights.with_suffix(".bin"))


def truncate(folder: Path) -> None:
    weights = next((folder / "vae").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-10])


def scribble(folder: Path) -> None:
    next((folder / "text_encoder").glob("*.safetensors")).write_bytes(b"this is no weights file")


def foreign_weights(folder: Path) -> None:
    (folder / "transformer" / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))


def name_a_missing_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))


def break_the_shards_index(folder: Path) -> None:
    (folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json").write_text("[]")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no index": (lambda folder: (folder / "model_index.json").unlink(), "not a pipeline folder.*model_index.json"),
    "broken index": (lambda folder: (folder / "model_index.json").write_text("{"), "not a pipeline's index"),
    "index is a list": (lambda folder: (folder / "model_index.json").write_text("[]"), "not a pipeline's index"),
    "other pipeline": (lambda f: edit_index(f, _class_name="CogViewPipeline"), "a CogViewPipeline.*FluxFillPipeline"),
    "part missing": (lambda folder: shutil.rmtree(folder / "text_encoder_2"), "lacks text_encoder_2"),
    "part disabled": (lambda f: edit_index(f, text_encoder=[None, None]), "lacks text_encoder:"),
    "bin weights": (only_bin, "no safetensors weights: found diffusion_pytorch_model.bin"),
    "truncated": (truncate, "bytes.* is not a whole safetensors file"),
    "not safetensors": (scribble, "is not a whole safetensors file"),
    "shard missing": (name_a_missing_shard, "lacks model-00001-of-00002.safetensors"),
    "broken shards index": (break_the_shards_index, "not an index of weights files"),
    "broken config": (lambda f: (f / "vae" / "config.json").write_text("{"), "does not load as a FluxFillPipeline"),
    "weights of another shape": (foreign_weights, "does not load as a FluxFillPipeline"),
    "other scheduler": (
        lambda f: edit_index(f, scheduler=["diffusers", "EulerDiscreteScheduler"]),
        "EulerDiscreteScheduler: a FlowMatchEuler",
    ),
}


def test_not_enough_memory(huge_folder: Path) -> None:
    with pytest.raises(OutOfMemoryError, match=r"needs 372\.5 GiB: cpu has \d+\.\d GiB available"):
        load(str(huge_folder), "cpu")


def test_memory_runs_out_midway() -> None:
    with pytest.raises(OutOfMemoryError, match="the edit does not fit into memory"), memory_guard("the edit"):
        torch.empty(2**60)
    with pytest.raises(RuntimeError, match="shape"), memory_guard("the edit"):
        torch.ones(2) @ torch.ones(3, 3)


def test_parameters_are_counted(folders: dict[str, Path], models: dict[str, Model]) -> None:
    for family in FAMILIES:
        model = models[family]
        pipeline = folder_module.check_index(folders[family])
        parts = [getattr(model, part) for part in PIPELINES[pipeline].weights_of(pipeline)]
        values = (value for part in parts for value in part.state_dict().values())  # parameters and tables
        expected = sum(value.numel() for value in values)
        assert folder_module.count_parameters(folders[family], pipeline) == pytest.approx(expected, rel=0.01)


def test_importing_instgenie_imports_no_torch() -> None:
    code = "import sys, instgenie; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert instgenie.Editor is Editor


def test_all_errors_are_one_family() -> None:
    assert issubclass(ModelError, InstGenieError)
    assert issubclass(OutOfMemoryError, InstGenieError)


def test_unet_facts(models: dict[str, Model]) -> None:
    facts = {
        name: (
            model.is_fill,
            model.run_lengths,
            model.own_size,
            model.steps,
            model.guidance,
            type(model.scheduler).__name__,
        )
        for name, model in models.items()
        if name in UNET_FAMILIES
    }
    assert facts == {
        "sd": (False, (1, 1, 1, 1, 1, 1, 1), 32, 50, 7.5, "DDIMScheduler"),
        "sdxl": (False, (2, 2, 2, 2), 32, 50, 7.5, "EulerDiscreteScheduler"),
        "sd_fill": (True, (1, 1, 1, 1), 32, 50, 7.5, "DDIMScheduler"),
    }


def edit_config(part: str, **changes: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        [path] = (folder / part).glob("*config.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


UNET_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "part missing": (lambda folder: shutil.rmtree(folder / "unet"), "lacks unet: a StableDiffusionPipeline has unet"),
    "other scheduler": (
        lambda f: edit_index(f, scheduler=["diffusers", "UniPCMultistepScheduler"]),
        "a UniPCMultistepScheduler: a DDIMScheduler, a EulerDiscreteScheduler or a PNDMScheduler",
    ),
    "predicts pictures": (edit_config("scheduler", prediction_type="sample"), "'sample': epsilon or v_prediction"),
    "thresholds": (edit_config("scheduler", thresholding=True), "clip_sample or thresholding on"),
    "centred input": (edit_config("unet", center_input_sample=True), "center_input_sample=True"),
    "channels": (edit_config("vae", latent_channels=3), "does not load|has 4 channels: 3, or 7"),
}


CASES = [("fill", *case) for case in DAMAGE.values()] + [("sd", *case) for case in UNET_DAMAGE.values()]


@pytest.mark.parametrize(("family", "damage", "says"), CASES, ids=[*DAMAGE, *UNET_DAMAGE])
def test_bad_folders(
    family: str, damage: Callable[[Path], object], says: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders[family], tmp_path / "model")
    damage(folder)
    with pytest.raises(ModelError, match=says):
        load(str(folder), "cpu")


def test_unet_says_nothing_and_honours_dtype(folders: dict[str, Path], capfd: pytest.CaptureFixture[str]) -> None:
    for family in UNET_FAMILIES:
        model = load(str(folders[family]), device="cpu", dtype="bfloat16")
        assert model.network.dtype == model.text_encoder.dtype == model.vae.dtype == torch.bfloat16
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_process_loads_only_the_weights_it_needs(folders: dict[str, Path], family: str) -> None:
    """Three processes with a part of the weights each compute the same edit as one with all."""
    full, edit = load(str(folders[family]), "cpu"), make_edit(true_guidance=2.0, steps=2)
    parts = {
        "prepare": {"vae", "text_encoder"},
        "denoise": {"network"},
        "finish": {"vae"},
    }
    roles = {role: load(str(folders[family]), "cpu", weights=frozenset(names)) for role, names in parts.items()}
    is_of_prompts = PIPELINES[full.stock_pipeline_name].is_of_prompts
    for role in ("prepare", "finish"):
        assert all(one.is_meta != is_of_prompts(name) for name, one in roles[role].network.named_parameters())
    assert next(roles["denoise"].text_encoder.parameters()).is_meta
    job, expected = prepare(edit, roles["prepare"]), prepare(edit, full)
    for one, model in ((job, roles["denoise"]), (expected, full)):
        engine = Engine(model)
        engine.join(one)
        while engine.jobs:
            engine.step()
    assert (finish(job, roles["finish"]) == finish(expected, full)).all()


def test_parts_without_use_are_not_loaded(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["sd"], tmp_path / "model")
    edit_index(folder, safety_checker=["stable_diffusion", "StableDiffusionSafetyChecker"])
    assert not (folder / "safety_checker").exists()
    assert load(str(folder), "cpu").digest == load(str(folders["sd"]), "cpu").digest
