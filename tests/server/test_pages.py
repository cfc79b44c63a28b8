"""The pages as people meet them: a real server, a real browser, a tiny model."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.serving import ALICE, Running, picture, png, running_server
from PIL import Image

pytest.importorskip("playwright", reason="the pages are not tested: playwright is not installed")

from helpers.browser import EXECUTABLE, Visitor, running_browser, sent_forms
from playwright.sync_api import Browser, Page, expect

from instgenie.pictures.mask import read_mask
from instgenie.pictures.picture import open_picture
from instgenie.server.routes.pages import FILES

pytestmark = pytest.mark.skipif(
    EXECUTABLE is None, reason="the pages are not tested: no Chromium was found (apt-get install chromium)"
)

SIZE = (96, 128)  # (height, width) of the picture that is edited
PICTURE = {"name": "photo.png", "mimeType": "image/png", "buffer": png(picture(3, SIZE))}
MAX_WEIGHT = 300_000
MAX_LONG_TASK = 200  # milliseconds
WAIT = 30_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as running:
        yield running


@pytest.fixture(scope="module")
def page_server(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Of a model that comes with a list of prompts."""
    folder = tmp_path_factory.mktemp("known")
    shutil.copytree(folders["sd_fill"], folder / "tiny")
    builtin = Path(__file__).parent.parent.parent / "instgenie" / "models" / "builtin"
    shutil.copy(builtin / "prompts.json", folder / "tiny")
    with running_server(folder, str(folder / "tiny")) as running:
        yield running


@pytest.fixture
def visitor(browser: Browser, page_server: Running) -> Iterator[Visitor]:
    """Nothing may fail in the console, and no other host may be asked."""
    visitor = Visitor(browser, page_server.url)
    yield visitor
    visitor.close()
    assert visitor.faults == []


def open_picture_on(page: Page) -> None:
    page.set_input_files("#file", PICTURE)
    expect(page.locator("#under")).to_contain_text("photo.png, 128 × 96")


def drag(page: Page, *points: tuple[float, float]) -> None:
    """Over the canvas, in shares of its sides."""
    box = page.locator("#board").bounding_box()
    assert box
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=5)
    page.mouse.up()


def masked_percent(page: Page) -> int:
    found = re.search(r"(\d+) % masked", page.locator("#under").inner_text())
    return int(found[1]) if found else 0


def wish(page: Page, prompt: str = "a red cat", steps: int = 4, **fields: str) -> None:
    page.fill("#prompt", prompt)
    for name, value in ({"steps": str(steps), "seed": "7"} | fields).items():
        page.fill(f"#{name}", value)


def record_progress(page: Page) -> None:
    page.evaluate("""() => {
        window.told = [];
        const place = document.getElementById("stage-name");
        new MutationObserver(() => window.told.push(place.textContent)).observe(place, {childList: true});
    }""")


def downloaded(page: Page) -> np.ndarray:
    with page.expect_download() as download:
        page.click("#download")
    return np.asarray(open_picture(Path(download.value.path()).read_bytes()))


