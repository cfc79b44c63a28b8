"""Weights from files: the same numbers as the libraries load, in memory that processes share."""

import json
import subprocess
import sys
from pathlib import Path

import diffusers
import pytest
import torch
from helpers.edits import make_edit
from helpers.names import FAMILIES
from torch import nn

from instgenie.editor import Editor
from instgenie.engine.lora_shelf import read_uses
from instgenie.engine.merging import can_merge
from instgenie.engine.prepare import prepare
from instgenie.kernels.quantize import quantize_rows_reference
from instgenie.models.families import PIPELINES
from instgenie.models.layers import fp8_linear
from instgenie.models.layers.fp8_linear import Fp8Linear, Fp8Weights
from instgenie.models.layers.linear import as_one
from instgenie.models.loading import fill as fill_module
from instgenie.models.loading import load as load_module
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.types import Quantization

SHARING = """
import json, multiprocessing, re, sys
from pathlib import Path
from instgenie.models.loading.load import load

def tell(role, kinds):
    model = load(folder, "cpu", weights=frozenset(kinds))
    model.digest  # reads every weight
    barrier.wait(60)  # until all have loaded
    counts, part = {}, None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            part = Path(line.split()[-1]).parent.name if line.endswith(".safetensors") else None
        elif part and (found := re.match(r"(Shared|Private|Anonymous)(_Clean|_Dirty)?: +([0-9]+) kB", line)):
            name = f"{part} {found[1]}"
            counts[name] = counts.get(name, 0) + 1024 * int(found[3])
    barrier.wait(60)  # until all have counted
    told.put((role, counts))

folder, roles = sys.argv[1], json.loads(sys.argv[2])
fork = multiprocessing.get_context("fork")
barrier, told = fork.Barrier(len(roles)), fork.SimpleQueue()
processes = [fork.Process(target=tell, args=item) for item in roles.items()]
for process in processes:
    process.start()
for process in processes:
    process.join()
print(json.dumps(dict(told.get() for process in processes if process.exitcode == 0)))
"""


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and tables, also those that no file has."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_that_the_libraries_load(folders: dict[str, Path], family: str, dtype: str) -> None:
    model = load(str(folders[family]), "cpu", dtype)
    index = json.loads((folders[family] / "model_index.json").read_text())["_class_name"]
    unread = dict.fromkeys(PIPELINES[index].readers.keys() & set(PIPELINES[index].pipelines[index]))
    stock = getattr(diffusers, index).from_pretrained(folders[family], dtype=getattr(torch, dtype), **unread)
    for part in PIPELINES[index].weights_of(index):
        found, expected = tensors_of(getattr(model, part)), tensors_of(stock.components[part])
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype, name
            assert found[name].equal(tensor), name
        assert not getattr(model, part).training


def test_pieces_of_any_size_are_the_same_weights(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load(str(folders["sdxl"]), "cpu", "bfloat16")
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(fill_module, "PIECE_BYTES", 1000)
    pieced = load(str(folders["sdxl"]), "cpu", "bfloat16", on_bytes=lambda done, total: told.append((done, total)))
    assert whole.digest == pieced.digest
    assert len(told) > 100
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]


def test_tied_weights_stay_one(folders: dict[str, Path]) -> None:
    encoder = load(str(folders["fill"]), "cpu").text_encoder_2
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight


def test_weights_of_the_files_dtype_are_the_mapped_files(folders: dict[str, Path]) -> None:
    network = load(str(folders["fill"]), "cpu").network
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [
        line.split()[0].split("-")
        for line in maps
        if line.endswith(f"{folders['fill'].name}/transformer/diffusion_pytorch_model.safetensors")
    ]
    for parameter in network.parameters():
        assert any(int(first, 16) <= parameter.data_ptr() < int(end, 16) for first, end in ranges)


