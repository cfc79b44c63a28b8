"""The tools that change the mask as a whole: select an object, grow, shrink, load, save; and the zoom in percent."""

import numpy as np
import pytest
from helpers.serving import png

pytest.importorskip("playwright", reason="playwright is not installed")

from helpers.browser import (
    WAIT,
    Visitor,
    drag,
    fill_settings,
    masked_percent,
    open_picture_on,
    sent_forms,
)
from helpers.scene import (
    BALL,
    BOX,
    SIZE,
    await_strokes,
    middle,
    open_scene,
    overlap,
    place,
    saved_file,
    saved_mask,
    truth,
)
from playwright.sync_api import expect

from instgenie.pictures.mask import read_mask


def test_a_click_selects_an_object_and_further_clicks_add_and_subtract(visitor: Visitor) -> None:
    page = open_scene(visitor)
    page.keyboard.press("s")
    page.mouse.click(*place(page, *middle(BALL)))
    await_strokes(page, 1)
    assert overlap(saved_mask(page), truth(ball=True)) > 0.85
    assert page.locator("#ants .selected >> nth=0").get_attribute("d")
    page.mouse.click(*place(page, *middle(BOX)))
    await_strokes(page, 2)
    assert overlap(saved_mask(page), truth(ball=True, box=True)) > 0.8
    page.keyboard.press("Control+z")
    assert overlap(saved_mask(page), truth(ball=True)) > 0.85
    page.keyboard.press("Control+Shift+z")
    page.get_by_label("Subtract").check()
    page.mouse.click(*place(page, *middle(BALL)))
    await_strokes(page, 3)
    assert not saved_mask(page)[int(middle(BALL)[1]), int(middle(BALL)[0])]
    page.keyboard.press("Control+z")
    assert overlap(saved_mask(page), truth(ball=True, box=True)) > 0.8


def test_a_second_click_beside_the_object_grows_the_selection_modestly(visitor: Visitor) -> None:
    page = open_scene(visitor)
    page.keyboard.press("s")
    page.mouse.click(*place(page, *middle(BALL)))
    await_strokes(page, 1)
    before = saved_mask(page)
    x, y = BALL[2] + 8, int(middle(BALL)[1])  # on the ground
    page.mouse.click(*place(page, x + 0.5, y + 0.5))
    await_strokes(page, 2)
    after = saved_mask(page)
    assert after[y, x]
    assert (before & ~after).sum() < 0.02 * before.sum()  # nothing is taken away
    assert before.sum() < after.sum() < 2 * before.sum()
    page.get_by_label("Subtract").check()
    page.mouse.click(*place(page, x + 0.5, y + 0.5))
    await_strokes(page, 3)
    assert not saved_mask(page)[y, x]


@pytest.mark.parametrize("shape", ["box", "loop"])
def test_a_box_or_a_loop_selects_what_it_encloses(visitor: Visitor, shape: str) -> None:
    page = open_scene(visitor)
    page.keyboard.press("s")
    left, top, right, bottom = BOX
    corners = [(left - 12, top - 12), (right + 12, top - 12), (right + 12, bottom + 12), (left - 12, bottom + 12)]
    path = [corners[0], corners[2]] if shape == "box" else [*corners, corners[0]]
    page.mouse.move(*place(page, *path[0]))
    page.mouse.down()
    for point in path[1:]:
        page.mouse.move(*place(page, *point), steps=5)
    page.mouse.up()
    await_strokes(page, 1)
    assert overlap(saved_mask(page), truth(box=True)) > 0.75


def test_the_object_under_the_mouse_is_shown_before_the_click(visitor: Visitor) -> None:
    page = open_scene(visitor)
    page.keyboard.press("s")
    page.mouse.move(*place(page, *middle(BALL)))
    preview = page.locator("#ants .preview")
    expect(preview).not_to_have_attribute("d", "", timeout=WAIT)
    assert masked_percent(page) == 0
    page.mouse.move(1, 1)
    expect(preview).to_have_attribute("d", "")


