"""Contact sheets: pictures side by side with a caption under each. Knows pixels and words."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from instgenie.pictures.compositing import edge_distance
from instgenie.pictures.examples import Example
from instgenie.types import PixelMask, Pixels

CELL, GAP, MARGIN = 256, 16, 32
LINE, NUM_LINES = 20, 2  # room for the text under a picture
TEXT = ImageFont.load_default(15)
TITLE = ImageFont.load_default(26)
PAPER, INK, PALE_INK = "#ffffff", "#1f2328", "#6e7781"
TINT = np.array([226, 38, 112])


@dataclass(frozen=True)
class SheetRow:
    """An example and its edited pictures, one for each prompt."""

    example: Example
    pictures: list[Pixels]


def tinted(picture: Pixels, mask: PixelMask) -> Pixels:
    """Return the picture with its mask coloured and outlined."""
    result = picture.copy()
    rim = mask & (edge_distance(mask, 4) < 3)
    result[mask] = np.rint(picture[mask] * 0.45 + TINT * 0.55).astype(np.uint8)
    result[rim] = TINT
    return result


def draw_sheet(rows: Sequence[SheetRow], subtitle: str) -> Pixels:
    """Draw one row per example: source, mask, then a column for each prompt."""
    num_columns = 2 + max(len(row.pictures) for row in rows)
    row_height = CELL + 8 + NUM_LINES * LINE + GAP
    top = MARGIN + 68
    width = 2 * MARGIN + num_columns * (CELL + GAP) - GAP
    sheet = Image.new("RGB", (width, top + len(rows) * row_height - GAP + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN - 6), "InstGenIE", INK, TITLE)
    draw.text((MARGIN, MARGIN + 30), subtitle, PALE_INK, TEXT)
    for index, row in enumerate(rows):
        example = row.example
        pictures = [example.picture, tinted(example.picture, example.mask), *row.pictures]
        captions = ["source", f"mask: {example.mask.mean():.0%} of the picture", *example.prompts]
        for column, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
            x, y = MARGIN + column * (CELL + GAP), top + index * row_height
            image = fit(picture)
            sheet.paste(image, (x + (CELL - image.width) // 2, y + (CELL - image.height) // 2))
            ink = PALE_INK if column < 2 else INK
            for number, line in enumerate(wrap(caption)):
                draw.text((x, y + CELL + 8 + number * LINE), line, ink, TEXT)
    return np.array(sheet)


def fit(picture: Pixels) -> Image.Image:
    """Scale the picture to the largest size that fits a cell."""
    height, width, _ = picture.shape
    scale = CELL / max(height, width)
    size = max(round(width * scale), 1), max(round(height * scale), 1)
    return Image.fromarray(picture).resize(size, Image.Resampling.LANCZOS)


def wrap(text: str) -> list[str]:
    """Break the text into lines no wider than a cell; the last one is cut short if there is no room."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and TEXT.getlength(longer) > CELL:
            lines.append(word)
        else:
            lines[-1] = longer
    shown = lines[:NUM_LINES]
    if len(lines) > NUM_LINES:
        shown[-1] += " …"
    return [shorten(line) for line in shown]


def shorten(line: str) -> str:
    if TEXT.getlength(line) <= CELL:
        return line
    while TEXT.getlength(f"{line}…") > CELL:
        line = line[:-1].rstrip(" …")
    return f"{line}…"
