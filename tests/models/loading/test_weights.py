"""Weights from files: the same numbers as the libraries load, in memory that processes share."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import diffusers
import pytest
import torch
from helpers.names import FAMILIES
from torch import nn

from instgenie.models.families import PIPELINES
from instgenie.models.loading import fill as fill_module
from instgenie.models.loading.load import load

SHARING = """
import re, sys
from pathlib import Path
from instgenie.models.loading.load import load

folder, *kinds = sys.argv[1:]
model = load(folder, "cpu", weights=frozenset(kinds))
model.digest  # reads every weight
print("loaded", flush=True)
sys.stdin.readline()  # until all have loaded
counts, part = {}, None
for line in Path("/proc/self/smaps").read_text().splitlines():
    if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
        part = Path(line.split()[-1]).parent.name if line.endswith(".safetensors") else None
    elif part and (found := re.match(r"(Shared|Private|Anonymous)(_Clean|_Dirty)?: +([0-9]+) kB", line)):
        name = f"{part} {found[1]}"
        counts[name] = counts.get(name, 0) + 1024 * int(found[3])
print(json.dumps(counts), flush=True)
sys.stdin.readline()  # until all have told
""".replace("import re", "import json, re", 1)


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
    """The processes of two workers on one machine: weights that several of them have are in memory once, no process has
    changed a page, and none maps a part that it does not need."""
    roles = {"prepare": ("vae", "text_encoder"), "denoise": ("network",), "finish": ("vae",), "another": ("network",)}
    sizes = {
        part: sum(path.stat().st_size for path in (folders["fill"] / part).glob("*.safetensors"))
        for part in ("transformer", "vae")
    }
    with ExitStack() as stack:
        processes = {}
        for role, kinds in roles.items():
            command = [sys.executable, "-c", SHARING, str(folders["fill"]), *kinds]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
            processes[role] = stack.enter_context(process)
            stack.callback(process.kill)
        told = {}
        for expected in ("loaded", None):
            for role, process in processes.items():
                assert process.stdin
                assert process.stdout
                line = process.stdout.readline()
                assert expected in (None, line.strip())
                told[role] = line
            for process in processes.values():
                assert process.stdin
                process.stdin.write("\n")
    pages = {role: json.loads(line) for role, line in told.items()}
    for found in pages.values():
        assert not any(size for name, size in found.items() if name.endswith("Anonymous"))  # copies of changed pages
    for role, part in (("denoise", "transformer"), ("another", "transformer"), ("finish", "vae"), ("prepare", "vae")):
        assert pages[role][f"{part} Shared"] > 0.9 * sizes[part]
        assert pages[role][f"{part} Private"] == 0
    mapped = {role: {name.split()[0] for name, size in found.items() if size} for role, found in pages.items()}
    assert mapped["denoise"] == {"transformer"}
    assert mapped["finish"] == {"vae", "transformer"}  # which has a layer that embeds prompts
    assert pages["finish"]["transformer Shared"] < 0.5 * sizes["transformer"]  # the system maps neighbours, too
