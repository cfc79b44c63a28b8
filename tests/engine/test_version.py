"""The version of the code that makes activations is a part of their key."""

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.edits import make_edit
from helpers.fill_pipelines import save_pipeline
from helpers.workers import head_of, make_denoiser, register_on_disk, registering

from instgenie.cache.disk import DiskTier
from instgenie.cache.store import Lookup, Store
from instgenie.cluster import wire
from instgenie.engine.register import register
from instgenie.models.identity import NUMBERS_VERSION, code_version
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.models.unet.model import UnetModel

# by version: the mean size of the rows of a double and a single block, of a model whose weights never change
# 2: a stride keeps other steps; 3: coarser levels of a UNet have smaller tiles
SIZES = dict.fromkeys((1, 2, 3), (0.9838, 0.8708))
# by version: the values that a UNet keeps for the convolutions of a picture of 64 by 64 latents
NUM_VALUES = {3: 602_688}


def test_other_numbers_have_another_version(tmp_path: Path) -> None:
    """If this fails, activations have changed: raise NUMBERS_VERSION, and add the new numbers here."""
    model = load(str(save_pipeline(tmp_path, 3, 12)), "cpu")
    found = register(make_edit(size=(64, 64)).picture, model, size=(64, 64), steps=2)
    sizes = [float(found.rows[place].abs().mean()) for place in (0, 1)]
    assert sizes == pytest.approx(SIZES[NUMBERS_VERSION], rel=5e-3)
    assert max(SIZES) == NUMBERS_VERSION
    assert found.key.code == code_version()
    assert found.key.code.startswith(f"{NUMBERS_VERSION}, diffusers ")


def test_other_tiles_have_another_version(models: dict[str, Model]) -> None:
    """If this fails, rows of convolutions lie elsewhere: raise NUMBERS_VERSION, and add the new number here."""
    model = models["sd"].with_convolutions("reused")
    assert isinstance(model, UnetModel)
    num_values = sum(shape.num_rows((64, 64)) * shape.width for shape in model.tiling.shapes)
    assert num_values == NUM_VALUES[NUMBERS_VERSION]


def of_another_version(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    monkeypatch.setattr("instgenie.engine.register.code_version", lambda: "another")
    return monkeypatch.undo


def test_activations_of_another_version_are_neither_used_nor_listed(
    models: dict[str, Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = models["blend"]
    undo = of_another_version(monkeypatch)
    register_on_disk(small, tmp_path, "t")
    undo()
    denoiser, tape = make_denoiser(small, disk=str(tmp_path))
    assert denoiser.templates.store.find(denoiser.templates.keys.find(head_of("t"))) is Lookup.MISS
    tape.rounds.append([(wire.List("these"), [])])
    tape.is_busy = lambda: not tape.of(wire.Listed)
    denoiser.run()
    assert tape.of(wire.Listed) == [wire.Listed("these", ())]


def test_activations_of_another_version_leave_first(
    models: dict[str, Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody uses them, so they are the least recently used ones."""
    small = models["blend"]
    undo = of_another_version(monkeypatch)
    register_on_disk(small, tmp_path, "t", "u")
    undo()
    num_bytes = Store(disk=DiskTier(tmp_path, 2**30)).status()["disk"].num_bytes
    old = {path.name for path in tmp_path.iterdir()}
    for name in ("v", "w"):
        denoiser, tape = make_denoiser(small, disk=str(tmp_path), disk_bytes=num_bytes + 1000)
        tape.rounds.append([registering(small, name)])
        denoiser.run()
    assert not old & {path.name for path in tmp_path.iterdir()}
