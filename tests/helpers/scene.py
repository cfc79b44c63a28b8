"""A scene of two plain objects on the edit page, to select them and to look at the mask."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter
from playwright.sync_api import Page, expect

from helpers.browser import WAIT, Visitor
from helpers.serving import png
from instgenie.pictures.mask import read_mask
from instgenie.types import PixelMask

SIZE = (240, 320)  # (height, width) of the scene
BALL, BOX = (60, 70, 150, 160), (210, 90, 280, 200)  # (left, top, right, bottom)


def scene() -> bytes:
    """A red ball and a blue box in front of a soft green ground."""
    height, width = SIZE
    rng = np.random.default_rng(1)
    ground = Image.fromarray(rng.integers(0, 255, (8, 8), np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    shades = np.asarray(ground, np.uint8)[..., None] // 8 + np.array([60, 120, 70], np.uint8)
    image = Image.fromarray(shades.astype(np.uint8))
    draw = ImageDraw.Draw(image)
    draw.ellipse(BALL, fill=(200, 40, 50))
    draw.rectangle(BOX, fill=(40, 60, 190))
    return png(np.asarray(image.filter(ImageFilter.GaussianBlur(0.7))))


def truth(*, ball: bool = False, box: bool = False) -> PixelMask:
    image = Image.new("1", SIZE[::-1])
    draw = ImageDraw.Draw(image)
    if ball:
        draw.ellipse(BALL, fill=1)
    if box:
        draw.rectangle(BOX, fill=1)
    return np.asarray(image)


def overlap(one: PixelMask, other: PixelMask) -> float:
    return float((one & other).sum() / (one | other).sum())


def open_scene(visitor: Visitor, **options: Any) -> Page:
    page = visitor.open(**options)
    page.set_input_files("#file", {"name": "scene.png", "mimeType": "image/png", "buffer": scene()})
    expect(page.locator("#under")).to_contain_text("scene.png, 320 × 240")
    return page


def place(page: Page, x: float, y: float) -> tuple[float, float]:
    """Return where a pixel of the picture is in the window, while the whole picture is shown."""
    frame = page.locator("#board").bounding_box()
    assert frame
    scale = min((frame["width"] - 32) / SIZE[1], (frame["height"] - 32) / SIZE[0])
    left = frame["x"] + (frame["width"] - SIZE[1] * scale) / 2
    top = frame["y"] + (frame["height"] - SIZE[0] * scale) / 2
    return left + x * scale, top + y * scale


def middle(box: tuple[int, int, int, int]) -> tuple[float, float]:
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def await_strokes(page: Page, count: int) -> None:
    """Wait until the mask was changed so many times. Undo takes back one change."""
    expect(page.locator("#under")).to_have_attribute("data-changes", str(count), timeout=WAIT)


def saved_mask(page: Page, size: tuple[int, int] = SIZE) -> PixelMask:
    return np.asarray(read_mask(saved_file(page), size))


def press_tool(page: Page, tool: str) -> None:
    """Press a button of the toolbar, in its menu if the window is narrow."""
    if not page.is_visible(tool):
        page.click("#more-tools")
    page.click(tool)


def saved_file(page: Page) -> bytes:
    with page.expect_download() as download:
        press_tool(page, "#save-mask")
    return Path(download.value.path()).read_bytes()