def test_selecting_with_the_keyboard_and_with_a_finger(visitor: Visitor) -> None:
    page = open_scene(visitor)
    page.keyboard.press("s")
    page.focus("#board")
    for key in ["ArrowRight"] * 14 + ["Enter"]:
        page.keyboard.press(key)
    await_strokes(page, 1)
    assert overlap(saved_mask(page), truth(box=True)) > 0.75
    phone = open_scene(visitor, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    phone.tap("[name=tool][value=select]")
    phone.touchscreen.tap(*place(phone, *middle(BALL)))
    await_strokes(phone, 1)
    assert overlap(saved_mask(phone), truth(ball=True)) > 0.75
    assert phone.evaluate("document.documentElement.scrollWidth") <= 360


def test_growing_and_shrinking(visitor: Visitor) -> None:
    page = open_scene(visitor)
    page.keyboard.press("r")
    page.mouse.move(*place(page, 100, 80))
    page.mouse.down()
    page.mouse.move(*place(page, 200, 160))
    page.mouse.up()
    before = saved_mask(page).sum()
    by = round(0.008 * SIZE[0] * 4)
    page.click("#grow", modifiers=["Shift"])
    await_strokes(page, 2)
    grown = saved_mask(page).sum()
    assert grown == pytest.approx((100 + 2 * by) * (80 + 2 * by), rel=0.04)
    page.click("#shrink", modifiers=["Shift"])
    await_strokes(page, 3)
    assert saved_mask(page).sum() == pytest.approx(before, rel=0.02)
    page.keyboard.press("Control+z")
    assert saved_mask(page).sum() == grown
    page.keyboard.press("Control+z")
    assert saved_mask(page).sum() == before


def test_a_mask_that_is_saved_and_loaded_is_the_same(visitor: Visitor) -> None:
    page = open_scene(visitor)
    drag(page, (0.4, 0.4), (0.6, 0.6), (0.5, 0.7))
    file = saved_file(page)
    before = np.asarray(read_mask(file, SIZE))
    page.click("#clear")
    page.set_input_files("#mask-file", {"name": "mask.png", "mimeType": "image/png", "buffer": file})
    await_strokes(page, 3)
    assert np.array_equal(saved_mask(page), before)
    white = png(np.where(~before, 255, 0).astype(np.uint8))  # opaque: white is masked
    page.set_input_files("#mask-file", {"name": "mask.png", "mimeType": "image/png", "buffer": white})
    await_strokes(page, 4)
    assert np.array_equal(saved_mask(page), ~before)
    page.click("#undo")
    assert np.array_equal(saved_mask(page), before)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (png(np.zeros((30, 40), np.uint8)), "mask.png has 40 × 30 pixels: a mask of this picture has 128 × 96."),
        (png(np.zeros((96, 128), np.uint8))[:50], "mask.png cannot be opened: the file is damaged or not a picture."),
    ],
    ids=["other-size", "damaged"],
)
def test_a_mask_file_that_does_not_fit_is_refused(visitor: Visitor, content: bytes, message: str) -> None:
    page = visitor.open()
    open_picture_on(page)
    page.set_input_files("#mask-file", {"name": "mask.png", "mimeType": "image/png", "buffer": content})
    expect(page.locator("#error")).to_have_text(message)
    assert masked_percent(page) == 0


def test_feather_and_crop_reach_the_request(visitor: Visitor) -> None:
    page = visitor.open()
    open_picture_on(page)
    drag(page, (0.45, 0.4), (0.55, 0.6))
    fill_settings(page, steps=1)
    page.get_by_text("More settings").click()
    page.get_by_label("Feather", exact=True).fill("3")
    page.get_by_label("Model sees", exact=True).select_option("Only around the mask")
    page.get_by_label("Padding, px", exact=True).fill("20")
    page.click("#run")
    expect(page.locator("#modes")).to_be_visible(timeout=WAIT)
    [form] = sent_forms(page)
    assert (form["feather"], form["crop"], form["crop_padding"]) == (b"3", b"masked", b"20")
    assert page.locator("#error").text_content() == ""


def test_the_zoom_is_a_percentage(visitor: Visitor) -> None:
    page = open_scene(visitor)
    zoom = page.get_by_label("Zoom in percent")
    fitting = zoom.input_value()
    assert fitting.endswith(" %")
    zoom.fill("250")
    page.keyboard.press("Enter")
    expect(zoom).to_have_value("250 %")
    page.keyboard.press("1")
    expect(zoom).to_have_value("100 %")
    page.click("#zoom-in")
    expect(zoom).to_have_value("140 %")
    zoom.fill("large")
    page.keyboard.press("Enter")
    expect(zoom).to_have_value("140 %")
    page.click("#fit")
    expect(zoom).to_have_value(fitting)
