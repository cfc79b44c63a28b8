"""`instgenie edit` with good input: real files, real processes."""

from pathlib import Path

import numpy as np
import pytest
from helpers.commands import EDIT, edit_here, instgenie_process
from helpers.profiles import wide_profile
from PIL import Image

import instgenie.cli.edit
from instgenie.pictures.mask import box_mask
from instgenie.pictures.picture import open_picture


def test_edit_in_a_process(desk: Path, folders: dict[str, Path]) -> None:
    before = Path("photo.jpg").read_bytes()
    model = str(folders["fill"])
    arguments = ["edit", "photo.jpg", "--mask", "alpha.png", "--model", model, "--seed", "7", *EDIT]
    done = instgenie_process(*arguments, TESTS_FORK_FOLDER="")  # it is not forked: it imports everything itself
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


def test_the_file_s_profile_metadata_and_own_pixels_are_kept(
    desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    own = np.array(Image.open("alpha.png"))
    exif = Image.Exif()
    exif[0x010F] = "Maker"
    Image.fromarray(own).save("photo.jpg", "PNG", icc_profile=wide_profile(), exif=exif.tobytes())
    model = ["--model", str(folders["fill"]), "--no-cache"]
    assert edit_here(*model, "--mask", "luma.png", "-o", "kept.png") == 0
    answer = Image.open("kept.png")
    mask = box_mask((20, 10, 40, 30), (60, 100))
    assert np.array_equal(np.array(answer)[~mask], own[~mask])
    assert (np.array(answer)[mask][:, 3] == 255).all()
    assert answer.info["icc_profile"] == wide_profile()
    assert answer.getexif()[0x010F] == "Maker"
    assert "its white part is edited" in capsys.readouterr().err
    assert edit_here(*model, "--mask", "luma.png", "-o", "bare.png", "--metadata", "none") == 0
    assert not Image.open("bare.png").getexif()


def test_no_mask_is_the_whole_picture(desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", str(folders["blend_guided"])]
    assert edit_here(*model, "--true-guidance", "2", "--negative-prompt", "a dog", "--strength", "0.7") == 0
    assert "100%" in capsys.readouterr().out


def test_a_thing_is_removed(desk: Path, folders: dict[str, Path]) -> None:
    model = ["--model", str(folders["fill"]), "--no-cache", "--box", "20,10,40,30"]
    for content in ("original", "surroundings"):
        assert edit_here(*model, "--masked-content", content, "-o", f"{content}.png") == 0
    kept, gone, photo = (open_picture(f"{name}") for name in ("original.png", "surroundings.png", "photo.jpg"))
    mask = box_mask((20, 10, 40, 30), (60, 100))
    assert np.array_equal(gone[~mask], photo[~mask])
    assert not np.array_equal(gone, kept)


def test_an_interrupt_ends_with_130(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path, **options: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(instgenie.cli.edit, "open_photo", interrupted)
    assert edit_here() == 130


def test_a_crop_around_the_mask(desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    here = ["--model", str(folders["sd_fill"]), "--no-cache", "--box", "60,30,8,8"]
    assert edit_here(*here, "--size", "32x32", "--crop", "masked", "--crop-padding", "6", "-o", "crop.png") == 0
    assert "100x60, a crop of 32x32, worked on at 32x32" in capsys.readouterr().out
    photo, edited = open_picture("photo.jpg"), open_picture("crop.png")
    mask = box_mask((60, 30, 8, 8), (60, 100))
    assert np.array_equal(edited[~mask], photo[~mask])
    assert edit_here(*here, "--crop", "off", "-o", "whole.png") == 0
    assert "a crop of" not in capsys.readouterr().out


def test_a_template_of_the_whole_photograph_is_used_and_the_command_says_so(
    desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    here = ["--model", str(folders["sd_fill"]), "--cache-dir", "kept", "--box", "60,30,5,5", "--size", "32x32"]
    assert edit_here(*here, "--reuse", "template", "-o", "whole.png") == 0
    told = capsys.readouterr()
    assert "a crop of" not in told.out
    assert "--crop masked edits a sharper crop" in told.err


def test_a_reference_beside_the_photograph(
    desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    Image.fromarray(255 - open_picture("photo.jpg")).save("other.png")
    model = ["--model", str(folders["kontext"]), "--no-cache", "--mask", "alpha.png"]
    assert edit_here(*model, "-o", "alone.png") == 0
    assert edit_here(*model, "-o", "beside.png", "--reference", "other.png") == 0
    mask = box_mask((20, 10, 40, 30), (60, 100))
    photo, alone, beside = map(open_picture, ("photo.jpg", "alone.png", "beside.png"))
    assert np.array_equal(alone[~mask], photo[~mask])
    assert np.array_equal(beside[~mask], photo[~mask])
    assert not np.array_equal(alone[mask], beside[mask])
    assert (
        edit_here("--model", str(folders["sd"]), "--no-cache", "--box", "20,10,40,30", "--reference", "other.png") != 0
    )
    assert "1 picture beside the edited one: this model takes none" in capsys.readouterr().err
