"""The edit page as people use it: a real server, a real browser, a tiny model."""

import numpy as np
import pytest
from helpers.serving import Running, picture, png

pytest.importorskip("playwright", reason="playwright is not installed")

from helpers.browser import (
    PAGE_SIZE,
    WAIT,
    Visitor,
    downloaded,
    drag,
    fill_settings,
    masked_percent,
    open_picture_on,
    record_progress,
    sent_forms,
)
from playwright.sync_api import expect

from instgenie.pictures.mask import read_mask
from instgenie.server.routes.suggestions import suggested_examples


def test_paint_run_and_get_a_picture(visitor: Visitor) -> None:
    page = visitor.open()
    open_picture_on(page)
    drag(page, (0.45, 0.4), (0.55, 0.5), (0.45, 0.6))
    fill_settings(page)
    record_progress(page)
    page.click("#run")
    expect(page.locator("#result")).to_be_visible(timeout=WAIT)
    told = page.evaluate("window.told")
    assert told[0] == "Sending"
    assert {"Step 1 of 4", "Step 4 of 4"} <= set(told)
    assert any(text in told for text in ("Preparing", "Waiting: 1 before you"))
    [form] = sent_forms(page)
    mask = read_mask(form["mask"], PAGE_SIZE)
    assert mask[PAGE_SIZE[0] // 2, PAGE_SIZE[1] // 2]
    assert not mask[0].any()
    assert form["prompt"] == b"a red cat"
    result, source = downloaded(page), picture(3, PAGE_SIZE)
    assert np.array_equal(result[~mask], source[~mask])
    assert not np.array_equal(result[mask], source[mask])


def test_facts_beside_the_result(visitor: Visitor) -> None:
    page = visitor.open()
    open_picture_on(page)
    drag(page, (0.45, 0.4), (0.55, 0.5))
    fill_settings(page, count="2")
    page.click("#run")
    expect(page.locator("#facts")).to_contain_text("tokens at each step; the mask touches", timeout=WAIT)
    expect(page.locator("#facts")).to_contain_text("Seed7")
    expect(page.locator("#strip button")).to_have_count(2)
    page.click("#strip button >> nth=1")
    expect(page.locator("#facts")).to_contain_text("Seed8")
    page.get_by_label("Before and after").fill("100")
    page.click("#modes label >> nth=0")
    expect(page.get_by_label("Before and after")).to_be_hidden()
    page.click("#reuse")
    expect(page.locator("#under")).to_contain_text("photo-8.png")
    assert masked_percent(page) == 0


def test_partial_pictures_are_shown_during_the_run(visitor: Visitor) -> None:
    page = visitor.open()
    open_picture_on(page)
    drag(page, (0.4, 0.4), (0.6, 0.6))
    fill_settings(page, steps=400)
    page.click("#run")
    expect(page.locator("#view")).to_have_attribute("data-mode", "partial", timeout=WAIT)
    page.click("#cancel")
    expect(page.locator("#run")).to_be_visible()
    expect(page.locator("#view")).to_have_attribute("data-mode", "mask")


def test_cancel_ends_the_job(visitor: Visitor, server: Running) -> None:
    page = visitor.open()
    open_picture_on(page)
    drag(page, (0.4, 0.4), (0.6, 0.6))
    fill_settings(page, steps=400)
    before = server.metric("instgenie:request_success_total")
    page.click("#run")
    expect(page.locator("#stage-name")).to_contain_text("of 400", timeout=WAIT)
    page.click("#cancel")
    expect(page.locator("#run")).to_be_visible()
    expect(page.locator("#error")).to_be_hidden()
    for _ in range(100):
        if server.metric("instgenie:num_requests_running") == 0:
            break
        page.wait_for_timeout(100)
    assert server.metric("instgenie:request_success_total") == before + 1


@pytest.mark.parametrize(
    ("name", "kind", "content", "message"),
    [
        ("notes.txt", "text/plain", b"hello", "notes.txt is not a picture this server accepts"),
        ("broken.png", "image/png", png(picture())[:60], "broken.png cannot be opened"),
        (
            "large.png",
            "image/png",
            png(np.zeros((6400, 6400), np.uint8)),
            "large.png has 41.0 megapixels: the server accepts up to 40.0",
        ),
    ],
    ids=["text", "damaged", "large"],
)
def test_a_bad_file_is_reported_where_it_was_dropped(
    visitor: Visitor, name: str, kind: str, content: bytes, message: str
) -> None:
    page = visitor.open()
    expect(page.locator("#examples button")).to_have_count(len(suggested_examples()))
    page.set_input_files("#file", {"name": name, "mimeType": kind, "buffer": content})
    expect(page.locator("#picture-error")).to_contain_text(message)
    expect(page.locator("#empty")).to_be_visible()


def test_missing_input_is_reported_before_anything_is_sent(visitor: Visitor) -> None:
    page = visitor.open()
    error = page.locator("#error")
    page.click("#run")
    expect(error).to_have_text("Open a picture first.")
    open_picture_on(page)
    page.click("#run")
    expect(error).to_contain_text("Nothing is painted")
    drag(page, (0.4, 0.4), (0.6, 0.6))
    page.click("#run")
    expect(error).to_have_text("Say what should be there.")
    fill_settings(page, steps=0)
    page.click("#run")
    expect(error).to_have_text("Steps: a number from 1 to 1000 is expected.")
    expect(page.locator("#steps")).to_be_focused()
    assert sent_forms(page) == []


def test_the_server_s_refusal_is_shown(visitor: Visitor) -> None:
    page = visitor.open()
    open_picture_on(page)
    drag(page, (0.4, 0.4), (0.6, 0.6))
    fill_settings(page)
    page.evaluate("document.getElementById('quality').selectedOptions[0].value = 'splendid'")
    page.click("#run")
    expect(page.locator("#error")).to_contain_text("The field 'quality' is 'splendid'", timeout=WAIT)
    expect(page.locator("#run")).to_be_visible()
    visitor.faults.clear()  # the browser logs the status 400


def test_keyboard_only(visitor: Visitor) -> None:
    page = visitor.open()
    expect(page.locator("#examples button")).to_have_count(len(suggested_examples()))
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "coffee":
            break
    page.keyboard.press("Enter")
    expect(page.locator("#under")).to_contain_text("coffee.png, 600 × 400")
    page.focus("#clear")
    page.keyboard.press("Enter")
    page.focus("#board")
    for key in ("Space", "ArrowRight", "ArrowRight", "ArrowDown", "Space"):
        page.keyboard.press(key)
    assert masked_percent(page) > 0
    page.focus("#prompt")
    page.keyboard.press("Control+a")
    page.keyboard.type("orange t-sh")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.input_value("#prompt") == "a photo of an orange t-shirt"
    page.focus("#steps")
    page.keyboard.type("3")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#result")).to_be_visible(timeout=WAIT)
    split = page.get_by_label("Before and after")
    before = int(split.input_value())
    split.focus()
    page.keyboard.press("ArrowRight")
    assert int(split.input_value()) == before + 1


def test_chips_suggest_prompts(visitor: Visitor) -> None:
    page = visitor.open()
    page.click(".chip:has-text('flowers')")
    expect(page.locator("#suggestions li")).to_have_count(5)
    page.click("#suggestions li:has-text('tulip')")
    assert page.input_value("#prompt") == "a photo of a tulip"


def test_a_phone(visitor: Visitor) -> None:
    page = visitor.open(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    expect(page.get_by_text("drop one here")).to_be_hidden()
    open_picture_on(page)
    expect(page.locator("#under")).to_contain_text("tap an object")
    box = page.locator("#board").bounding_box()
    assert box
    shown = [group.bounding_box() for group in page.locator("#tools > :visible").all()]
    assert len({round(group["y"] + group["height"] / 2) for group in shown if group}) == 2  # rows of tools
    page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(page.locator("#under")).to_contain_text("% painted")
    page.tap("#more-tools")
    page.tap("#grow")
    page.tap("#clear")  # closes the menu
    expect(page.locator("#rest")).to_be_hidden()
    page.tap("#undo")
    fill_settings(page)
    page.evaluate("scrollTo(0, 0)")
    page.focus("#guidance")
    field, bar = (page.locator(name).bounding_box() for name in ("#guidance", "#run"))
    assert field
    assert bar
    assert field["y"] + field["height"] <= bar["y"]  # the button stays in sight and covers no field in use
    page.tap("#run")
    expect(page.locator("#result")).to_be_visible(timeout=WAIT)
    expect(page.locator("#view")).to_be_in_viewport(ratio=0.99)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    engine = visitor.open("/engine", viewport={"width": 360, "height": 740}, is_mobile=True)
    expect(engine.locator(".worker")).to_be_visible()
    assert engine.evaluate("document.documentElement.scrollWidth") <= 360
