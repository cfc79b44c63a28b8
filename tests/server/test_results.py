"""Results on the edit page: variants, comparing, using one again, what survives a reload, what a dead server leaves."""

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.relay import relayed
from helpers.serving import ALICE, Running

pytest.importorskip("playwright", reason="playwright is not installed")

from helpers.browser import (
    WAIT,
    Visitor,
    drag,
    fill_settings,
    masked_percent,
    open_picture_on,
    record_progress,
    sent_forms,
)
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from instgenie.types import Pixels


def painted(visitor: Visitor, steps: int = 1, **fields: str) -> Page:
    page = visitor.open()
    open_picture_on(page)
    drag(page, (0.45, 0.4), (0.55, 0.5), (0.45, 0.6))
    fill_settings(page, steps=steps, **fields)
    return page


def run(page: Page) -> None:
    page.click("#run")
    expect(page.locator("#result")).to_be_visible(timeout=WAIT)


def board(page: Page) -> Pixels:
    """Return the pixels of the part of the stage that shows the picture."""
    page.wait_for_timeout(100)
    url = page.evaluate("document.getElementById('board').toDataURL()")
    content = base64.b64decode(url.partition(",")[2])
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGBA"))


def test_four_variants_stand_side_by_side_and_nothing_moves(visitor: Visitor) -> None:
    page = visitor.open()
    open_picture_on(page)
    place = page.locator("#board").bounding_box()
    page.keyboard.press("s")
    assert page.locator("#board").bounding_box() == place
    page.keyboard.press("b")
    drag(page, (0.45, 0.4), (0.55, 0.5), (0.45, 0.6))
    assert page.locator("#board").bounding_box() == place
    fill_settings(page, steps=40)
    page.click("#count")
    page.keyboard.type("4")  # takes the place of the 1
    record_progress(page)
    page.click("#run")
    expect(page.locator("#progress")).to_be_visible()
    assert page.locator("#board").bounding_box() == place
    expect(page.locator("#result")).to_be_visible(timeout=WAIT)
    assert "Receiving 4 of 4" in page.evaluate("window.told")
    assert page.locator("#board").bounding_box() == place
    cells = page.locator("#grid .cell")
    expect(cells).to_have_count(4)
    expect(page.locator("#view")).to_have_attribute("data-mode", "grid")
    boxes = [cell.bounding_box() for cell in cells.all()]
    assert len({box["x"] for box in boxes if box}) == len({box["y"] for box in boxes if box}) == 2
    frame, caption = (cells.nth(0).locator(part).bounding_box() for part in ("canvas", ".caption"))
    assert frame
    assert caption
    assert frame["y"] + frame["height"] <= caption["y"]  # no text over the picture
    cells.nth(2).click()
    expect(page.locator("#view")).to_have_attribute("data-mode", "compare")
    assert page.locator("#board").bounding_box() == place
    expect(page.locator("#facts")).to_contain_text("Seed9")
    expect(page.locator("#facts")).to_contain_text(f"Painted{masked_percent(page)} %")  # one figure in both places
    page.get_by_label("All").check()
    expect(cells.nth(2)).to_have_attribute("aria-pressed", "true")


def test_removing_needs_no_prompt(visitor: Visitor) -> None:
    page = painted(visitor)
    page.fill("#prompt", "")
    page.click("#remove")
    expect(page.locator("#result")).to_be_visible(timeout=WAIT)
    [form] = sent_forms(page)
    assert form["prompt"] == b"an empty background"
    assert form["masked_content"] == b"surroundings"


def test_each_result_begins_with_the_same_split(visitor: Visitor) -> None:
    page = painted(visitor)
    run(page)
    split = page.get_by_label("Before and after")
    first = split.input_value()
    split.fill("100")
    run(page)
    expect(page.locator("#strip button")).to_have_count(2)
    assert split.input_value() == first


