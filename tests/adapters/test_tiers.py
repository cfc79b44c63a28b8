"""LoRAs in memory: loaded in threads, the least recently used dropped, those in use kept; and the names of files."""

import os
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from helpers.loras import draw_pairs, load_lora, save_lora
from safetensors.torch import load_file, save_file

from instgenie.adapters import plan
from instgenie.adapters import tiers as tiers_module
from instgenie.adapters.applied import PatchableLayers, apply_loras
from instgenie.adapters.fitting import Fitted, fit
from instgenie.adapters.header import WeightsHeader
from instgenie.adapters.keys import NETWORK
from instgenie.adapters.lora import Lora
from instgenie.adapters.registry import LoraRegistry
from instgenie.adapters.tiers import LoraTiers
from instgenie.engine.adapting import make_tiers
from instgenie.errors import LoraError, LoraNotFoundError
from instgenie.models.model import Model
from instgenie.types import LoraUse

LAYERS = ["down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"]


@pytest.fixture
def sd(models: dict[str, Model]) -> Model:
    return models["sd"]


@pytest.fixture
def folder(sd: Model, tmp_path: Path) -> Path:
    found = tmp_path / "loras"
    found.mkdir()
    for seed, name in enumerate("abcd"):
        save_lora(found / f"{name}.safetensors", sd, LAYERS, seed=seed, rank=4)
    return found


def tiers_for(model: Model, num_loras: int) -> LoraTiers:
    """Room for so many LoRAs of these: 16 inputs and outputs, of rank 4, in float32."""
    return make_tiers(model, num_loras * 2 * 16 * 4 * 4, 0)


def uses(folder: Path, names: str) -> list[LoraUse]:
    registry = LoraRegistry(folder=str(folder))
    return [registry.resolve([LoraUse(name, 0.5)], "")[0] for name in names]


def test_loras_of_any_scale_find_their_tensors_where_they_are_loaded(sd: Model, folder: Path) -> None:
    """The step loop, which binds them, looks for none of them again."""
    [(lora, scale)] = tiers_for(sd, 1).fetch(uses(folder, "a")).result()
    [loaded] = lora.layers.values()
    assert scale != 1
    [[scaled]] = apply_loras(PatchableLayers({NETWORK: sd.network}), [(lora, scale)]).layers.values()
    assert scaled.scale == scale * loaded.scale
    assert vars(scaled)["entry"] is loaded.entry


def test_the_least_recently_used_goes_first_and_those_in_use_stay(sd: Model, folder: Path) -> None:
    tiers = tiers_for(sd, 2)
    a, b, c, d = uses(folder, "abcd")
    first, second = tiers.fetch([a]), tiers.fetch([b])
    assert (first.tier, second.tier) == ("disk", "disk")
    [(lora, scale)] = first.result()
    assert scale == 0.5
    assert len(second.result()) == 1
    tiers.release(first)
    tiers.release(second)
    again = tiers.fetch([a])
    assert again.tier == "host"
    assert again.is_done
    assert again.result()[0][0] is lora  # nothing is read again
    third = tiers.fetch([c])
    third.result()
    assert tiers.versions() == (a.version, c.version)  # b was used least recently
    fourth = tiers.fetch([d, c])
    fourth.result()
    assert set(tiers.versions()) == {a.version, c.version, d.version}  # all are in use, though there is room for two
    assert tiers.num_bytes() == {"host": 3 * 512, "gpu": 0}
    tiers.release(third)
    tiers.release(fourth)
    tiers.release(again)
    assert tiers.num_bytes()["host"] == 2 * 512
    assert not tiers.pins
    assert [tier for tier, _, _ in tiers.loaded_seconds] == ["disk"] * 4


