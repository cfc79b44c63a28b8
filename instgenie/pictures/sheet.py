"""Sheets of edits: a row per photograph with its mask, its edits and how long they took. Knows pixels and words.

A sheet is drawn at twice the size it is looked at, so that it is sharp on every screen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from instgenie.pictures.compositing import edge_distance
from instgenie.pictures.examples import Example, around_mask
from instgenie.pictures.fitting import crop
from instgenie.pictures.resizing import resize_mask, resize_picture
from instgenie.types import Box, PixelMask, Pixels

CELL, GAP, MARGIN = (270, 360), 24, 56  # (height, width) of a picture, the space between and around them
LINE, NUM_LINES = 40, 2  # room for the text under a picture
BAR = 16
TEXT = ImageFont.load_default(32)
TITLE = ImageFont.load_default(60)
PAPER, INK, PALE_INK = "#ffffff", "#1f2328", "#6e7781"
GROOVE, GREY = "#f0f2f4", "#9aa3ad"
TINT = np.array([226, 38, 112])
ACCENT = "#e22670"
NAME = "InstGenIE"


@dataclass(frozen=True)
class SheetRow:
    """An example and its edited pictures, one for each prompt; seconds that an edit took, by what it is called."""

    example: Example
    pictures: list[Pixels]
    seconds: Mapping[str, float] = field(default_factory=dict)


def draw_sheet(rows: Sequence[SheetRow], subtitle: str) -> Pixels:
    """Draw one row per example: photograph, mask, a column for each prompt, and bars if any row was timed."""
    num_columns = 2 + max(len(row.pictures) for row in rows) + any(row.seconds for row in rows)
    height, width = CELL
    row_height = height + 12 + NUM_LINES * LINE + 2 * GAP
    top = MARGIN + 152
    size = 2 * MARGIN + num_columns * (width + GAP) - GAP, top + len(rows) * row_height - 2 * GAP + MARGIN
    sheet = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN - 8), NAME, INK, TITLE)
    draw.text((MARGIN, MARGIN + 72), subtitle, PALE_INK, TEXT)
    for index, row in enumerate(rows):
        y = top + index * row_height
        for column, (picture, caption) in enumerate(zip(cells(row), captions(row.example), strict=True)):
            x = MARGIN + column * (width + GAP)
            sheet.paste(Image.fromarray(picture), (x, y + (height - len(picture)) // 2))
            for number, line in enumerate(wrap(caption, width)):
                draw.text((x, y + height + 12 + number * LINE), line, INK if column > 1 else PALE_INK, TEXT)
        if row.seconds:
            draw_bars(draw, MARGIN + (num_columns - 1) * (width + GAP), y, row.seconds)
    return np.array(sheet)


def cells(row: SheetRow) -> list[Pixels]:
    """The pictures of a row, each as large as a cell allows: the whole photograph, then the part around the mask."""
    example = row.example
    near = close_up_of(example.mask)
    mask = crop(example.mask, near)
    edits = [fit(crop(picture, near)) for picture in (example.picture, *row.pictures)]
    return [framed(example.picture, near), tinted(edits[0], resize_mask(mask, edits[0].shape[:2])), *edits[1:]]


def close_up_of(mask: PixelMask) -> Box:
    """The part of a picture that its edits are shown in: all of it unless the mask is small."""
    height, width = mask.shape
    near = around_mask(mask, CELL[1] / CELL[0])
    is_small = len(near.rows) < 0.8 * height and len(near.cols) < 0.8 * width
    return near if is_small else Box(range(height), range(width))


def fit(picture: Pixels) -> Pixels:
    """Scale the picture to the largest size that fits a cell."""
    height, width, _ = picture.shape
    scale = min(CELL[0] / height, CELL[1] / width)
    return resize_picture(picture, (max(round(height * scale), 1), max(round(width * scale), 1)))


def captions(example: Example) -> list[str]:
    height, width = example.mask.shape
    share = example.mask.mean()
    prompts = [
        f"{prompt}, seed {example.seed + index}" if example.prompts.count(prompt) > 1 else prompt
        for index, prompt in enumerate(example.prompts)
    ]
    return [
        f"{example.name}, {width}x{height}",
        f"mask: {share:.{0 if share >= 0.1 else 1}%} of the picture",
        *prompts,
    ]


def framed(picture: Pixels, near: Box) -> Pixels:
    """The whole photograph, with a frame around the part that is shown close up."""
    fitted = fit(picture)
    if near.size == picture.shape[:2]:
        return fitted
    image = Image.fromarray(fitted)
    scale = len(fitted) / len(picture)
    left, top, right, bottom = (
        round(place * scale) for place in (near.cols.start, near.rows.start, near.cols.stop, near.rows.stop)
    )
    draw = ImageDraw.Draw(image)
    draw.rectangle((left - 2, top - 2, right + 2, bottom + 2), outline=PAPER, width=5)
    draw.rectangle((left - 1, top - 1, right + 1, bottom + 1), outline=ACCENT, width=3)
    return np.array(image)


def tinted(picture: Pixels, mask: PixelMask) -> Pixels:
    """Return the picture with its mask coloured and outlined."""
    result = picture.copy()
    rim = mask & (edge_distance(mask, 4) < 3)
    result[mask] = np.rint(picture[mask] * 0.45 + TINT * 0.55).astype(np.uint8)
    result[rim] = TINT
    return result


def draw_bars(draw: ImageDraw.ImageDraw, x: int, y: int, seconds: Mapping[str, float]) -> None:
    """Draw a bar per way of editing, as long as it took; the last one, which it is all about, in colour."""
    longest = max(seconds.values())
    step = CELL[0] // max(len(seconds), 1)
    for index, (name, taken) in enumerate(seconds.items()):
        is_last = index == len(seconds) - 1
        top = y + index * step + (step - LINE - 8 - BAR) // 2
        draw.text((x, top), name, INK if is_last else PALE_INK, TEXT)
        label = f"{taken:.1f} s"
        draw.text((x + CELL[1] - TEXT.getlength(label), top), label, ACCENT if is_last else INK, TEXT)
        bar = top + LINE + 6
        draw.rounded_rectangle((x, bar, x + CELL[1], bar + BAR), BAR // 2, GROOVE)
        end = x + max(round(CELL[1] * taken / longest), BAR)
        draw.rounded_rectangle((x, bar, end, bar + BAR), BAR // 2, ACCENT if is_last else GREY)
    draw.text((x, y + CELL[0] + 12), f"{longest / taken:.1f} times faster {name}", PALE_INK, TEXT)


def wrap(text: str, width: int) -> list[str]:
    """Break the text into lines no wider than `width`; the last one is cut short if there is no room."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and TEXT.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    shown = lines[:NUM_LINES]
    if len(lines) > NUM_LINES:
        shown[-1] += " …"
    return [shorten(line, width) for line in shown]


def shorten(line: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont = TEXT) -> str:
    if font.getlength(line) <= width:
        return line
    while font.getlength(f"{line}…") > width:
        line = line[:-1].rstrip(" …")
    return f"{line}…"