def test_cancel_brings_the_earlier_result_back(visitor: Visitor) -> None:
    page = painted(visitor)
    run(page)
    page.fill("#steps", "400")
    page.click("#run")
    expect(page.locator("#stage-name")).to_contain_text("of 400", timeout=WAIT)
    expect(page.locator("#strip [aria-current=true]")).to_have_count(0)
    page.click("#strip button")  # during the run
    expect(page.locator("#result")).to_be_visible()
    expect(page.locator("#view")).to_have_attribute("data-mode", "compare")
    page.click("#cancel")
    expect(page.locator("#run")).to_be_visible()
    expect(page.locator("#result")).to_be_visible()
    page.click("#run")
    expect(page.locator("#stage-name")).to_contain_text("of 400", timeout=WAIT)
    page.click("#cancel")
    expect(page.locator("#result")).to_be_visible()
    expect(page.locator("#view")).to_have_attribute("data-mode", "compare")
    expect(page.locator("#strip [aria-current=true]")).to_have_count(1)


def test_the_difference_is_black_where_nothing_was_painted(visitor: Visitor) -> None:
    page = painted(visitor)
    run(page)
    page.get_by_label("Difference").check()
    seen = board(page)
    inside = seen[seen[..., 3] == 255]
    rows, columns = np.nonzero(seen[..., 3] == 255)
    share = len(inside) and float((inside[:, :3].max(axis=1) > 0).mean())
    assert 0 < share < 0.3
    corner = seen[rows.min() : rows.min() + 40, columns.min() : columns.min() + 40, :3]
    assert not corner.any()


def test_hold_to_see_the_original(visitor: Visitor) -> None:
    page = painted(visitor)
    run(page)
    page.get_by_label("Before and after").fill("100")
    original = board(page)
    page.get_by_label("Difference").check()
    page.focus("#board")
    page.keyboard.down("\\")
    held = board(page)
    page.keyboard.up("\\")
    assert not np.array_equal(board(page), held)
    assert (held == original).mean() > 0.9  # all but the line and its labels
    page.locator("#original").dispatch_event("pointerdown")
    assert np.array_equal(board(page), held)
    page.locator("#original").dispatch_event("pointerup")
    assert not np.array_equal(board(page), held)


def test_seed_settings_and_mask_of_a_result_are_used_again(visitor: Visitor) -> None:
    page = painted(visitor, guidance="3")
    page.fill("#seed", "")
    run(page)
    masked = masked_percent(page)
    page.fill("#prompt", "something else")
    page.fill("#guidance", "5")
    page.click("#modes label >> nth=0")
    page.click("#clear")
    page.click("#again")
    expect(page.locator("#under")).to_contain_text(f"{masked} % painted")
    assert [page.input_value(f"#{name}") for name in ("prompt", "guidance", "steps")] == ["a red cat", "3", "1"]
    run(page)
    expect(page.locator("#strip button")).to_have_count(2)
    first, second = sent_forms(page)
    assert "seed" not in first
    assert second["seed"].decode() in page.locator("#facts").inner_text()
    assert first["mask"] == second["mask"]


def test_settings_travel_in_the_file_and_in_the_address(visitor: Visitor, tmp_path: Path) -> None:
    page = painted(visitor)
    run(page)
    with page.expect_download() as download:
        page.click("#download")
    file = tmp_path / "result.png"
    download.value.save_as(file)
    with Image.open(file) as opened:
        inside = json.loads(opened.text["instgenie"])  # type: ignore[attr-defined]
    assert inside == {"prompt": "a red cat", "seed": "7", "num_inference_steps": "1", "n": "1"}
    with page.expect_download() as download:
        page.click("#jpeg")
    assert download.value.suggested_filename == "photo-7.jpg"
    with Image.open(download.value.path()) as opened:
        assert (opened.format, opened.size) == ("JPEG", (128, 96))
    expect(page).to_have_url(re.compile(r"#.*steps=1"))
    other = visitor.open(page.url.removeprefix(visitor.url))
    expect(other.locator("#prompt")).to_have_value("a red cat")
    expect(other.locator("#seed")).to_have_value("7")
    third = visitor.open()
    third.set_input_files("#file", file)
    third.get_by_role("button", name="Use them").click()
    expect(third.locator("#prompt")).to_have_value("a red cat")


