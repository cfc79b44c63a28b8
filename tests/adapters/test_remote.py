"""LoRAs behind a URL: headers are read there, files are copied to the disk when steps need them, and a store that is
away is said to be so."""

import os
import threading
from pathlib import Path

import pytest
import torch
from helpers.loras import load_lora, save_lora
from helpers.s3 import BUCKET, Server

from instgenie.adapters import remote as remote_module
from instgenie.adapters.lora import Lora
from instgenie.adapters.registry import LoraRegistry
from instgenie.adapters.remote import LoraDisk, RemoteLoras
from instgenie.adapters.tiers import LoraTiers
from instgenie.engine.adapting import PromptLoras, make_tiers
from instgenie.errors import LoraError, LoraNotFoundError, LoraStoreError
from instgenie.models.model import Model
from instgenie.types import LoraUse

LAYERS = ["down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"]


@pytest.fixture
def sd(models: dict[str, Model]) -> Model:
    return models["sd"]


@pytest.fixture
def store(sd: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder behind a URL, whose files are asked for again at every look."""
    monkeypatch.setattr(remote_module, "SECONDS_FRESH", 0.0)
    found = tmp_path / "store"
    found.mkdir()
    for seed, name in enumerate("abc"):
        save_lora(found / f"{name}.safetensors", sd, LAYERS, seed=seed, rank=4)
    return found


@pytest.fixture
def registry(store: Path, tmp_path: Path, sd: Model) -> LoraRegistry:
    found = LoraRegistry(url=f"file://{store}", disk_folder=str(tmp_path / "disk"))
    found.table = sd.layer_table
    return found


def find(registry: LoraRegistry, name: str) -> LoraUse:
    [use] = registry.resolve([LoraUse(name)], "")
    return use


def test_a_remote_lora_is_copied_once_and_is_the_file(
    sd: Model, store: Path, registry: LoraRegistry, tmp_path: Path
) -> None:
    use, tiers = find(registry, "a"), make_tiers(sd, 2**20, 0)
    assert not (tmp_path / "disk").exists()  # the header was read there
    fetch = tiers.fetch([use])
    assert fetch.tier == "remote"
    [(lora, _)] = fetch.result()
    for name, low in load_lora(store / "a.safetensors", sd).layers.items():
        assert torch.equal(lora.layers[name].down, low.down)
    assert [tier for tier, _, _ in tiers.loaded_seconds] == ["remote"]
    assert make_tiers(sd, 2**20, 0).fetch([use]).tier == "disk"
    assert [one.suffix for one in (tmp_path / "disk").iterdir() if one.suffix != ".lock"] == [".safetensors"]


def test_a_lora_that_loads_is_where_it_loads_from(
    sd: Model, registry: LoraRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edit that joins a load from the store says so, though the disk has its copy by then."""
    use, tiers = find(registry, "a"), make_tiers(sd, 2**20, 0)
    read, copied, go = tiers._read, threading.Event(), threading.Event()

    def wait_and_read(path: Path) -> Lora:
        copied.set()
        assert go.wait(60)
        return read(path)

    monkeypatch.setattr(tiers, "_read", wait_and_read)
    tiers.warm([use])
    assert copied.wait(60)
    assert tiers.disk.has(use)
    joined = tiers.fetch([use])
    assert (joined.tier, joined.is_done) == ("remote", False)
    go.set()
    joined.result()
    assert tiers.fetch([use]).tier == "host"
    assert [tier for tier, _, _ in tiers.loaded_seconds] == ["remote"]


def test_processes_that_need_one_file_copy_it_once(store: Path, registry: LoraRegistry) -> None:
    use, copied = find(registry, "a"), []
    original = RemoteLoras.copy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteLoras, "copy", lambda *args: (copied.append(args), original(*args)))
        threads = [threading.Thread(target=LoraDisk(2**30).bring, args=(use,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(copied) == 1


def test_what_patches_no_text_encoder_is_not_copied_to_encode_prompts(
    sd: Model, registry: LoraRegistry, tmp_path: Path
) -> None:
    prompts = PromptLoras(sd)
    with prompts.applied([find(registry, "a")]):
        pass
    assert not (tmp_path / "disk").exists()


def test_copies_that_were_used_least_recently_go_first(store: Path, registry: LoraRegistry) -> None:
    size = (store / "a.safetensors").stat().st_size
    disk = LoraDisk(2 * size)
    a, b, c = (find(registry, name) for name in "abc")
    for number, use in enumerate((a, b)):
        os.utime(disk.bring(use), (number, number))
    disk.bring(a)
    disk.bring(c)
    assert [disk.has(one) for one in (a, b, c)] == [True, False, True]


def test_a_file_that_changes_is_another_lora(sd: Model, store: Path, registry: LoraRegistry) -> None:
    before = find(registry, "a")
    save_lora(store / "a.safetensors", sd, LAYERS, seed=9, rank=4)
    os.utime(store / "a.safetensors", (1, 1))
    after = find(registry, "a")
    assert before.version != after.version
    with pytest.raises(LoraError, match="has changed: send the edit again"):
        LoraDisk(2**30).bring(before)
    assert not Path(before.path).exists()
    LoraDisk(2**30).bring(after)
    (store / "a.safetensors").unlink()
    with pytest.raises(LoraNotFoundError, match="'a' does not exist"):
        registry.find("a", "")


def test_a_name_is_known_without_asking_the_store(sd: Model, store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = save_lora(folder / "near.safetensors", sd, LAYERS)
    registry = LoraRegistry(folder=str(folder), url=f"file://{store}", disk_folder=str(tmp_path / "disk"))
    assert [registry.has(name, "") for name in ("near", "a", "nobody")] == [True, False, False]
    registry.find("a", "")
    path.write_bytes(path.read_bytes()[:-3])
    assert [registry.has(name, "") for name in ("near", "a")] == [False, True]  # a damaged file is none
    path.unlink()
    assert not registry.has("near", "")


def test_names_of_the_store_are_listed_and_stay_inside_it(store: Path, registry: LoraRegistry) -> None:
    (store / "notes.txt").write_text("no LoRA")
    (store.parent / "outside.safetensors").write_bytes((store / "a.safetensors").read_bytes())
    listed = {one.name: one.root for one in registry.list("")}
    assert listed == {name: f"{name}.safetensors" for name in "abc"}
    for name in ("../outside", "..%2foutside", "x" * 200, "missing"):
        with pytest.raises(LoraNotFoundError):
            registry.find(name, "")


def test_bad_remote_files_are_refused_before_they_are_copied(sd: Model, store: Path, registry: LoraRegistry) -> None:
    good = (store / "a.safetensors").read_bytes()
    (store / "cut.safetensors").write_bytes(good[:-3])
    (store / "none.safetensors").write_bytes(b"123")
    (store / "long.safetensors").write_bytes((2**40).to_bytes(8, "little") + good[8:])
    for name, reason in (("cut", "is truncated"), ("none", "it has 3 bytes"), ("long", "not a whole safetensors file")):
        with pytest.raises(LoraError, match=reason):
            registry.find(name, "")


def test_a_store_that_is_away_is_said_to_be_and_copies_go_on(
    sd: Model, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    try:
        for name, value in server.options.items():
            monkeypatch.setenv(f"FSSPEC_S3_{name.upper()}", value)
        import fsspec

        fsspec.config.set_conf_env(fsspec.config.conf)
        server.files().put_file(str(store / "a.safetensors"), f"{BUCKET}/loras/a.safetensors")
        registry = LoraRegistry(url=f"s3://{BUCKET}/loras", disk_folder=str(tmp_path / "disk"))
        use = find(registry, "a")
        assert make_tiers(sd, 2**20, 0).fetch([use]).result()
    finally:
        server.kill()
        fsspec.config.conf.pop("s3", None)
    monkeypatch.setattr(remote_module, "PATIENCE", 2.0)
    registry.remote._server.patience = 2.0
    assert find(registry, "a") == use
    assert LoraTiers(sd.layer_table, sd.device, sd.dtype, 2**20).fetch([use]).result()
    with pytest.raises(LoraStoreError, match=r"s3://bucket/loras does not answer"):
        registry.find("b", "")
    assert [one.name for one in registry.list("")] == ["a"]
