"""Contact sheets: their size, the tinted mask, captions that fit."""

import numpy as np
import pytest

from instgenie.pictures.examples import Example
from instgenie.pictures.mask import box_mask
from instgenie.pictures.sheet import CELL, GAP, MARGIN, NUM_LINES, TEXT, SheetRow, draw_sheet, tinted, wrap
from instgenie.types import Pixels


def noise(height: int, width: int) -> Pixels:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def test_rows_may_have_different_numbers_of_prompts() -> None:
    mask = box_mask((2, 2, 9, 9), (30, 20))
    examples = [Example("x", noise(30, 20), mask, ["p"] * num, 0) for num in (1, 3)]
    rows = [SheetRow(example, [noise(30, 20)] * len(example.prompts)) for example in examples]
    assert draw_sheet(rows, "two rows").shape[1] == 2 * MARGIN + 5 * CELL + 4 * GAP


def test_tint_stays_inside_the_mask() -> None:
    mask = box_mask((2, 2, 9, 9), (30, 20))
    result = tinted(noise(30, 20), mask)
    assert np.array_equal(result[~mask], noise(30, 20)[~mask])
    assert (result[mask] != noise(30, 20)[mask]).any(axis=1).all()


@pytest.mark.parametrize("text", ["", "a red cat", "word " * 50, "w" * 200, "a " + "w" * 200 + " b c d"])
def test_captions_fit_their_cell(text: str) -> None:
    lines = wrap(text)
    assert 1 <= len(lines) <= NUM_LINES
    assert all(TEXT.getlength(line) <= CELL for line in lines)
