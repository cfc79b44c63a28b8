"""Registration: in memory, on disk, interrupted and continued."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.edits import make_edit

from instgenie.cache.disk import DiskTier
from instgenie.cache.host import HostTier
from instgenie.cache.store import CPU, Handle, Store
from instgenie.editor import Editor
from instgenie.engine.prepare import prepare
from instgenie.engine.register import make_activations, make_key, register, register_in
from instgenie.errors import CacheError, EditError
from instgenie.jobs.activations import Activations, Key, split_steps
from instgenie.models.model import Model

GIB = 2**30
EDIT = make_edit(steps=10, guidance=2.0)
TEMPLATE = {"size": EDIT.size, "steps": EDIT.steps, "guidance": EDIT.guidance}


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "cache", GIB)


@pytest.fixture
def store(tier: DiskTier) -> Store:
    return Store(disk=tier)


def find(store: Store, key: Key, model: Model) -> Activations | None:
    found = store.get(key)
    return make_activations(key, found.span, model) if found else None


def equal(one: Activations | None, other: Activations) -> bool:
    assert one is not None
    assert (one.key, one.run_lengths, one.num_tokens) == (other.key, other.run_lengths, other.num_tokens)
    return torch.equal(one.time, other.time) and all(map(torch.equal, one.rows, other.rows))


class InterruptError(Exception):
    pass


@pytest.mark.parametrize("kind", ["kv", "y"])
def test_on_disk_is_in_memory_bit_for_bit_however_often_interrupted(model: Model, kind: str, store: Store) -> None:
    key = make_key(EDIT, model, kind)
    told = []

    def interrupt(num_done: int, num_steps: int) -> None:
        told.append((num_done, num_steps))
        if len(told) % 2 == 0:
            raise InterruptError

    for _ in range(2):
        with pytest.raises(InterruptError):
            register_in(store, EDIT.picture, model, **TEMPLATE, kind=kind, on_step=interrupt)
        assert find(store, key, model) is None
    registered = register_in(store, EDIT.picture, model, **TEMPLATE, kind=kind)
    assert told == [(0, 10), (4, 10), (4, 10), (8, 10)]
    assert (registered.num_steps, registered.num_computed_steps) == (10, 2)
    memory = register(EDIT.picture, model, **TEMPLATE, kind=kind)
    assert registered.num_bytes > memory.num_bytes
    assert equal(find(store, key, model), memory)


def test_a_gap_is_filled_and_nothing_else(models: dict[str, Model], tier: DiskTier, store: Store) -> None:
    model, told = models["sdxl"], []
    register_in(store, EDIT.picture, model, **TEMPLATE)
    files = sorted(tier.folder.glob("*/*.safetensors"))
    inodes = [path.stat().st_ino for path in files]
    files[1].unlink()
    filled = register_in(store, EDIT.picture, model, **TEMPLATE, on_step=lambda *step: told.append(step))
    assert filled.num_computed_steps == 4
    assert told == [(6, 10), (10, 10)]
    assert [path.stat().st_ino for path in files][::2] == inodes[::2]
    again = register_in(store, EDIT.picture, model, **TEMPLATE)
    assert (again.num_computed_steps, again.num_bytes) == (0, filled.num_bytes)
    memory = register(EDIT.picture, model, **TEMPLATE)
    assert equal(find(store, memory.key, model), memory)


def test_a_template_that_will_not_fit(models: dict[str, Model], tmp_path: Path) -> None:
    """It is refused after its first pass and leaves nothing."""
    model, told = models["fill"], []
    num_bytes = register(EDIT.picture, model, **TEMPLATE).num_bytes
    tier = DiskTier(tmp_path / "cache", num_bytes // 2)
    with pytest.raises(CacheError, match="no room"):
        register_in(Store(disk=tier), EDIT.picture, model, **TEMPLATE, on_step=lambda *step: told.append(step))
    assert told == [(0, 10)]
    assert tier.stored() == []


def test_spans() -> None:
    assert split_steps(10, 4) == [range(0, 4), range(4, 8), range(8, 10)]
    assert split_steps(4, 4) == [range(0, 4)]
    assert split_steps(2, 4) == [range(0, 2)]


@pytest.mark.parametrize("change", [{"steps": 9}, {"guidance": 3.0}, {"size": (48, 32)}, {"picture": 1}])
def test_keys_differ_in_all_that_activations_depend_on(change: dict[str, object], models: dict[str, Model]) -> None:
    other = {"picture": make_edit(picture_seed=1).picture} if "picture" in change else change
    model = models["fill"]
    key = make_key(EDIT, model, "kv")
    assert make_key(replace(EDIT, **other), model, "kv").text != key.text
    same = replace(EDIT, prompt="sky", seed=9, strength=0.5, mask=~EDIT.mask, true_guidance=3.0, feather=2)
    assert make_key(same, model, "kv").text == key.text
    assert make_key(EDIT, model, "kv", "fp8").text != key.text
    for own in ({"kind": "y"}, {"dtype": "torch.bfloat16"}, {"model": "another"}, {"prompt": "a cat"}):
        assert replace(key, **own).text != key.text


def test_registrations_refuse_unknown_kinds(models: dict[str, Model], store: Store) -> None:
    with pytest.raises(EditError, match="'q'"):
        register_in(store, EDIT.picture, models["fill"], kind="q")  # type: ignore[arg-type]


def test_editors_share_a_cache(folders: dict[str, Path], store: Store) -> None:
    """A template that one editor registers another finds on disk, loads once per batch, and uses with equal results."""
    first, other = (Editor(str(folders["blend_guided"]), "cpu", cache=store) for _ in range(2))
    [miss] = other.edit_many([EDIT])
    assert (miss.cache_tier, miss.can_reuse) == (None, True)
    first.register(EDIT.picture, **TEMPLATE)
    on_disk, *others = other.edit_many([EDIT, replace(EDIT, seed=1), replace(EDIT, strength=0.3)])
    assert on_disk.cache_tier == "disk"
    assert all(result.cache_hit for result in others)
    assert on_disk.seconds.load > 0
    alone = Editor(str(folders["blend_guided"]), "cpu")
    alone.register(EDIT.picture, **TEMPLATE)
    [registered] = alone.edit_many([EDIT])
    assert registered.cache_tier == "host"
    assert (registered.picture == on_disk.picture).all()
    assert (miss.picture != on_disk.picture).any()


def test_loading_starts_when_an_edit_is_queued(
    folders: dict[str, Path], tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any edit of the batch is prepared; once for all that share a template."""
    seen = []

    class SeenStore(Store):
        def prefetch(self, key: Key, device: torch.device = CPU) -> Handle:
            seen.append("prefetch")
            return super().prefetch(key, device)

    editor = Editor(str(folders["fill"]), "cpu", cache=SeenStore(host=HostTier(GIB), disk=tier))
    editor.register(EDIT.picture, **TEMPLATE)
    monkeypatch.setattr("instgenie.editor.prepare", lambda *given: (seen.append("prepare"), prepare(*given))[1])
    full = replace(EDIT, mask=np.ones_like(EDIT.mask))
    results = editor.edit_many([EDIT, replace(EDIT, seed=1), full])
    assert seen == ["prefetch"] * 2 + ["prepare"] * 3
    assert [result.cache_tier for result in results] == ["host", "host", None]


