"""Shipping a model: it replaces the built-in one and the card tells of it; what cannot ship changes nothing."""

import errno
import shutil
from pathlib import Path

import pytest
from helpers.controlnets import save_controlnet
from helpers.fill_pipelines import save_pipeline
from helpers.loras import save_lora

from instgenie.bench.markdown import put_between
from instgenie.errors import InstGenieError
from instgenie.machine.model_folders import BUILTIN
from instgenie.models.loading.load import load
from training import ship
from training.measure.bars import GROUPS
from training.measure.report import END, NEW, START, FigureReport, Measured, digest

FAULTS = {
    "adapter": "lacks the adapters pencil",
    "fit": "edges",
    "size": "112.5, and 112 is the most",
    "sheet": "lacks blind.jpg",
    "group": "lacks the figures of cost",
    "other model": "measure it again",
}
MARKS = START, END, *ship.PARTS, *ship.SHEETS


def save_model(folder: Path, latent_channels: int, num_text: int) -> Path:
    """A pipeline with a LoRA and a ControlNet."""
    model = load(str(save_pipeline(folder, latent_channels, num_text)), "cpu")
    (folder / "loras").mkdir()
    save_lora(folder / "loras" / "pencil.safetensors", model)
    save_controlnet(folder / "controlnets" / "edges", model)
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A new model, its figures, the model that is shipped now, and a repository with a card."""
    new = save_model(tmp_path / "new", 3, 20)
    save_model(tmp_path / "builtin", 2, 12)
    (tmp_path / "builtin" / "prompts.json").write_text("{}")
    (tmp_path / "figures").mkdir()
    for name in ship.SHOWN:
        (tmp_path / "figures" / name).write_text("new")
    figures = {group: {"PSNR, scenes": 31.25} for group in GROUPS}
    FigureReport({NEW: Measured(digest(new), figures)}).save(tmp_path / "figures" / ship.FIGURES)
    (tmp_path / "docs").mkdir()
    (tmp_path / ship.CARD).write_text("# Model\n" + "\nold\n".join(MARKS) + "\nkept\n")
    return tmp_path


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def ship_from(tree: Path) -> None:
    ship.ship(tree / "new", tree / "figures", tree, tree / "builtin")


def test_a_model_takes_the_place_of_another(tree: Path) -> None:
    ship_from(tree)
    assert files_of(tree / "builtin") == files_of(tree / "new") | {"prompts.json": b"{}"}
    assert load(str(tree / "builtin"), "cpu").latent_channels == 3
    card = (tree / ship.CARD).read_text()
    for told in ("12 noisy latents", "3 channels", "20 tokens", "31.25", "docs/blind.jpg", "kept"):
        assert told in card
    assert {path.name for path in (tree / "docs").iterdir()} == set(ship.SHOWN)


@pytest.mark.parametrize("fault", list(FAULTS))
def test_what_cannot_ship_changes_nothing(tree: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    new = tree / "new"
    if fault == "adapter":
        (new / "loras" / "pencil.safetensors").unlink()
    elif fault == "fit":
        shutil.copytree(tree / "builtin" / "controlnets", new / "controlnets", dirs_exist_ok=True)
    elif fault == "size":
        monkeypatch.setattr(ship, "sizes", lambda folder: {"package, MiB": 112.5})
    elif fault == "sheet":
        (tree / "figures" / "blind.jpg").unlink()
    elif fault == "group":
        report = FigureReport.load(tree / "figures" / ship.FIGURES)
        del report.models[NEW].figures["cost"]
        report.save(tree / "figures" / ship.FIGURES)
    else:
        (new / "vae" / "more.txt").write_text("trained on")
    before = files_of(tree)
    with pytest.raises(InstGenieError, match=FAULTS[fault]):
        ship_from(tree)
    assert files_of(tree) == before


def test_the_built_in_model_stays_until_the_new_one_is_there(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files_of(tree)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", copy_until_the_disk_is_full)
        with pytest.raises(OSError, match="No space left"):
            ship_from(tree)
    assert files_of(tree) == before
    ship_from(tree)
    assert sorted(path.name for path in tree.iterdir() if path.name.startswith("builtin")) == ["builtin"]


def copy_until_the_disk_is_full(folder: Path, to: Path, **options: object) -> None:
    shutil.copy(folder / "model_index.json", to)
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_built_in_model_does_not_replace_itself(tree: Path) -> None:
    before = files_of(tree)
    with pytest.raises(InstGenieError, match="is the built-in model"):
        ship.ship(tree / "builtin", tree / "figures", tree, tree / "builtin")
    (tree / "docs").rmdir()
    (tree / "docs").symlink_to(tree / "figures")
    with pytest.raises(InstGenieError, match="is where the figures go"):
        ship_from(tree)
    (tree / "docs").unlink()
    assert files_of(tree) == before


def test_the_card_tells_what_the_built_in_model_consists_of() -> None:
    card = (ship.ROOT / ship.CARD).read_text()
    assert put_between(card, ship.describe(BUILTIN), *ship.PARTS) == card
