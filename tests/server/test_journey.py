"""One journey over the edit page, at a desk and on a phone in the dark: from the file to the last result."""

from typing import Any

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

from helpers.browser import WAIT, Visitor, masked_percent
from helpers.scene import BALL, await_strokes, middle, open_scene, overlap, place, press_tool, saved_mask, truth
from playwright.sync_api import Page, expect

DEVICES: dict[str, dict[str, Any]] = {
    "desk": {},
    "phone in the dark": {
        "viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "color_scheme": "dark",
    },
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_from_the_file_to_the_last_result(visitor: Visitor, device: str) -> None:
    page = open_scene(visitor, **DEVICES[device])
    press = page.tap if "has_touch" in DEVICES[device] else page.click
    select_the_ball(page, press)
    press_tool(page, "#grow")
    await_strokes(page, 2)
    masked = masked_percent(page)
    page.fill("#prompt", "a red cat")
    for name, value in (("steps", "1"), ("seed", "5"), ("count", "4")):
        page.fill(f"#{name}", value)
    press("summary:has-text('More settings')")
    page.get_by_label("Model sees", exact=True).select_option("Only around the mask")
    press("#run")
    expect(page.locator("#result")).to_be_visible(timeout=WAIT)
    expect(page.locator("#grid .cell")).to_have_count(4)
    press("#grid .cell >> nth=1")
    expect(page.locator("#view")).to_have_attribute("data-mode", "compare")
    press("#again")
    expect(page.locator("#seed")).to_have_value("6")
    page.wait_for_timeout(1000)  # what the page keeps is written a moment later
    page.reload()
    expect(page.locator("#strip button")).to_have_count(4, timeout=WAIT)
    assert masked_percent(page) == masked
    page.fill("#steps", "400")
    press("#run")
    expect(page.locator("#stage-name")).to_contain_text("of 400", timeout=WAIT)
    press("#cancel")
    expect(page.locator("#run")).to_be_visible()
    expect(page.locator("#strip button")).to_have_count(4)
    width = page.evaluate("innerWidth")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def select_the_ball(page: Page, press: Any) -> None:
    press("[name=tool][value=select]")
    at = place(page, *middle(BALL))
    if press == page.tap:
        page.touchscreen.tap(*at)
    else:
        page.mouse.click(*at)
    await_strokes(page, 1)
    assert overlap(saved_mask(page), truth(ball=True)) > 0.75
