"""The examples that ship with the package: every file is listed, licensed and of the right size, and is in a wheel."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from setuptools import build_meta

from instgenie.pictures.examples import EXAMPLES, THUMBNAIL, Example, around_mask, middle_range, read_examples
from instgenie.pictures.mask import box_mask, read_mask
from instgenie.server.routes.suggestions import suggested_examples
from instgenie.types import Box

ROOT = Path(__file__).parents[2]
MAX_BYTES = 4 * 2**20
LICENCES = {"CC0 1.0", "public domain"}


def attributed() -> dict[str, list[str]]:
    """The rows of the table in ATTRIBUTION.md, by file."""
    lines = (EXAMPLES / "ATTRIBUTION.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {row[0]: row[1:] for row in cells[2:]}


def test_every_photograph_has_an_attribution_and_a_free_licence() -> None:
    rows = attributed()
    assert set(rows) == {example["picture"] for example in suggested_examples()}
    for _, photographer, licence, package, path in rows.values():
        assert photographer
        assert package
        assert path
        assert licence in LICENCES


def test_the_list_and_the_files_agree() -> None:
    listed = {"edits.toml", "ATTRIBUTION.md"}
    for example in suggested_examples():
        listed |= {example["picture"], example["mask"], example["name"] + THUMBNAIL}
    assert {path.name for path in EXAMPLES.iterdir()} == listed
    assert sum(path.stat().st_size for path in EXAMPLES.iterdir()) < MAX_BYTES


@pytest.mark.parametrize("entry", suggested_examples(), ids=lambda entry: str(entry["name"]))
def test_masks_and_thumbnails_belong_to_their_photographs(entry: dict[str, str]) -> None:
    with Image.open(EXAMPLES / entry["picture"]) as photograph, Image.open(EXAMPLES / entry["mask"]) as mask:
        assert mask.size == photograph.size
        width, height = photograph.size
        whole = np.asarray(photograph.convert("RGB"))
    masked = read_mask(EXAMPLES / entry["mask"], (height, width), "alpha")
    assert 0 < masked.mean() < 0.6
    rows, cols = (int(places.mean()) for places in np.nonzero(masked))
    side = min(width, height)
    box = Box(middle_range(rows, side, height), middle_range(cols, side, width))
    square = Image.fromarray(whole[box.rows.start : box.rows.stop, box.cols.start : box.cols.stop])
    with Image.open(EXAMPLES / (entry["name"] + THUMBNAIL)) as thumbnail:
        near = np.asarray(square.resize(thumbnail.size, Image.Resampling.LANCZOS), float)
        assert np.abs(near - np.asarray(thumbnail.convert("RGB"))).mean() < 6
    assert len(entry["prompts"]) == 3


def test_a_wheel_has_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel is built of the examples alone, so that it is quick: the rule for package data is the project's."""
    (tmp_path / "instgenie").mkdir()
    (tmp_path / "instgenie" / "__init__.py").touch()
    (tmp_path / "instgenie" / "examples").symlink_to(EXAMPLES)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    wheel = build_meta.build_wheel(str(tmp_path))
    names = set(zipfile.ZipFile(tmp_path / wheel).namelist())
    assert {f"instgenie/examples/{path.name}" for path in EXAMPLES.iterdir()} <= names


@pytest.mark.parametrize("shape", [0.75, 1.0, 1.5])
@pytest.mark.parametrize("place", [(0, 0, 10, 12), (50, 40, 60, 80), (90, 150, 100, 200), (0, 0, 100, 200)])
def test_a_close_up_holds_the_mask_if_the_picture_allows_it(place: tuple[int, int, int, int], shape: float) -> None:
    top, left, bottom, right = place
    mask = np.zeros((100, 200), bool)
    mask[top:bottom, left:right] = True
    box = around_mask(mask, shape)
    assert 0 <= box.rows.start < box.rows.stop <= 100
    assert 0 <= box.cols.start < box.cols.stop <= 200
    assert len(box.cols) / len(box.rows) == pytest.approx(shape, rel=0.1)
    if mask.sum() < 5000:
        assert mask[np.ix_(box.rows, box.cols)].sum() == mask.sum()


def test_edits_have_seeds_of_their_own_and_close_ups_the_size_asked_for() -> None:
    picture = np.zeros((60, 90, 3), np.uint8)
    example = Example("x", picture, box_mask((40, 20, 20, 10), (60, 90)), ["a", "a", "b"], 7)
    assert [(edit.prompt, edit.seed) for edit in example.edits()] == [("a", 7), ("a", 8), ("b", 9)]
    near = example.close_up((32, 48))
    assert near.picture.shape == (32, 48, 3)
    assert near.mask.shape == (32, 48)
    assert near.mask.mean() > example.mask.mean()
    assert read_examples(EXAMPLES)[0].name == suggested_examples()[0]["name"]
