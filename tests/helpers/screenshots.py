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

WAIT = 120_000


def edit(page: Page, example: str, prompt: str, count: int = 1) -> None:
    page.goto(page.url)
    page.click(f".examples button:has-text('{example}')")
    page.wait_for_selector("#board:visible")
    start(page, prompt, count)
    page.wait_for_selector("#result:visible", timeout=WAIT)


def start(page: Page, prompt: str, count: int) -> None:
    page.fill("#prompt", prompt)
    page.fill("#count", str(count))
    page.click("#run")


def save(page: Page, path: Path) -> None:
    """Save a screenshot with a palette, which keeps flat colours and takes a third of the bytes."""
    page.mouse.move(1, 1)
    page.wait_for_timeout(500)
    shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    shot.quantize(256, dither=Image.Dither.FLOYDSTEINBERG).save(path, optimize=True)
    print(path, f"{path.stat().st_size:,} bytes")


def take(visitor: Visitor, scheme: str, folder: Path) -> None:
    size = {"width": 1280, "height": 800}
    page = visitor.open(color_scheme=scheme, viewport=size)
    edit(page, "coffee", "a photo of a daisy")
    page.wait_for_timeout(8000)  # time to register the picture, so that the next edit hits the cache
    start(page, "a photo of a Pug dog", 1)
    page.wait_for_selector("#result:visible", timeout=WAIT)
    save(page, folder / f"page-{scheme}.png")
    engine = visitor.open("/engine", color_scheme=scheme, viewport=size)
    start(page, "a photo of a Pomeranian dog", 3)
    expect(engine.locator(".jobs")).to_contain_text(re.compile(r"step ([5-9]|\d\d) of"), timeout=WAIT)
    save(engine, folder / f"engine-{scheme}.png")
    page.wait_for_selector("#result:visible", timeout=WAIT)


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


if __name__ == "__main__":
    main()
