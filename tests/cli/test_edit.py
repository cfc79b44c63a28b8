"""`instgenie edit` with good input: real files, real processes."""

from pathlib import Path

import numpy as np
import pytest
from helpers.commands import EDIT, edit_here, instgenie_process

import instgenie.cli.edit
from instgenie.pictures.mask import box_mask
from instgenie.pictures.picture import open_picture


def test_edit_in_a_process(desk: Path, folders: dict[str, Path]) -> None:
    before = Path("photo.jpg").read_bytes()
    model = str(folders["fill"])
    done = instgenie_process("edit", "photo.jpg", "--mask", "alpha.png", "--model", model, "--seed", "7", *EDIT)
    assert (done.returncode, Path("photo.jpg").read_bytes()) == (0, before), done.stderr
    photo, edited = open_picture("photo.jpg"), open_picture("photo.edit.png")
    mask = box_mask((20, 10, 40, 30), (60, 100))
    assert np.array_equal(edited[~mask], photo[~mask])
    assert not np.array_equal(edited[mask], photo[mask])
    for fact in ("100x60", "48x32", "tokens", "seconds", "7", "photo.edit.png"):
        assert fact in done.stdout
    assert "3/3" in done.stderr
    assert "Loading" not in done.stderr


def test_masks_of_every_kind_edit_the_same_pixels(desk: Path, folders: dict[str, Path]) -> None:
    model = ["--model", str(folders["fill"]), "--no-cache"]
    assert edit_here(*model, "--mask", "alpha.png", "-o", "alpha.webp") == 0
    assert edit_here(*model, "--mask", "luma.png", "--mask-mode", "luma", "-o", "luma.webp") == 0
    assert edit_here(*model, "--box", "20,10,40,30", "-o", "box.webp") == 0
    alpha = open_picture("alpha.webp")
    assert np.array_equal(alpha, open_picture("luma.webp"))
    assert np.array_equal(alpha, open_picture("box.webp"))


def test_no_mask_is_the_whole_picture(desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", str(folders["blend_guided"])]
    assert edit_here(*model, "--true-guidance", "2", "--negative-prompt", "a dog", "--strength", "0.7") == 0
    assert "100%" in capsys.readouterr().out


def test_an_interrupt_ends_with_130(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(instgenie.cli.edit, "open_picture", interrupted)
    assert edit_here() == 130
