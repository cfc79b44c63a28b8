"""Painting the mask on the edit page: tools, undo, zoom, and large photographs."""

import io

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

from helpers.browser import WAIT, Visitor, drag, masked_percent, open_picture_on, timed_tasks
from helpers.scene import BALL, BOX, await_strokes, middle, place, saved_mask, scene
from PIL import Image
from playwright.sync_api import FilePayload, expect

from instgenie.server.routes.suggestions import suggested_examples

LARGE = (5600, 4200)  # (width, height): 24 megapixels
MAX_LONG_TASK = 200  # milliseconds of computing


def test_tools_paint_erase_undo_and_redo(visitor: Visitor) -> None:
    page = visitor.open()
    open_picture_on(page)
    page.keyboard.press("r")
    drag(page, (0.3, 0.2), (0.7, 0.8))
    box = masked_percent(page)
    assert 20 < box < 60
    page.keyboard.press("e")
    drag(page, (0.3, 0.5), (0.7, 0.5))
    erased = masked_percent(page)
    assert 0 < erased < box
    page.keyboard.press("l")
    drag(page, (0.3, 0.4), (0.7, 0.4), (0.7, 0.6), (0.3, 0.6))
    assert masked_percent(page) > erased
    page.click("#undo")
    page.keyboard.press("Control+z")
    assert masked_percent(page) == box
    page.keyboard.press("Control+Shift+z")
    assert masked_percent(page) == erased
    page.click("#invert")
    assert masked_percent(page) == pytest.approx(100 - erased, abs=1)
    page.click("#clear")
    assert masked_percent(page) == 0
    page.keyboard.press("Control+z")
    assert masked_percent(page) == pytest.approx(100 - erased, abs=1)


def test_zoom_changes_the_view_and_not_the_mask(visitor: Visitor) -> None:
    page = visitor.open()
    open_picture_on(page)
    page.keyboard.press("r")
    drag(page, (0.4, 0.4), (0.6, 0.6))
    before = masked_percent(page)
    page.click("#zoom-in")
    page.mouse.wheel(0, -300)
    assert masked_percent(page) == before
    drag(page, (0.4, 0.4), (0.6, 0.6))  # in the zoomed view this box lies inside the first one
    assert masked_percent(page) == before
    page.click("#fit")
    drag(page, (0.3, 0.3), (0.6, 0.6))
    assert masked_percent(page) > before


def test_a_large_photograph_keeps_the_page_responsive(visitor: Visitor) -> None:
    """No task of the page's main thread is long while a mask is painted, selected, grown and saved."""
    file = io.BytesIO()
    Image.open(io.BytesIO(scene())).resize(LARGE).save(file, "JPEG", quality=85)
    photograph: FilePayload = {"name": "large.jpg", "mimeType": "image/jpeg", "buffer": file.getvalue()}
    page = visitor.open()
    expect(page.locator("#examples button")).to_have_count(len(suggested_examples()))
    with timed_tasks(page) as milliseconds:
        page.set_input_files("#file", photograph)
        expect(page.locator("#under")).to_contain_text(f"{LARGE[0]} × {LARGE[1]}", timeout=WAIT)
        for tool in ("b", "e", "r", "l"):
            page.keyboard.press(tool)
            drag(page, (0.2, 0.3), (0.8, 0.3), (0.8, 0.7), (0.2, 0.7), (0.3, 0.4))
        page.mouse.wheel(0, -400)
        page.click("#clear")
        page.click("#fit")
        page.keyboard.press("s")
        for number, thing in enumerate((BALL, BOX)):
            page.mouse.click(*place(page, *middle(thing)))
            await_strokes(page, 6 + number)
        page.keyboard.press("g")
        await_strokes(page, 8)
        page.keyboard.press("Control+z")
        saved_mask(page, LARGE[::-1])
    assert len(milliseconds) > 100
    assert max(milliseconds) < MAX_LONG_TASK
