"""Requests with several pictures, for a model that looks at others beside the edited one; and what models can do."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from helpers.serving import MASK, PICTURE, QUICK, Running, picture, png, running_server

from instgenie.pictures.picture import open_picture
from instgenie.server.runs import DepositedRequest, read_request
from instgenie.types import Pixels

FIELDS = {"prompt": "a red cat", "feather": "0"} | {name: str(value) for name, value in QUICK.items()}
OTHERS = [("image[]", png(picture(seed))) for seed in (7, 8)]


@pytest.fixture(scope="module")
def kontext(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with a model of large tokens, since a Flux works at 1024 pixels."""
    import torch
    from helpers import families

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("kontext")
    families.kontext(families.tiny_autoencoder(4, num_levels=5)).save_pretrained(folder / "model")
    with running_server(folder, str(folder / "model")) as running:
        yield running


def post(server: Running, files: list[tuple[str, bytes]], **fields: str) -> httpx.Response:
    with server.http() as client:
        return client.post("/v1/images/edits", files=files, data=FIELDS | fields)


def pixels_of(answer: httpx.Response) -> Pixels:
    assert answer.status_code == 200, answer.text
    return open_picture(base64.b64decode(answer.json()["data"][0]["b64_json"]))


def test_the_first_picture_is_edited_and_the_second_is_looked_at(kontext: Running) -> None:
    plain, *others = [
        pixels_of(post(kontext, [("image[]", PICTURE), *reference, ("mask", MASK)]))
        for reference in ([], OTHERS[:1], OTHERS[1:])
    ]
    original, mask = open_picture(PICTURE), np.array(open_picture(MASK)).any(axis=2)
    changed = [(one != original).any(axis=2) for one in (plain, *others)]
    assert all(one.shape == original.shape for one in others)
    assert len({one.tobytes() for one in (plain, *others)}) == 3
    outside = np.logical_and.reduce([~one for one in changed])
    assert outside.any()
    assert mask.shape == outside.shape


def test_pictures_in_json_are_read_in_their_order(kontext: Running) -> None:
    urls = [f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in (PICTURE, OTHERS[0][1])]
    fields = {"prompt": "a red cat", "feather": 0, **QUICK}
    with kontext.http() as client:
        mask = f"data:image/png;base64,{base64.b64encode(MASK).decode()}"
        answer = client.post("/v1/images/edits", json=fields | {"images": urls, "mask": mask})
    expected = pixels_of(post(kontext, [("image", PICTURE), OTHERS[0], ("mask", MASK)]))
    assert np.array_equal(pixels_of(answer), expected)


def test_more_pictures_than_the_model_takes(kontext: Running) -> None:
    answer = post(kontext, [("image[]", PICTURE), *OTHERS])
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "image")
    assert error["message"] == "There are 3 images: this model edits the first and looks at 1 other at most."


def test_a_reference_that_is_no_picture(kontext: Running) -> None:
    answer = post(kontext, [("image[]", PICTURE), ("image[]", b"no picture")])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "image")


def test_a_template_is_one_picture(kontext: Running) -> None:
    with kontext.http() as client:
        answer = client.post("/v1/templates", files=[("image", PICTURE), *OTHERS])
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "There are 3 images: a template is one picture."


def test_a_template_is_of_no_use_to_an_edit_with_a_reference(kontext: Running) -> None:
    answer = post(kontext, [("image", PICTURE), OTHERS[0], ("mask", MASK)], reuse="template")
    assert answer.status_code == 400
    assert "it has a reference picture, and templates are registered without" in answer.json()["error"]["message"]


def test_an_edit_without_a_mask_reads_the_picture_from_its_template(kontext: Running) -> None:
    """All of it is computed; what the model sees beside it is not."""
    answer = post(kontext, [("image", PICTURE)], reuse="template", num_inference_steps="4")
    summary = answer.json()["data"][0]
    assert "There is no mask, so the whole picture was edited: a mask keeps what is outside." in answer.json()["notes"]
    assert summary["cache_tier"] is not None
    assert summary["masked_share"] == 1


def describe(server: Running) -> Any:
    with server.http() as client:
        return client.get("/v1/models").json()["data"][0]


def test_models_say_what_they_can(kontext: Running, server: Running) -> None:
    assert describe(kontext) | {"id": ""} == {
        "id": "",
        "object": "model",
        "created": 0,
        "owned_by": "instgenie",
        "family": "flux",
        "abilities": {
            "mask": True,
            "max_references": 1,
            "negative_prompt": True,
            "native_size": "1024x1024",
            "size_multiple": 32,
            "max_side": 4096,
            "steps": 28,
            "guidance_scale": 3.5,
        },
    }
    assert describe(server)["abilities"]["max_references"] == 0


def test_a_request_is_deposited_with_all_its_pictures() -> None:
    given = DepositedRequest("EditFields", {"prompt": "a"}, b"one", None, (b"two", b"three"))
    read = read_request(given.frames())
    assert (read.image, read.mask, read.references) == (b"one", None, (b"two", b"three"))