def test_no_edit_finds_the_template_of_a_tenant(folders: dict[str, Path], store: Store) -> None:
    editor = Editor(str(folders["fill"]), "cpu", cache=store)
    editor.register(EDIT.picture, **TEMPLATE)
    key = make_key(EDIT, editor.model, "kv")
    assert store.missing(key) == []
    assert store.missing(replace(key, tenant="shop")) == key.spans


def test_an_edit_survives_a_cache_it_cannot_use(
    folders: dict[str, Path],
    tier: DiskTier,
    store: Store,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    editor = Editor(str(folders["fill"]), "cpu", cache=store)
    editor.register(EDIT.picture, **TEMPLATE)
    monkeypatch.setattr("instgenie.cache.ladder.available_bytes", lambda _: 1000)
    [result] = editor.edit_many([EDIT])
    assert not result.cache_hit
    assert "cpu has 1.0 kB available" in caplog.text
    monkeypatch.undo()
    for path in tier.folder.glob("*/*.safetensors"):
        path.write_bytes(b"")
    [result] = editor.edit_many([EDIT])
    assert not result.cache_hit
    assert "removed" in caplog.text


def test_packed_rows_are_found_only_by_their_own_key(models: dict[str, Model], tmp_path: Path) -> None:
    """Packed rows have keys of their own and take fewer bytes on disk."""
    model = models["fill"]
    store = Store(disk=DiskTier(tmp_path, GIB))
    plain = register_in(store, EDIT.picture, model, **TEMPLATE)
    packed = register_in(store, EDIT.picture, model, **TEMPLATE, cache_dtype="fp8")
    assert plain.num_computed_steps == packed.num_computed_steps
    assert packed.num_bytes < plain.num_bytes / 2  # float32 here: the scales take most of the second half
    key = make_key(EDIT, model, "kv", "fp8")
    found = store.get(key)
    assert found
    [expected] = [register(EDIT.picture, model, **TEMPLATE, cache_dtype="fp8")]
    assert all(torch.equal(a, b) for a, b in zip(found.span.rows, expected.rows, strict=True))
