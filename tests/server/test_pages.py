"""Both pages: accessibility, colours, the key, the engine page, the size of their files."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.serving import ALICE, Running, edit, picture, png, wait_for

from instgenie.pictures.examples import THUMBNAIL
from instgenie.server.routes.pages import FILES
from instgenie.server.routes.suggestions import suggested_examples

pytest.importorskip("playwright", reason="playwright is not installed")

from helpers.browser import PAGE_PICTURE, PAGE_SIZE, WAIT, Visitor, drag, fill_settings, open_picture_on
from playwright.sync_api import Browser, expect

MAX_WEIGHT = 350_000
MAX_THUMBNAILS = 60_000


def test_every_control_has_a_name(visitor: Visitor) -> None:
    for path in ("/", "/engine"):
        page = visitor.open(path)
        if path == "/":
            open_picture_on(page)
        for control in page.locator("button, input, select, textarea, canvas").all():
            if control.is_visible():
                expect(control).to_have_accessible_name(re.compile(r"\S"))


def test_light_and_dark_colours(visitor: Visitor) -> None:
    colours = [
        visitor.open(color_scheme=scheme).evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in ("light", "dark")
    ]
    assert colours == ["rgb(245, 245, 242)", "rgb(19, 20, 23)"]


def test_the_engine_page_shows_the_running_job(visitor: Visitor) -> None:
    engine, page = visitor.open("/engine"), visitor.open()
    open_picture_on(page)
    drag(page, (0.4, 0.4), (0.6, 0.6))
    fill_settings(page, steps=400)
    page.click("#run")
    jobs = engine.locator(".jobs li")
    expect(jobs).to_have_count(1, timeout=WAIT)
    expect(jobs).to_contain_text("of 400")
    expect(jobs).to_contain_text("blocks cached")
    assert engine.locator(".blocks i").count() > 0
    expect(engine.locator("#running")).to_have_text("1")
    page.click("#cancel")
    expect(jobs).to_have_count(0)


def test_the_engine_page_shows_who_made_way_for_whom(visitor: Visitor, server: Running) -> None:
    """A full batch runs, and an urgent edit with a deadline takes the place of one of its jobs."""
    engine = visitor.open("/engine")
    expect(engine.locator("#order")).to_have_text(re.compile("No edit has left a batch"))
    long = {"num_inference_steps": 60}
    with ThreadPoolExecutor(1) as pool:
        full = pool.submit(edit, server, n=8, extra_body=long)
        wait_for(lambda: server.metric("instgenie:num_requests_running") == 8)
        expect(engine.locator(".slack").first).to_have_text("no deadline")
        urgent = {"num_inference_steps": 2, "priority": -1, "deadline_ms": 60_000}
        edit(server, extra_body=urgent)
        expect(engine.locator("#preempted li").first).to_contain_text(re.compile("ago.*for", re.DOTALL))
        expect(engine.locator("#order")).to_be_hidden()
        assert sum(picture.num_preemptions for picture in full.result().data) >= 1
    expect(engine.locator("#met")).to_have_text("100 %")


def test_templates_are_registered_and_removed(visitor: Visitor) -> None:
    page = visitor.open("/engine")
    page.click("#add")
    expect(page.locator("#error")).to_have_text("Choose a picture to register.")
    file = PAGE_PICTURE | {"buffer": png(picture(8, PAGE_SIZE))}
    page.set_input_files("#picture", file)
    page.fill("#steps", "5")
    page.click("#add")
    row = page.locator("#templates li:has-text('5 steps')")
    expect(row).to_contain_text("ready", timeout=WAIT)
    row.locator("button").click()
    expect(row).to_have_count(0)


def test_the_key_is_asked_for_once_and_kept_for_the_tab(browser: Browser, server: Running) -> None:
    visitor = Visitor(browser, server.url)
    page = visitor.open()
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    expect(page.locator("dialog .error")).to_contain_text("does not know that key")
    page.fill("#key", ALICE)
    page.keyboard.press("Enter")
    expect(page.locator("#server")).to_have_text("tiny")
    page.goto(server.url + "/engine")
    expect(page.locator("#server")).to_contain_text("float32")
    expect(page.locator("dialog")).to_have_count(0)
    assert page.evaluate("[sessionStorage['instgenie.key'], localStorage.length]") == [ALICE, 0]
    visitor.close()


def test_the_pages_files_are_small() -> None:
    own = {name: file for name, file in FILES.items() if not name.startswith("examples/")}
    assert sum(len(file.content) for file in own.values()) < MAX_WEIGHT
    assert all(file.media_type != "application/octet-stream" for file in FILES.values())
    assert sum(len(file.content) for name, file in FILES.items() if name.endswith(THUMBNAIL)) < MAX_THUMBNAILS


def test_the_page_is_given_every_file_of_the_examples_and_no_other() -> None:
    named = {
        f"examples/{name}"
        for one in suggested_examples()
        for name in (one["picture"], one["mask"], one["name"] + THUMBNAIL)
    }
    assert {name for name in FILES if name.startswith("examples/")} == named
