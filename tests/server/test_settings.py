"""The settings of the edit page: one table makes controls, request, address and help."""

from typing import Any

import pytest
from helpers.serving import Running

pytest.importorskip("playwright", reason="playwright is not installed")

from helpers.browser import WAIT, Visitor, drag, fill_settings, open_picture_on, sent_forms
from playwright.sync_api import Page, expect

from instgenie.server.bodies.fields import EditFields


def table(page: Page) -> list[dict[str, Any]]:
    return page.evaluate("import('/static/fields.js').then(({ FIELDS }) => FIELDS)")  # type: ignore[no-any-return]


def test_every_entry_is_a_field_of_the_api_with_help(visitor: Visitor, server: Running) -> None:
    page = visitor.open()
    entries = table(page)
    assert {entry["name"] for entry in entries} <= set(EditFields.model_fields)
    for entry in entries:
        if entry["kind"] != "own":
            assert entry["help"], entry
            expect(page.locator(f"#{entry['id']}")).to_have_count(1)
    with server.http() as client:
        limits = client.get("/page/facts").json()["fields"]
    assert set(limits) == set(EditFields.model_fields)
    assert limits["strength"] == {"minimum": 0, "maximum": 1}
    assert limits["num_inference_steps"]["own"] > 0
    expect(page.locator("#feather")).to_have_attribute("max", "64")
    for panel in ("#lora-panel", "#control-panel"):  # this server has neither
        expect(page.locator(panel)).to_be_hidden()
    expect(page.locator("#guidance")).to_have_attribute("max", f"{limits['guidance_scale']['maximum']:g}")


def test_only_what_was_changed_is_sent(visitor: Visitor) -> None:
    page = visitor.open()
    open_picture_on(page)
    drag(page, (0.4, 0.4), (0.6, 0.6))
    page.click(".more summary")
    fill_settings(page, steps=1, negative="rain", strength="0.5")
    page.click("#run")
    expect(page.locator("#result")).to_be_visible(timeout=WAIT)
    [form] = sent_forms(page)
    sent = {name: value.decode() for name, value in form.items() if name not in ("image", "mask")}
    asked = {
        "prompt": "a red cat",
        "seed": "7",
        "num_inference_steps": "1",
        "negative_prompt": "rain",
        "strength": "0.5",
    }
    streamed = {"stream": "true", "stream_progress": "true", "partial_images": "3"}
    assert sent == asked | streamed


def test_help_opens_and_closes_by_keyboard(visitor: Visitor) -> None:
    page = visitor.open()
    page.get_by_label("About Steps").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#steps-help")).to_contain_text("How often the picture is refined")
    page.keyboard.press("Enter")
    expect(page.locator("#steps-help")).to_be_hidden()


def test_a_field_that_the_server_does_not_know_is_not_shown(visitor: Visitor) -> None:
    page = visitor.open()
    expect(page.locator("#server")).to_have_text("tiny")
    shown = page.evaluate("""async () => {
        const { Settings } = await import('/static/settings.js');
        const { FIELDS } = await import('/static/fields.js');
        for (const place of document.querySelectorAll('[data-fields]')) place.replaceChildren();
        FIELDS.push({ name: 'sparkle', id: 'sparkle', label: 'Sparkle', kind: 'number', place: 'main' });
        const settings = new Settings(() => {});
        settings.write({ sparkle: '3' });
        const look = () => [!document.getElementById('sparkle').closest('.field').hidden, settings.read().sparkle];
        settings.learn({ prompt: {} });
        const before = look();
        settings.learn({ prompt: {}, sparkle: { minimum: 1, maximum: 2 } });
        return [before, look(), settings.mistake()];
    }""")
    mistake = ["Sparkle: a number from 1 to 2 is expected.", "sparkle"]
    assert shown == [[False, None], [True, "3"], mistake]