def test_edits_of_one_lora_share_a_load(sd: Model, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers, go = tiers_for(sd, 4), Event()
    read, num_reads = tiers._read, []

    def slow(path: Path) -> object:
        num_reads.append(path)
        assert go.wait(60)
        return read(path)

    monkeypatch.setattr(tiers, "_read", slow)
    [a] = uses(folder, "a")
    fetches = [tiers.fetch([a]) for _ in range(3)]
    assert not any(fetch.is_done for fetch in fetches)
    go.set()
    tiers.warm([a])  # an announcement joins the load, too
    found = {id(fetch.result()[0][0]) for fetch in fetches}
    assert (len(found), len(num_reads)) == (1, 1)


def test_a_lora_that_cannot_be_read_fails_its_edits_and_is_tried_again(sd: Model, folder: Path) -> None:
    tiers = tiers_for(sd, 4)
    [a] = uses(folder, "a")
    good = Path(a.path).read_bytes()
    Path(a.path).write_bytes(good[:-9])
    with pytest.raises(LoraError, match=r"'a' cannot be used: a\.safetensors is truncated"):
        tiers.fetch([a]).result()
    Path(a.path).write_bytes(good)
    assert tiers.fetch([a]).result()


def test_names_of_the_folder_and_of_tenants(sd: Model, folder: Path) -> None:
    registry = LoraRegistry({"mine": str(folder / "b.safetensors")}, str(folder))
    registry.table = sd.layer_table
    assert [one.name for one in registry.list("alice")] == ["a", "b", "c", "d", "mine"]
    save_lora(folder / "late.safetensors", sd, LAYERS)  # files that come later are found, too
    assert registry.find("late", "alice").path.name == "late.safetensors"
    own = registry.add("style", "a.safetensors", "alice")
    assert registry.find("style", "alice") is own
    assert registry.has("style", "alice")
    assert not registry.has("style", "bob")
    with pytest.raises(LoraNotFoundError, match="'style' does not exist"):
        registry.find("style", "bob")
    with pytest.raises(LoraNotFoundError):
        registry.remove("style", "bob")
    with pytest.raises(LoraError, match="'mine' is the server's own"):
        registry.remove("mine", "alice")
    with pytest.raises(LoraError, match="'style' is taken"):
        registry.add("style", "b.safetensors", "alice")
    registry.remove("style", "alice")
    assert not registry.has("style", "alice")
    (folder / "late.safetensors").unlink()
    with pytest.raises(LoraNotFoundError, match="is gone"):
        registry.find("late", "alice")


def test_paths_outside_the_folder_are_refused(sd: Model, folder: Path) -> None:
    save_lora(folder.parent / "secret.safetensors", sd, LAYERS)
    (folder / "link.safetensors").symlink_to(folder.parent / "secret.safetensors")
    registry = LoraRegistry(folder=str(folder))
    for path in ("../secret.safetensors", str(folder.parent / "secret.safetensors"), "link.safetensors", "."):
        with pytest.raises(LoraError, match="not inside the folder"):
            registry.add("x", path, "alice")
    for name in ("../secret", "link", "a/../../secret", ""):
        assert not registry.has(name, "alice")
    for name in ("", "../x", "a b", "-a", "x" * 129):
        with pytest.raises(LoraError, match="is not one for a LoRA"):
            registry.add(name, "a.safetensors", "alice")
    with pytest.raises(LoraError, match="--lora-dir"):
        LoraRegistry().add("x", "a.safetensors", "alice")
    with pytest.raises(LoraError, match="does not exist"):
        LoraRegistry(folder=str(folder / "nowhere"))
    with pytest.raises(LoraNotFoundError, match=r"has no 'z\.safetensors'"):
        registry.add("z", "z.safetensors", "alice")


def test_a_file_that_does_not_fit_the_model_gets_no_name(sd: Model, models: dict[str, Model], folder: Path) -> None:
    save_lora(folder / "other.safetensors", models["sdxl"], ["add_embedding.linear_1"])
    registry = LoraRegistry(folder=str(folder))
    registry.table = sd.layer_table
    with pytest.raises(LoraError, match=r"'other' does not fit: the key .*add_embedding.*"):
        registry.add("other", "other.safetensors", "alice")
    assert not [one for one in registry.list("alice") if one.tenant == "alice"]
    with pytest.raises(LoraError, match="does not fit"):
        registry.find("other", "alice")


def test_a_file_that_is_replaced_is_another_lora(sd: Model, folder: Path) -> None:
    registry, tiers = LoraRegistry(folder=str(folder)), tiers_for(sd, 4)
    [before] = registry.resolve([LoraUse("a")], "")
    old = tiers.fetch([before]).result()[0][0]
    save_lora(folder / "a.safetensors", sd, LAYERS, seed=77, rank=4)
    [after] = registry.resolve([LoraUse("a")], "")
    assert before.version != after.version
    assert not torch.equal(old.memory, tiers.fetch([after]).result()[0][0].memory)


def test_tensors_of_any_layout_come_to_their_places(sd: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dtypes side by side, numbers between tensors that shift them, short stretches, and reads that end early."""
    monkeypatch.setattr(plan, "STRETCH_BYTES", 100)
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, places, offset: read(file, [places[0][:50]], offset))
    shapes = sd.layer_table.shapes[NETWORK]
    pairs = draw_pairs(shapes, list(shapes)[:12], 3, seed=1)
    dtypes = [torch.float16, torch.float32, torch.bfloat16]
    tensors = {}
    for number, (name, pair) in enumerate(pairs.items()):
        down, up = (tensor.to(dtypes[number % 3]) for tensor in pair)
        tensors |= {f"unet.{name}.lora_A.weight": down, f"unet.{name}.lora_B.weight": up}
        tensors[f"unet.{name}.alpha"] = torch.tensor(number, dtype=dtypes[number % 2])
    save_file(tensors, tmp_path / "mixed.safetensors")
    lora = load_lora(tmp_path / "mixed.safetensors", sd)
    for number, name in enumerate(pairs):
        low = lora.layers[NETWORK, name]
        down, up = (tensors[f"unet.{name}.lora_{side}.weight"].float() for side in "AB")
        assert torch.equal(low.down, down.view_as(low.down))
        assert torch.equal(low.up, up.flatten(1))
        assert low.scale == pytest.approx(number / 3)
    starts = [start for piece in lora.pieces for start in (piece.down, piece.up)]
    assert all(start % plan.ALIGNMENT == 0 for start in starts)
    assert len(set(starts)) == len(starts)


def test_files_of_one_layout_are_fitted_once(sd: Model, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = []
    monkeypatch.setattr(
        tiers_module, "fit", lambda header, *others: fitted.append(header.path.name) or fit(header, *others)
    )
    tiers = tiers_for(sd, 4)
    save_lora(folder / "d.safetensors", sd, LAYERS, rank=5)
    found = [tiers.fetch([use]).result()[0][0] for use in uses(folder, "abcd")]
    assert fitted == ["a.safetensors", "d.safetensors"]
    for name, lora in zip("abcd", found, strict=True):
        stored = load_file(folder / f"{name}.safetensors")
        [low] = lora.layers.values()
        assert torch.equal(low.down, stored[f"unet.{LAYERS[0]}.lora_A.weight"])
        assert torch.equal(low.up, stored[f"unet.{LAYERS[0]}.lora_B.weight"])


def test_a_lora_in_main_memory_needs_its_file_no_more(sd: Model, folder: Path) -> None:
    tiers = tiers_for(sd, 4)
    [a] = uses(folder, "a")
    before = tiers.fetch([a]).result()
    Path(a.path).unlink()
    assert tiers.fetch([a]).result()[0][0] is before[0][0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_copies_to_a_gpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, in the dtype of the model, and with the numbers that are not finite noticed in any piece."""
    monkeypatch.setattr(tiers_module, "PIECE_BYTES", 1024)
    memory = torch.randn(5000).to(dtype)
    copier = tiers_module.Copier(torch.device("cuda"))
    copy, is_finite = copier.copy(Lora(memory, ()), torch.bfloat16)
    assert is_finite
    assert torch.equal(copy.memory.cpu(), memory.to(torch.bfloat16))
    for place in (0, 1000, 4999):
        spoilt = memory.clone()
        spoilt[place] = float("nan")
        assert not copier.copy(Lora(spoilt, ()), torch.bfloat16)[1]
    assert copier.copy(Lora(memory[:0], ()), torch.bfloat16)[1]


def test_a_file_that_is_replaced_while_it_is_read_is_still_the_old_one(
    sd: Model, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header and its weights are those of one file, and no other file is read by its plan."""
    tiers = tiers_for(sd, 4)
    [a] = uses(folder, "a")
    old = load_file(a.path)

    def replace(header: WeightsHeader, *others: Any) -> list[Fitted]:
        save_lora(folder / "new.safetensors", sd, LAYERS, seed=9, rank=4)
        (folder / "new.safetensors").replace(a.path)
        return fit(header, *others)

    monkeypatch.setattr(tiers_module, "fit", replace)
    [low] = tiers.fetch([a]).result()[0][0].layers.values()
    assert torch.equal(low.down, old[f"unet.{LAYERS[0]}.lora_A.weight"])