def test_a_reload_loses_nothing(visitor: Visitor) -> None:
    page = painted(visitor, count="2")
    run(page)
    masked = masked_percent(page)
    page.wait_for_timeout(1000)
    page.reload()
    expect(page.locator("#strip button")).to_have_count(2, timeout=WAIT)
    expect(page.locator("#under")).to_contain_text("photo.png, 128 × 96")
    assert masked_percent(page) == masked
    expect(page.locator("#prompt")).to_have_value("a red cat")
    page.click("#strip button >> nth=1")
    expect(page.locator("#facts")).to_contain_text("Seed8")
    page.click("#recent")
    expect(page.locator("#suggestions li")).to_have_text(["a red cat"])
    page.keyboard.press("Escape")
    run(page)  # and go on
    expect(page.locator("#strip button")).to_have_count(4)
    page.click("#forget")
    expect(page.locator("#strip button")).to_have_count(0)
    page.wait_for_timeout(500)
    page.reload()
    expect(page.locator("#strip")).to_have_attribute("data-state", "restored")
    expect(page.locator("#strip button")).to_have_count(0)


def test_a_second_tab_has_a_session_of_its_own(visitor: Visitor) -> None:
    context = visitor.browser.new_context()
    context.add_init_script(f"sessionStorage.setItem('instgenie.key', '{ALICE}')")
    page, other = context.new_page(), context.new_page()
    page.goto(visitor.url)
    open_picture_on(page)
    page.wait_for_timeout(800)
    other.goto(visitor.url)
    expect(other.locator("#strip")).to_have_attribute("data-state", "restored")
    expect(other.locator("#empty")).to_be_visible()
    page.close()
    other.close()
    third = context.new_page()  # goes on where the last tab was left
    third.goto(visitor.url)
    expect(third.locator("#under")).to_contain_text("photo.png")


def test_a_browser_that_keeps_nothing_is_said(visitor: Visitor) -> None:
    page = visitor.open()
    page.add_init_script("delete window.indexedDB; window.indexedDB = undefined;")
    page.reload()
    expect(page.locator("#notice")).to_contain_text("a reload loses picture, mask and results")


def test_a_word_about_an_empty_mask_goes_when_something_is_painted(visitor: Visitor) -> None:
    page = visitor.open()
    open_picture_on(page)
    page.fill("#prompt", "a red cat")
    page.click("#run")
    expect(page.locator("#error")).to_contain_text("Nothing is painted")
    drag(page, (0.4, 0.4), (0.6, 0.6))
    expect(page.locator("#error")).to_be_empty()


def test_an_unknown_word_is_named_and_nothing_moves(visitor: Visitor) -> None:
    page = painted(visitor)
    before = page.locator("#steps").bounding_box()
    page.fill("#prompt", "a cat with a zeppelin")
    expect(page.locator("#unknown")).to_have_text("The model does not know “zeppelin”.")
    assert page.locator("#steps").bounding_box() == before
    page.fill("#prompt", "a cat")
    expect(page.locator("#unknown")).to_be_empty()


def test_a_slow_link_says_that_it_receives(visitor: Visitor) -> None:
    page = painted(visitor)
    record_progress(page)
    link = page.context.new_cdp_session(page)
    link.send("Network.enable")
    slow = {"offline": False, "latency": 50, "downloadThroughput": 30_000, "uploadThroughput": 200_000}
    link.send("Network.emulateNetworkConditions", slow)
    run(page)
    assert "Receiving" in page.evaluate("window.told")


def test_a_dead_server_is_said_and_a_new_one_is_found(server: Running, browser: Browser) -> None:
    with relayed(server.url) as relay:
        visitor = Visitor(browser, relay.url, ALICE)
        page = painted(visitor, steps=400)
        page.click("#run")
        expect(page.locator("#stage-name")).to_contain_text("of 400", timeout=WAIT)
        relay.cut()
        expect(page.locator("#error")).to_contain_text("The server stopped answering", timeout=WAIT)
        expect(page.locator("#server")).to_have_attribute("data-state", "error")
        assert masked_percent(page) > 0
        relay.listen()
        expect(page.locator("#server")).to_have_attribute("data-state", "ready", timeout=WAIT)
        expect(page.locator("#notice")).to_have_text("The server is back.")
        page.fill("#steps", "1")
        run(page)
        visitor.close()
