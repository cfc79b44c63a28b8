"""ControlNets over HTTP: named in requests, listed, guided by images of several kinds, and refused."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from helpers.serving import ALICE, MASK, PICTURE, SIZE, Running, pixels_of, running_server

from instgenie.pictures.picture import encode_picture

if TYPE_CHECKING:
    from helpers.browser import Visitor
    from playwright.sync_api import Browser

    from instgenie.models.model import Model

FIELDS = {"prompt": "a red cat", "num_inference_steps": "4", "seed": "5", "reuse": "off"}


def noise(size: tuple[int, int] = SIZE) -> bytes:
    return encode_picture(np.random.default_rng(9).integers(0, 256, (*size, 3), dtype=np.uint8), "PNG")


def data_url(picture: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


@pytest.fixture(scope="module")
def server(
    folders: dict[str, Path], models: "dict[str, Model]", tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    from helpers.controlnets import save_controlnet

    folder = tmp_path_factory.mktemp("controlnets")
    nets = {"edges": models["sd_fill"], "pose": models["sd_fill"], "other": models["sdxl"]}
    flags = []
    for seed, (name, model) in enumerate(nets.items()):
        flags += ["--controlnet-modules", f"{name}={save_controlnet(folder / name, model, seed)}"]
    keys = ["--api-key", ALICE, "--served-model-name", "tiny"]
    with running_server(folder, str(folders["sd_fill"]), *flags, *keys) as running:
        yield running


def edit(server: Running, controls: Any = None, files: list[bytes] | None = None, **fields: Any) -> httpx.Response:
    given = {"controls": json.dumps(controls)} if controls is not None else {}
    parts = [("image", PICTURE), ("mask", MASK), *(("control_image[]", file) for file in files or ())]
    with server.http() as client:
        return client.post("/v1/images/edits", files=parts, data=FIELDS | given | fields)


def error(answer: httpx.Response, status: int = 400) -> dict[str, str]:
    assert answer.status_code == status, answer.text
    found: dict[str, str] = answer.json()["error"]
    return found


def test_images_come_as_files_as_urls_or_are_made_here(server: Running) -> None:
    plain = pixels_of(edit(server))
    one = {"name": "edges", "scale": 0.8, "start": 0, "end": 0.5}
    as_file, as_url = edit(server, [one], [noise()]), edit(server, [one | {"image": data_url(noise())}])
    made, json_body = edit(server, [{"name": "edges", "image": "canny"}]), None
    assert [answer.status_code for answer in (as_file, as_url, made)] == [200, 200, 200], as_file.text
    assert np.array_equal(pixels_of(as_file), pixels_of(as_url))
    pictures = [plain, pixels_of(as_file), pixels_of(made)]
    assert not any(np.array_equal(a, b) for i, a in enumerate(pictures) for b in pictures[:i])
    said = "The ControlNet 'edges' guided steps 1 to 2 of 4 with the image that was sent, at a scale of 0.8."
    assert said in as_file.json()["notes"]
    said = "The ControlNet 'edges' guided all 4 steps with the edges of the picture, made here, at a scale of 1."
    assert said in made.json()["notes"]
    encoded = data_url(PICTURE), data_url(MASK)
    with server.http() as client:
        body = {"image": encoded[0], "mask": encoded[1], "prompt": "a red cat", "num_inference_steps": 4, "seed": 5}
        body |= {"reuse": "off", "controls": [one | {"image": data_url(noise())}]}
        json_body = client.post("/v1/images/edits", json=body)
    assert np.array_equal(pixels_of(json_body), pixels_of(as_url))


def test_two_controlnets_guide_one_edit(server: Running) -> None:
    both = edit(server, [{"name": "edges", "image": "canny"}, {"name": "pose", "scale": 0.5}], [noise()])
    assert both.status_code == 200, both.text
    assert sum("guided all 4 steps" in note for note in both.json()["notes"]) == 2
    none = edit(server, [{"name": "edges", "image": "canny", "start": 0.1, "end": 0.2}])
    assert any("guided none of the 4 steps" in note for note in none.json()["notes"])
    assert np.array_equal(pixels_of(none), pixels_of(edit(server)))


def test_an_image_of_another_size_and_of_another_shape(server: Running) -> None:
    height, width = SIZE
    assert edit(server, [{"name": "edges"}], [noise((2 * height, 2 * width))]).status_code == 200
    message = error(edit(server, [{"name": "edges"}], [noise((64, 64))]))["message"]
    assert message == f"The control image is 64x64, the picture {width}x{height}: the same shape is expected."


@pytest.mark.parametrize(
    ("controls", "num_files", "status", "message"),
    [
        ([{"name": "nobody", "image": "canny"}], 0, 404, "'nobody' does not exist: 'edges', 'other', 'pose' are known"),
        ([{"name": "other", "image": "canny"}], 0, 400, "does not fit the model: its cross_attention_dim is 48"),
        ([{"name": "edges", "image": "depth"}], 0, 400, "would need a depth estimator"),
        ([{"name": "edges", "image": "sketch"}], 0, 400, "a file or a data: URL of a picture is expected"),
        ([{"name": "edges"}], 0, 400, "1 of the 1 controls have no image, and there are 0 files"),
        ([{"name": "edges", "image": "canny"}], 1, 400, "0 of the 1 controls have no image, and there are 1 files"),
        ([{"name": "edges", "image": "canny", "scale": 11}], 0, 400, "a scale from -10 to 10"),
        ([{"name": "edges", "image": "canny", "start": 0.5, "end": 0.5}], 0, 400, "not 0.5 and 0.5"),
        ([{"name": "edges", "image": "canny"}] * 5, 0, 400, "at most 4 ControlNets"),
        ([{"name": "edges", "image": "canny", "mode": 3}], 0, 400, "it knows one kind of image alone"),
        ([{"image": "canny"}], 0, 400, "each is expected to be"),
        ([{"name": "edges", "image": "http://a/b.png"}], 0, 400, "the server fetches none"),
    ],
)
def test_refusals(server: Running, controls: Any, num_files: int, status: int, message: str) -> None:
    found = error(edit(server, controls, [noise()] * num_files), status)
    assert message in found["message"]
    assert found["param"] == "controls"


def test_models_lists_controlnets(server: Running) -> None:
    with server.http() as client:
        listed = {one["id"]: one for one in client.get("/v1/models").json()["data"]}
        assert client.get("/v1/models/pose").json()["parent"] == "tiny"
        [service] = client.get("/status").json()["services"]
    assert set(listed) == {"tiny", "edges", "pose", "other"}
    assert listed["edges"]["root"] == "edges"
    assert (service["role"], service["state"], service["num_restarts"]) == ("controlnet", "ready", 0)


def test_controlnets_are_listed_with_whether_they_fit(server: Running) -> None:
    with server.http() as client:
        answer = client.get("/v1/controlnets").json()
    assert answer["object"] == "list"
    listed = {one["id"]: one for one in answer["data"]}
    assert {name: one["fits"] for name, one in listed.items()} == {"edges": True, "other": False, "pose": True}
    assert {one["num_modes"] for one in listed.values()} == {None}
    assert listed["edges"]["num_bytes"] > 1000
    assert (listed["edges"]["object"], listed["edges"]["parent"]) == ("controlnet", "tiny")
    with httpx.Client(base_url=server.url) as stranger:
        assert stranger.get("/v1/controlnets").status_code == 401


def test_a_generation_follows_an_image(server: Running) -> None:
    body = {"prompt": "a red cat", "size": f"{SIZE[1]}x{SIZE[0]}", "num_inference_steps": 2, "seed": 5}
    controls = [{"name": "edges", "image": data_url(noise())}]
    with server.http() as client:
        plain = client.post("/v1/images/generations", json=body)
        guided = client.post("/v1/images/generations", json=body | {"controls": controls})
        refused = client.post("/v1/images/generations", json=body | {"controls": [{"name": "edges", "image": "canny"}]})
    assert guided.status_code == 200, guided.text
    assert not np.array_equal(pixels_of(plain), pixels_of(guided))
    assert "no picture whose edges could be drawn" in error(refused)["message"]


@pytest.fixture
def visitor(browser: "Browser", server: Running) -> "Iterator[Visitor]":
    from helpers.browser import Visitor

    visitor = Visitor(browser, server.url, ALICE)
    yield visitor
    visitor.close()
    assert visitor.faults == []


def test_controlnets_on_the_page(visitor: "Visitor") -> None:
    """They are chosen from a list, follow the picture's edges or an image of the user's, for a part of the steps, are
    named beside the result, and outlive a reload."""
    from helpers.browser import PAGE_SIZE, WAIT, drag, fill_settings, open_picture_on, sent_forms
    from playwright.sync_api import expect

    page = visitor.open()
    open_picture_on(page)
    drag(page, (0.4, 0.4), (0.6, 0.6))
    offered = ["Add a ControlNet", "edges", "pose"]  # not the one that does not fit
    expect(page.locator("#add-control option")).to_have_text(offered)
    page.select_option("#add-control", "edges")
    page.select_option("#add-control", "pose")
    page.get_by_label("Scale of edges").fill("0.8")
    page.get_by_label("End of edges").fill("50")
    page.get_by_label("Start of edges").fill("70")  # not before its end: it does not count
    expect(page.get_by_label("Start of edges")).to_have_attribute("aria-invalid", "true")
    page.get_by_label("Start of edges").fill("0")
    sent = noise(PAGE_SIZE)
    with page.expect_file_chooser() as chooser:
        page.get_by_label("Image for pose", exact=True).select_option("own")
    expect(page.get_by_label("Image for pose", exact=True)).to_have_value("canny")  # until there is one
    chooser.value.set_files({"name": "pose.png", "mimeType": "image/png", "buffer": sent})
    expect(page.get_by_label("Image for pose", exact=True)).to_have_value("own")
    expect(page.get_by_label("Choose another image for pose")).to_be_visible()
    fill_settings(page, steps=2)
    page.click("#run")
    expect(page.locator("#facts")).to_contain_text("edges × 0.8, pose × 1", timeout=WAIT)
    expect(page.locator("#facts")).to_contain_text("'edges' guided steps 1 to 1 of 2 with the edges of the picture")
    expect(page.locator("#facts")).to_contain_text("'pose' guided all 2 steps with the image that was sent")
    [form] = sent_forms(page)
    assert json.loads(form["controls"]) == [
        {"name": "edges", "scale": 0.8, "start": 0, "end": 0.5, "image": "canny"},
        {"name": "pose", "scale": 1, "start": 0, "end": 1},
    ]
    assert form["control_image[]"] == sent
    page.get_by_label("Remove pose").click()
    page.wait_for_timeout(600)  # the page keeps its settings
    page.reload()
    expect(page.locator("#controls li")).to_have_count(1)
    expect(page.get_by_label("Scale of edges")).to_have_value("0.8")
    expect(page.get_by_label("End of edges")).to_have_value("50")
    page.click("#strip button")
    page.click("#again")  # the settings of the result
    expect(page.locator("#controls li")).to_have_count(2)
    expect(page.get_by_label("Choose another image for pose")).to_be_visible()
