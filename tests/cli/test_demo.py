"""The demo command: the contact sheet it makes, and the errors of bad examples."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from instgenie.cli import demo
from instgenie.cli.demo import main
from instgenie.editor import Editor
from instgenie.pictures.mask import box_mask
from instgenie.pictures.picture import open_picture
from instgenie.pictures.sheet import CELL, GAP, MARGIN, SheetRow
from instgenie.types import Edit, Pixels, Result

EDITS = """
[[edit]]
name = "cat"
picture = "cat.png"
mask = "cat.mask.png"
prompts = ["a red cat", "a blue dog"]
seed = 1

[[edit]]
name = "flower"
picture = "flower.png"
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


def run_demo(examples: Path, model: Path, *options: str) -> Pixels:
    output = examples / "out" / "demo.png"
    small = ["--model", str(model), "--device", "cpu", "--size", "32x32", "--steps", "2"]
    assert main(["--examples", str(examples), "-o", str(output), *small, *options]) == 0
    return open_picture(output)


def width_of(num_columns: int) -> int:
    return 2 * MARGIN + num_columns * (CELL[1] + GAP) - GAP


def test_demo_edits_every_example(examples: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    sheet = run_demo(examples, folders["fill"])
    assert "demo.png" in capsys.readouterr().out
    assert sheet.shape[1] == width_of(4)  # photograph, mask, two prompts
    assert len(run_demo(examples, folders["fill"], "--rows", "1")) < len(sheet)


def test_the_edits_shown_with_their_times_are_cached(
    examples: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[SheetRow] = []
    tiers: list[str | None] = []
    draw, edit_many = demo.draw_sheet, Editor.edit_many

    def keep_rows(drawn: list[SheetRow], subtitle: str) -> Pixels:
        rows.extend(drawn)
        return draw(drawn, subtitle)

    def keep_tiers(editor: Editor, edits: list[Edit]) -> list[Result]:
        results = edit_many(editor, edits)
        tiers.extend(result.cache_tier for result in results)
        return results

    monkeypatch.setattr(demo, "draw_sheet", keep_rows)
    monkeypatch.setattr(Editor, "edit_many", keep_tiers)
    sheet = run_demo(examples, folders["fill"], "--times")
    assert sheet.shape[1] == width_of(5)
    rows_of_tiers = [None, None, None, None, "host", "host"], [None, None, "host"]  # dense, cold, cached
    assert tiers == [None, *rows_of_tiers[0], *rows_of_tiers[1]]  # warm-up, two prompts, one prompt
    for row in rows:
        assert list(row.seconds) == ["dense", "cold", "cached"]
        assert all(taken > 0 for taken in row.seconds.values())
        changed = (row.pictures[0] != row.example.picture).any(axis=2)
        assert changed.any()
        assert not (changed & ~row.example.mask).any()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("edit = ", "not a list"),
        ("[[sample]]\nname = 'cat'", "edit"),
        ("edit = []", "no edit"),
        (EDITS.replace('seed = 1\n', ""), "seed"),
        (EDITS.replace('["a blue flower"]', "[]"), "no prompt"),
        (EDITS.replace('"cat.png"', '"cow.png"'), "cow.png"),
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
