"""Takes the screenshot of the engine page with deadlines, from a real server with the built-in model. From the root of
the repository:

    PYTHONPATH=tests python -m helpers.engine_shot [--output docs/engine-deadlines.png] [--model builtin]

A batch of two is kept busy by long edits, and urgent edits with deadlines come in between.
"""

import argparse
import tempfile
import threading
from pathlib import Path

from playwright.sync_api import expect

from helpers.browser import Visitor, running_browser
from helpers.screenshots import WAIT, save
from helpers.serving import Running, alpha_png, edit, mask, picture, png, register, running_server, wait_for

SIDE = 256
PHOTO, MASK = png(picture(1, (SIDE, SIDE))), alpha_png(mask((SIDE, SIDE)))
STEPS = 28


def send(server: Running, **fields: int) -> threading.Thread:
    given = {"num_inference_steps": STEPS} | fields
    return threading.Thread(target=edit, args=(server,), kwargs={"image": PHOTO, "mask": MASK, "extra_body": given})


def main() -> None:
    parser = argparse.ArgumentParser(description="Take the screenshot of the engine page with deadlines.")
    parser.add_argument("--output", type=Path, default=Path("docs/engine-deadlines.png"))
    parser.add_argument("--model", default="builtin")
    options = parser.parse_args()
    flags = ("--no-register-examples", "--no-auto-register", "--max-batch-size", "2")
    with (
        tempfile.TemporaryDirectory() as temporary,
        running_server(Path(temporary), options.model, *flags) as server,
        running_browser() as browser,
    ):
        register(server, PHOTO, num_inference_steps=str(STEPS))
        engine = Visitor(browser, server.url).open("/engine", viewport={"width": 1280, "height": 800})
        first = send(server, deadline_ms=60_000)
        first.start()
        first.join()
        alone = server.metric("instgenie:e2e_request_latency_seconds_sum")
        batch = [send(server, num_inference_steps=8 * STEPS), send(server, deadline_ms=round(20_000 * alone))]
        for thread in batch:
            thread.start()
        wait_for(lambda: server.metric("instgenie:num_requests_running") >= 2)
        urgent = []
        for factor in (4, 6):
            urgent.append(send(server, deadline_ms=round(1000 * factor * alone), priority=-1))
            urgent[-1].start()
            expect(engine.locator("#preempted li").nth(len(urgent) - 1)).to_be_visible(timeout=WAIT)
        engine.wait_for_timeout(1000)
        save(engine, options.output)
        for thread in (*batch, *urgent):
            thread.join()


if __name__ == "__main__":
    main()
