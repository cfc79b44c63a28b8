"""A headless Chromium for tests of the pages, and what a page must never do in it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
EXECUTABLE = next((found for name in NAMES if (found := shutil.which(name))), None)

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
        browser = playwright.chromium.launch(executable_path=EXECUTABLE, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Visitor:
    """Opens pages and remembers what went wrong in them."""

    browser: Browser
    url: str
    faults: list[str] = field(default_factory=list)

    def open(self, path: str = "/", **options: Any) -> Page:
        page = self.browser.new_page(**({"viewport": {"width": 1280, "height": 800}} | options))
        page.on("console", self.on_console)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("request", self.on_request)
        page.add_init_script(KEEP_FORMS)
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
    """The parts of every form that the page sent."""
    forms = page.evaluate("""() => Promise.all(window.sentForms.map(async (form) => {
        const parts = [];
        for (const [name, value] of form) {
            parts.push([name, [...new Uint8Array(await new Blob([value]).arrayBuffer())]]);
        }
        return parts;
    }))""")
    return [{name: bytes(value) for name, value in form} for form in forms]
