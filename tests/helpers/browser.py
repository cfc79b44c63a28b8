"""A headless Chromium for tests of the pages, a visitor that notes every fault, and the actions of a user."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from helpers.serving import picture, png
from instgenie.pictures.picture import open_picture
from instgenie.types import Pixels

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
EXECUTABLE = next((found for name in NAMES if (found := shutil.which(name))), None)

PAGE_SIZE = (96, 128)  # (height, width) of the picture that is edited
PAGE_PICTURE = {"name": "photo.png", "mimeType": "image/png", "buffer": png(picture(3, PAGE_SIZE))}
WAIT = 120_000  # milliseconds that a busy machine may take for a run
expect.set_options(timeout=30_000)

KEEP_FORMS = """
window.sentForms = [];
const { fetch } = window;
window.fetch = (path, options = {}) => {
    if (options.body instanceof FormData) window.sentForms.push(options.body);
    return fetch(path, options);
};
"""


@contextmanager
def running_browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=EXECUTABLE, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@dataclass
class Visitor:
    """Opens pages and collects their console errors and their requests to other hosts."""

    browser: Browser
    url: str
    key: str | None = None  # already known to the pages; None: they ask for one if the server needs it
    faults: list[str] = field(default_factory=list)

    def open(self, path: str = "/", **options: Any) -> Page:
        still = {"reduced_motion": "reduce"}  # what moves would be drawn again and again
        page = self.browser.new_page(**({"viewport": {"width": 1280, "height": 800}} | still | options))
        page.on("console", self.on_console)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("request", self.on_request)
        page.add_init_script(KEEP_FORMS)
        if self.key:
            page.add_init_script(f"sessionStorage.setItem('instgenie.key', '{self.key}')")
        page.goto(self.url + path)
        return page

    def on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(message.text)

    def on_request(self, request: Request) -> None:
        if not request.url.startswith((f"{self.url}/", "blob:", "data:")):
            self.faults.append(f"a request to {request.url}")

    def close(self) -> None:
        for context in self.browser.contexts:
            context.close()


def sent_forms(page: Page) -> list[dict[str, bytes]]:
    """Return the parts of every form that the page has sent."""
    forms = page.evaluate("""() => Promise.all(window.sentForms.map(async (form) => {
        const parts = [];
        for (const [name, value] of form) {
            parts.push([name, [...new Uint8Array(await new Blob([value]).arrayBuffer())]]);
        }
        return parts;
    }))""")
    return [{name: bytes(value) for name, value in form} for form in forms]


def open_picture_on(page: Page) -> None:
    page.set_input_files("#file", PAGE_PICTURE)
    expect(page.locator("#under")).to_contain_text("photo.png, 128 × 96")


def drag(page: Page, *points: tuple[float, float]) -> None:
    """Drag over the canvas through points given as shares of its sides."""
    box = page.locator("#board").bounding_box()
    assert box
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=5)
    page.mouse.up()


def masked_percent(page: Page) -> int:
    found = re.search(r"(\d+) % painted", page.locator("#under").inner_text())
    return int(found[1]) if found else 0


def fill_settings(page: Page, prompt: str = "a red cat", steps: int = 4, **fields: str) -> None:
    page.fill("#prompt", prompt)
    for name, value in ({"steps": str(steps), "seed": "7"} | fields).items():
        page.fill(f"#{name}", value)


def record_progress(page: Page) -> None:
    """Collect the texts of the progress line in `window.told`."""
    page.evaluate("""() => {
        window.told = [];
        const place = document.getElementById("stage-name");
        new MutationObserver(() => window.told.push(place.textContent)).observe(place, {childList: true});
    }""")


@contextmanager
def timed_tasks(page: Page) -> Iterator[list[float]]:
    """Time the tasks of the page's main thread while the block runs: the list has the milliseconds of each, in which
    the thread computed. Other processes, which may take the core away meanwhile, do not lengthen them."""
    browser = page.context.browser
    assert browser
    browser.start_tracing(page=page, categories=["toplevel"])
    milliseconds: list[float] = []
    yield milliseconds
    events = json.loads(browser.stop_tracing())["traceEvents"]
    main = {(one["pid"], one["tid"]) for one in events if one["args"].get("name") == "CrRendererMain"}
    tasks = [one for one in events if one["name"].endswith("RunTask") and (one["pid"], one["tid"]) in main]
    milliseconds += [task["tdur"] / 1000 for task in tasks if "tdur" in task]


def downloaded(page: Page) -> Pixels:
    with page.expect_download() as download:
        page.click("#download")
    return np.asarray(open_picture(Path(download.value.path()).read_bytes()))
