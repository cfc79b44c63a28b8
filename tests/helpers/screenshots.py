"""Takes the screenshots of both pages for README and docs, from a real server with the built-in model. From the root of
the repository, `make screenshots` or

    PYTHONPATH=tests python -m helpers.screenshots [--output docs]
"""

import argparse
import io
import re
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect

from helpers.browser import Visitor, running_browser
from helpers.serving import running_server

WAIT = 240_000


def edit(page: Page, example: str, count: int = 1) -> None:
    """Open an example, which brings its mask and prompt, and run it."""
    page.goto(page.url)
    page.click(f".examples button:has-text('{example}')")
    page.wait_for_selector("#board:visible")
    page.fill("#count", str(count))
    page.click("#run")
    page.wait_for_selector("#result:visible", timeout=WAIT)


def await_examples(page: Page) -> None:
    """Wait until the examples are registered, so that their edits hit the cache."""
    page.wait_for_selector(".examples button")
    expect(page.locator("#warmed")).to_have_text("", timeout=WAIT)


def save(page: Page, path: Path) -> None:
    page.mouse.move(1, 1)
    page.wait_for_timeout(500)
    shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    shot.save(path, optimize=True)
    print(path, f"{path.stat().st_size:,} bytes")


def take(visitor: Visitor, scheme: str, folder: Path) -> None:
    size = {"width": 1280, "height": 800}
    page = visitor.open(color_scheme=scheme, viewport=size)
    await_examples(page)
    if scheme == "light":
        edit(page, "dune")
    else:
        edit(page, "coffee", count=4)
    save(page, folder / f"page-{scheme}.png")
    engine = visitor.open("/engine", color_scheme=scheme, viewport=size)
    page.fill("#count", "3")
    page.click("#run")
    expect(engine.locator(".jobs")).to_contain_text(re.compile(r"step ([5-9]|\d\d) of"), timeout=WAIT)
    save(engine, folder / f"engine-{scheme}.png")
    page.wait_for_selector("#result:visible", timeout=WAIT)


def take_phone(visitor: Visitor, folder: Path) -> None:
    page = visitor.open(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True, device_scale_factor=2)
    edit(page, "dune")
    page.evaluate("scrollTo(0, 0)")
    save(page, folder / "page-phone.png")


def main() -> None:
    parser = argparse.ArgumentParser(description="Take screenshots of the pages.")
    parser.add_argument("--output", type=Path, default=Path("docs"))
    folder = parser.parse_args().output
    with (
        tempfile.TemporaryDirectory() as temporary,
        running_server(Path(temporary)) as server,
        running_browser() as browser,
    ):
        visitor = Visitor(browser, server.url)
        for scheme in ("light", "dark"):
            take(visitor, scheme, folder)
            visitor.close()
        take_phone(visitor, folder)


if __name__ == "__main__":
    main()
