"""The demo command: the contact sheet it makes, and the errors of bad examples."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from instgenie.cli.demo import main
from instgenie.pictures.mask import box_mask
from instgenie.pictures.picture import open_picture
from instgenie.pictures.sheet import CELL, GAP, MARGIN
from instgenie.types import Pixels

EDITS = """
[[edit]]
name = "cat"
mask = "cat.mask.png"
prompts = ["a red cat", "a blue dog"]
seed = 1

[[edit]]
name = "flower"
mask = "flower.mask.png"
prompts = ["a blue flower"]
seed = 2
"""


def noise(height: int, width: int) -> Pixels:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    for name, size in (("cat", (256, 256)), ("flower", (64, 96))):
        height, width = size
        Image.fromarray(noise(height, width)).save(tmp_path / f"{name}.png")
        alpha = np.where(box_mask((10, 10, 30, 40), size), 0, 255).astype(np.uint8)
        Image.fromarray(np.dstack([noise(height, width), alpha])).save(tmp_path / f"{name}.mask.png")
    (tmp_path / "edits.toml").write_text(EDITS)
    return tmp_path


def test_demo_edits_every_example(examples: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    output = examples / "out" / "demo.png"
    options = ["--model", str(folders["fill"]), "--device", "cpu", "--size", "32x32", "--steps", "2"]
    assert main(["--examples", str(examples), "-o", str(output), *options]) == 0
    assert str(output) in capsys.readouterr().out
    sheet = open_picture(output)
    assert sheet.shape[1] == 2 * MARGIN + 4 * CELL + 3 * GAP  # source, mask, two prompts
    top = MARGIN + 68
    source = sheet[top : top + CELL, MARGIN : MARGIN + CELL]
    assert np.array_equal(source, noise(256, 256))
    left = MARGIN + 2 * (CELL + GAP)
    edited = sheet[top : top + CELL, left : left + CELL]
    changed = (edited != source).any(axis=2)
    assert changed.any()
    assert not (changed & ~box_mask((10, 10, 30, 40), (256, 256))).any()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("edit = ", "not a list"),
        ("[[sample]]\nname = 'cat'", "edit"),
        ("edit = []", "no edit"),
        (EDITS.replace('seed = 1\n', ""), "seed"),
        (EDITS.replace('"cat"', '"cow"'), "cow.png"),
        (EDITS.replace("seed = 1", "seed = -1"), "-1"),
    ],
)  # fmt: skip
def test_bad_examples_are_one_line(
    examples: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    (examples / "edits.toml").unlink()
    if text is not None:
        (examples / "edits.toml").write_text(text)
    output = examples / "out" / "demo.png"
    assert main(["--examples", str(examples), "-o", str(output)]) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()
