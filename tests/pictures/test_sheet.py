"""Sheets of edits: their size, the tinted mask, the frame of the close-up, bars of time, captions that fit."""

import numpy as np
import pytest

from instgenie.pictures.examples import Example
from instgenie.pictures.mask import box_mask
from instgenie.pictures.sheet import (
    CELL,
    GAP,
    MARGIN,
    NUM_LINES,
    TEXT,
    TINT,
    SheetRow,
    captions,
    cells,
    draw_sheet,
    tinted,
    wrap,
)
from instgenie.types import Pixels

SECONDS = {"dense": 4.0, "cold": 3.0, "cached": 1.0}


def noise(height: int, width: int) -> Pixels:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def make_row(num_prompts: int, size: tuple[int, int] = (30, 20)) -> SheetRow:
    example = Example("x", noise(*size), box_mask((2, 2, 9, 9), size), [f"p{i}" for i in range(num_prompts)], 0)
    return SheetRow(example, [noise(*size)] * num_prompts)


def width_of(num_columns: int) -> int:
    return 2 * MARGIN + num_columns * (CELL[1] + GAP) - GAP


def test_rows_may_have_different_numbers_of_prompts() -> None:
    assert draw_sheet([make_row(1), make_row(3)], "two rows").shape[1] == width_of(5)


def test_time_takes_a_column() -> None:
    row = make_row(2)
    timed = draw_sheet([SheetRow(row.example, row.pictures, SECONDS), row], "timed")
    assert timed.shape[1] == width_of(5)
    bars = timed[:, width_of(4) - MARGIN + GAP :]
    coloured = (bars == TINT).all(axis=2)
    assert coloured.sum(axis=1).max() == pytest.approx(CELL[1] / 4, abs=3)  # the bar of one second out of four


@pytest.mark.parametrize(("size", "is_close"), [((30, 20), False), ((300, 400), True)])
def test_a_small_mask_is_shown_close_up_and_framed(size: tuple[int, int], is_close: bool) -> None:
    row = make_row(1, size)
    photograph, mask, edited = cells(row)
    assert mask.shape == edited.shape
    assert max(len(one) for one in (photograph, mask)) == CELL[0]
    assert (photograph == TINT).all(axis=2).any() == is_close
    assert (mask == TINT).all(axis=2).any()  # its outline
    assert np.array_equal(photograph, edited) != is_close


def test_prompts_that_repeat_are_told_apart_by_their_seed() -> None:
    example = Example("x", noise(30, 20), box_mask((2, 2, 9, 9), (30, 20)), ["a", "b", "a"], 5)
    assert captions(example)[2:] == ["a, seed 5", "b", "a, seed 7"]


def test_tint_stays_inside_the_mask() -> None:
    mask = box_mask((2, 2, 9, 9), (30, 20))
    result = tinted(noise(30, 20), mask)
    assert np.array_equal(result[~mask], noise(30, 20)[~mask])
    assert (result[mask] != noise(30, 20)[mask]).any(axis=1).all()


@pytest.mark.parametrize("text", ["", "a red cat", "word " * 50, "w" * 200, "a " + "w" * 200 + " b c d"])
def test_captions_fit_their_cell(text: str) -> None:
    lines = wrap(text, CELL[1])
    assert 1 <= len(lines) <= NUM_LINES
    assert all(TEXT.getlength(line) <= CELL[1] for line in lines)