def test_processes_share_the_pages_of_weights(folders: dict[str, Path]) -> None:
    """The processes of two workers on one machine, forked before they load anything: weights that several of them have
    are in memory once, no process has changed a page, and none maps a part that it does not need."""
    roles = {"prepare": ("vae", "text_encoder"), "denoise": ("network",), "finish": ("vae",), "another": ("network",)}
    sizes = {
        part: sum(path.stat().st_size for path in (folders["fill"] / part).glob("*.safetensors"))
        for part in ("transformer", "vae")
    }
    command = [sys.executable, "-c", SHARING, str(folders["fill"]), json.dumps(roles)]
    pages = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert pages.keys() == roles.keys()
    for found in pages.values():
        assert not any(size for name, size in found.items() if name.endswith("Anonymous"))  # copies of changed pages
    for role, part in (("denoise", "transformer"), ("another", "transformer"), ("finish", "vae"), ("prepare", "vae")):
        assert pages[role][f"{part} Shared"] > 0.9 * sizes[part]
        assert pages[role][f"{part} Private"] == 0
    mapped = {role: {name.split()[0] for name, size in found.items() if size} for role, found in pages.items()}
    assert mapped["denoise"] == {"transformer"}
    assert mapped["finish"] == {"vae", "transformer"}  # which has a layer that embeds prompts
    assert pages["finish"]["transformer Shared"] < 0.5 * sizes["transformer"]  # the system maps neighbours, too


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_joined_layers_are_filled_at_their_places(
    folders: dict[str, Path], quantization: Quantization | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: weights come to one place for all layers, and there is no memory beside it."""
    options = {"dtype": "bfloat16", "quantization": quantization, "emulates": True}
    apart = load(str(folders["blend"]), "cpu", **options).network
    monkeypatch.setattr(load_module, "join_layers", lambda network, family, _: family.join_layers(network))
    joined = load(str(folders["blend"]), "cpu", **options).network
    for name, tensor in tensors_of(apart).items():
        assert tensors_of(joined)[name].equal(tensor), name
    weights = [[layer.weight for layer in qkv_of(network)] for network in (apart, joined)]
    assert [as_one(three) is None for three in weights] == [True, False]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in joined.parameters()}
    assert sum(storages.values()) == sum(one.nbytes for one in joined.parameters())


def qkv_of(network: nn.Module) -> list[nn.Module]:
    return [network.get_submodule(f"transformer_blocks.0.attn.{name}") for name in ("to_q", "to_k", "to_v")]


@pytest.mark.gpu
def test_a_gpu_reserves_little_more_than_the_weights() -> None:
    """While they come. Layers that were joined later would be there twice."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    network = load("dummy:z-image-turbo", "cuda", "bfloat16", weights=frozenset({"network"})).network
    num_bytes = sum(parameter.nbytes for parameter in network.parameters())
    assert torch.cuda.max_memory_reserved() - before < 1.1 * num_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["fill", "sdxl", "qwen"])
def test_weights_on_a_gpu_are_those_of_the_files(
    folders: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill_module, "PIECE_BYTES", 4096)  # every buffer is used many times
    for dtype in ("float32", "bfloat16"):  # as in the files, and not
        found, expected = (load(str(folders[family]), device, dtype) for device in ("cuda", "cpu"))
        for part in PIPELINES[found.stock_pipeline_name].weights_of(found.stock_pipeline_name):
            for name, tensor in tensors_of(getattr(expected, part)).items():
                assert tensors_of(getattr(found, part))[name].cpu().equal(tensor), name


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_linear, "MIN_VALUES", 1)


def low_layers(module: nn.Module) -> dict[str, Fp8Weights]:
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, Fp8Weights)}


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize("piece_bytes", [2**24, 2000])
def test_weights_are_loaded_as_fp8(folders: dict[str, Path], piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is what the whole weight becomes, whatever the pieces; a CPU multiplies no row in eight bits."""
    monkeypatch.setattr(fill_module, "PIECE_BYTES", piece_bytes)
    whole, low = (load(str(folders["fill"]), "cpu", weights_dtype=dtype) for dtype in (None, "fp8"))
    for part in ("transformer", "text_encoder", "text_encoder_2"):
        layers = low_layers(getattr(low, part))
        assert layers
        for name, layer in layers.items():
            assert not isinstance(layer, Fp8Linear)
            expected = quantize_rows_reference(getattr(whole, part).get_submodule(name).weight)
            assert layer.weight.equal(expected.values.view(torch.int8))
            assert layer.scale.equal(expected.scale[:, 0])
    assert not low_layers(low.vae)
    left = [name for name, layer in low.network.named_modules() if type(layer) is nn.Linear and fp8_linear.suits(layer)]
    assert all(PIPELINES["FluxFillPipeline"].is_of_prompts(name) for name in left)
    tied = load(str(folders["klein"]), "cpu", weights_dtype="fp8").text_encoder
    assert tied.get_input_embeddings().weight.dtype == torch.float32


@torch.inference_mode()
@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize("family", ["fill", "sdxl", "qwen", "zimage"])
def test_a_step_with_fp8_weights_is_close(folders: dict[str, Path], models: dict[str, Model], family: str) -> None:
    """Within the bound of products of low precision, with prompts that encoders with such weights have read."""
    whole, low = models[family], load(str(folders[family]), "cpu", weights_dtype="fp8")
    assert low.digest != whole.digest
    edit = make_edit(size=(64, 64), steps=2, share=0.3, true_guidance=2.0)
    exact, found = (model.predict([prepare(edit, model)])[0][0] for model in (whole, low))
    assert 0 < (found - exact).norm() / exact.norm() < 0.12


@torch.no_grad()
@pytest.mark.usefixtures("all_are_large")
def test_a_lora_patches_fp8_weights() -> None:
    """It is added to the product of the layer, as everywhere. It is never merged, since e4m3 would lose it."""
    editors = [Editor("builtin", "cpu", weights_dtype=dtype) for dtype in (None, "fp8")]
    edit = make_edit(size=(64, 64), steps=2)
    found = []
    for editor in editors:
        for loras in ((), (("pencil", 1.0),)):
            applied = editor.loras.apply(read_uses(loras)) if loras else None
            job = prepare(edit, editor.model)
            job.loras = applied
            found.append(editor.model.predict([job])[0][0])
            assert applied is None or can_merge(applied) == (editor is editors[0])
    whole, whole_lora, low, low_lora = found
    change = whole_lora - whole
    assert ((low_lora - low) - change).norm() < 0.25 * change.norm()