def test_paint_run_and_get_a_picture(visitor: Visitor) -> None:
    page = visitor.open()
    open_picture_on(page)
    drag(page, (0.45, 0.4), (0.55, 0.5), (0.45, 0.6))
    wish(page)
    record_progress(page)
    page.click("#run")
    expect(page.locator("#result")).to_be_visible(timeout=WAIT)
    told = page.evaluate("window.told")
    assert told[0] == "Sending"
    assert {"Step 1 of 4", "Step 4 of 4"} <= set(told)
    assert any(text in told for text in ("Next in line", "Waiting: 1 before you"))
    [form] = sent_forms(page)
    mask = read_mask(form["mask"], SIZE)
    assert mask[SIZE[0] // 2, SIZE[1] // 2]
    assert not mask[0].any()
    assert form["prompt"] == b"a red cat"
    result, source = downloaded(page), picture(3, SIZE)
    assert np.array_equal(result[~mask], source[~mask])
    assert not np.array_equal(result[mask], source[mask])


def test_beside_the_result_stands_how_it_was_made(visitor: Visitor) -> None:
    page = visitor.open()
    open_picture_on(page)
    drag(page, (0.45, 0.4), (0.55, 0.5))
    wish(page, count="2")
    page.click("#run")
    expect(page.locator("#facts")).to_contain_text("tokens at each step", timeout=WAIT)
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


def test_partial_pictures_show_on_the_way(visitor: Visitor) -> None:
    page = visitor.open()
    open_picture_on(page)
    drag(page, (0.4, 0.4), (0.6, 0.6))
    wish(page, steps=400)
    page.click("#run")
    expect(page.locator("#view")).to_have_attribute("data-mode", "partial", timeout=WAIT)
    page.click("#cancel")
    expect(page.locator("#run")).to_be_visible()
    expect(page.locator("#view")).to_have_attribute("data-mode", "mask")


def test_cancel_ends_the_job(visitor: Visitor, page_server: Running) -> None:
    page = visitor.open()
    open_picture_on(page)
    drag(page, (0.4, 0.4), (0.6, 0.6))
    wish(page, steps=400)
    before = page_server.metric("instgenie:request_success_total")
    page.click("#run")
    expect(page.locator("#stage-name")).to_contain_text("of 400", timeout=WAIT)
    page.click("#cancel")
    expect(page.locator("#run")).to_be_visible()
    expect(page.locator("#error")).to_be_hidden()
    for _ in range(100):
        if page_server.metric("instgenie:num_requests_running") == 0:
            break
        page.wait_for_timeout(100)
    assert page_server.metric("instgenie:request_success_total") == before + 1


@pytest.mark.parametrize(
    ("name", "kind", "content", "message"),
    [
        ("notes.txt", "text/plain", b"hello", "notes.txt is not a picture this server takes"),
        ("broken.png", "image/png", png(picture())[:60], "broken.png cannot be opened"),
        ("large.png", "image/png", png(np.zeros((4200, 4200, 3), np.uint8)), "large.png has 17.6 megapixels"),
    ],
    ids=["text", "damaged", "large"],
)
def test_a_bad_file_is_said_where_it_was_dropped(
    visitor: Visitor, name: str, kind: str, content: bytes, message: str
) -> None:
    page = visitor.open()
    expect(page.locator("#examples button")).to_have_count(4)
    page.set_input_files("#file", {"name": name, "mimeType": kind, "buffer": content})
    expect(page.locator("#picture-error")).to_contain_text(message)
    expect(page.locator("#empty")).to_be_visible()


def test_what_is_missing_is_said_before_anything_is_sent(visitor: Visitor) -> None:
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
    wish(page, steps=0)
    page.click("#run")
    expect(error).to_have_text("Steps: a number from 1 to 1000 is expected.")
    expect(page.locator("#steps")).to_be_focused()
    assert sent_forms(page) == []


def test_what_the_server_refuses_is_shown(visitor: Visitor) -> None:
    page = visitor.open()
    open_picture_on(page)
    drag(page, (0.4, 0.4), (0.6, 0.6))
    wish(page)
    page.evaluate("document.getElementById('quality').selectedOptions[0].value = 'splendid'")
    page.click("#run")
    expect(page.locator("#error")).to_contain_text("The field 'quality' is 'splendid'", timeout=WAIT)
    expect(page.locator("#run")).to_be_visible()
    visitor.faults.clear()  # the browser notes the status 400


def test_tools_paint_erase_undo_and_redo(visitor: Visitor) -> None:
    page = visitor.open()
    open_picture_on(page)
    page.keyboard.press("r")
    drag(page, (0.3, 0.2), (0.7, 0.8))
    box = masked_percent(page)
    assert 20 < box < 60
    page.keyboard.press("e")
    drag(page, (0.3, 0.5), (0.7, 0.5))
    erased = masked_percent(page)
    assert 0 < erased < box
    page.keyboard.press("l")
    drag(page, (0.3, 0.4), (0.7, 0.4), (0.7, 0.6), (0.3, 0.6))
    assert masked_percent(page) > erased
    page.click("#undo")
    page.keyboard.press("Control+z")
    assert masked_percent(page) == box
    page.keyboard.press("Control+Shift+z")
    assert masked_percent(page) == erased
    page.click("#invert")
    assert masked_percent(page) == pytest.approx(100 - erased, abs=1)
    page.click("#clear")
    assert masked_percent(page) == 0
    page.keyboard.press("Control+z")
    assert masked_percent(page) == pytest.approx(100 - erased, abs=1)


def test_zoom_changes_the_view_and_not_the_mask(visitor: Visitor) -> None:
    page = visitor.open()
    open_picture_on(page)
    page.keyboard.press("r")
    drag(page, (0.4, 0.4), (0.6, 0.6))
    before = masked_percent(page)
    page.click("#zoom-in")
    page.mouse.wheel(0, -300)
    assert masked_percent(page) == before
    drag(page, (0.4, 0.4), (0.6, 0.6))  # smaller than it looks, and inside the other box
    assert masked_percent(page) == before
    page.click("#fit")
    drag(page, (0.3, 0.3), (0.6, 0.6))
    assert masked_percent(page) > before


def test_keyboard_only(visitor: Visitor) -> None:
    page = visitor.open()
    expect(page.locator("#examples button")).to_have_count(4)
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "daisies":
            break
    page.keyboard.press("Enter")
    expect(page.locator("#under")).to_contain_text("daisies.png, 256 × 256")
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


def test_chips_offer_what_the_model_knows(visitor: Visitor) -> None:
    page = visitor.open()
    page.click(".chip:has-text('flowers')")
    expect(page.locator("#suggestions li")).to_have_count(5)
    page.click("#suggestions li:has-text('tulip')")
    assert page.input_value("#prompt") == "a photo of a tulip"


def test_a_phone(visitor: Visitor) -> None:
    page = visitor.open(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    open_picture_on(page)
    box = page.locator("#board").bounding_box()
    assert box
    page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(page.locator("#under")).to_contain_text("% masked")
    wish(page)
    page.tap("#run")
    expect(page.locator("#result")).to_be_visible(timeout=WAIT)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    engine = visitor.open("/engine", viewport={"width": 360, "height": 740}, is_mobile=True)
    expect(engine.locator(".worker")).to_be_visible()
    assert engine.evaluate("document.documentElement.scrollWidth") <= 360


def test_every_control_has_a_name(visitor: Visitor) -> None:
    for path in ("/", "/engine"):
        page = visitor.open(path)
        if path == "/":
            open_picture_on(page)
        for control in page.locator("button, input, select, textarea, canvas").all():
            if control.is_visible():
                snapshot = control.aria_snapshot()
                assert re.search(r'"[^"]+"', snapshot), control.evaluate("it => it.outerHTML")


def test_light_and_dark(visitor: Visitor) -> None:
    colours = [
        visitor.open(color_scheme=scheme).evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in ("light", "dark")
    ]
    assert colours == ["rgb(245, 245, 242)", "rgb(19, 20, 23)"]


def test_the_engine_page_shows_the_running_job(visitor: Visitor) -> None:
    engine, page = visitor.open("/engine"), visitor.open()
    open_picture_on(page)
    drag(page, (0.4, 0.4), (0.6, 0.6))
    wish(page, steps=400)
    page.click("#run")
    jobs = engine.locator(".jobs li")
    expect(jobs).to_have_count(1, timeout=WAIT)
    expect(jobs).to_contain_text("of 400")
    expect(jobs).to_contain_text("blocks cached")
    assert engine.locator(".blocks i").count() > 0
    expect(engine.locator("#running")).to_have_text("1")
    page.click("#cancel")
    expect(jobs).to_have_count(0)


def test_templates_are_registered_and_removed(visitor: Visitor) -> None:
    page = visitor.open("/engine")
    page.click("#add")
    expect(page.locator("#error")).to_have_text("Choose a picture to register.")
    file = PICTURE | {"buffer": png(picture(8, SIZE))}
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
    assert page.evaluate("[Object.values(sessionStorage), localStorage.length]") == [[ALICE], 0]
    visitor.close()


def test_painting_a_large_photograph_keeps_the_page_responsive(visitor: Visitor, tmp_path: Path) -> None:
    """The machine may be busy with other things: one try of three has to be free of long tasks."""
    noise = Image.fromarray(picture(5, (300, 400))).resize((4000, 3000))
    photograph = tmp_path / "large.jpg"
    noise.save(photograph, quality=90)
    longest = [longest_task(visitor, photograph) for _ in range(3)]
    assert min(longest) < MAX_LONG_TASK, longest


def longest_task(visitor: Visitor, photograph: Path) -> float:
    page = visitor.open()
    expect(page.locator("#examples button")).to_have_count(4)
    page.evaluate("""() => {
        window.tasks = [0];
        new PerformanceObserver((list) => window.tasks.push(...list.getEntries().map((task) => task.duration)))
            .observe({entryTypes: ["longtask"]});
    }""")
    page.set_input_files("#file", photograph)
    expect(page.locator("#under")).to_contain_text("4000 × 3000", timeout=WAIT)
    for tool in ("b", "e", "r", "l"):
        page.keyboard.press(tool)
        drag(page, (0.2, 0.3), (0.8, 0.3), (0.8, 0.7), (0.2, 0.7), (0.3, 0.4))
    page.keyboard.press("Control+z")
    page.mouse.wheel(0, -400)
    page.wait_for_timeout(200)
    duration = float(page.evaluate("Math.max(...window.tasks)"))
    page.close()
    return duration


def test_the_pages_are_light() -> None:
    own = {name: file for name, file in FILES.items() if not name.startswith("examples/")}
    assert sum(len(file.content) for file in own.values()) < MAX_WEIGHT
    assert all(file.media_type != "application/octet-stream" for file in FILES.values())
