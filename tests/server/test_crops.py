"""The fields `crop` and `crop_padding` through a real server, whose model works at 32x32."""

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
from helpers.serving import Running, alpha_png, picture, png, register, wait_for
from PIL import Image

from instgenie.pictures.mask import box_mask

SIZE = (150, 220)
MASK = box_mask((90, 60, 14, 12), SIZE)
SHIFTED = box_mask((91, 60, 14, 13), SIZE)


def send(server: Running, image: bytes | None, mask: Any = MASK, **fields: str) -> Any:
    files = {"image": image} if image else {}
    files |= {"mask": alpha_png(mask)} if mask is not None else {}
    with server.http() as client:
        return client.post("/v1/images/edits", files=files, data={"prompt": "a", "num_inference_steps": "4"} | fields)


def answer(server: Running, image: bytes | None, mask: Any = MASK, **fields: str) -> Any:
    response = send(server, image, mask, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def pixels_of(encoded: str) -> Any:
    return np.array(Image.open(io.BytesIO(base64.b64decode(encoded))))


def crop_note(told: Any) -> str:
    return " ".join(note for note in told["notes"] if "crop" in note)


def test_a_large_photograph_is_edited_on_a_crop_and_the_next_edit_reuses_it(server: Running) -> None:
    original = picture(seed=401, size=SIZE)
    told = answer(server, png(original), n="2", seed="1")
    one, two = told["data"]
    assert one["crop"] == two["crop"] != None  # noqa: E711
    assert one["crop"]["width"] < 220
    assert f"A crop of {one['crop']['width']}x{one['crop']['height']} around the mask was edited" in crop_note(told)
    assert told["size"] == "220x150"
    first, second = (pixels_of(each["b64_json"]) for each in (one, two))
    for made in (first, second):
        assert np.array_equal(made[~MASK], original[~MASK])
    assert (first != second).any()
    wait_for(lambda: answer(server, png(original), SHIFTED)["data"][0]["reuse"] == "template")
    assert answer(server, png(original), SHIFTED)["data"][0]["crop"] == one["crop"]


def test_a_template_of_the_whole_picture_is_not_lost(server: Running) -> None:
    image = png(picture(seed=402, size=SIZE))
    name = register(server, image, num_inference_steps="4")
    for told in (answer(server, None, template=name), answer(server, image), answer(server, image, reuse="template")):
        assert told["data"][0]["crop"] is None
        assert told["data"][0]["reuse"] == "template"
        assert "The whole picture was edited, because" in crop_note(told)
    assert answer(server, None, template=name, crop="masked")["data"][0]["crop"]
    assert answer(server, image, reuse="off")["data"][0]["crop"]


def test_partial_pictures_show_the_whole_photograph(server: Running) -> None:
    original = picture(seed=403, size=SIZE)
    text = send(server, png(original), stream="true", partial_images="1").text
    bodies = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert [body["type"].split(".")[1] for body in bodies] == ["partial_image", "completed"]
    for body in bodies:
        assert body["size"] == "220x150"
        assert np.array_equal(pixels_of(body["b64_json"])[~MASK], original[~MASK])
    assert bodies[1]["crop"]
    assert "A crop of" in crop_note(bodies[1])


def test_a_photograph_that_exif_turns_is_cropped_upright(server: Running) -> None:
    original = picture(seed=404, size=SIZE)
    exif = Image.Exif()
    exif[274] = 6  # shown, it is turned to the right
    stored = io.BytesIO()
    Image.fromarray(np.rot90(original)).save(stored, "PNG", exif=exif.tobytes())
    told = answer(server, stored.getvalue())
    made = pixels_of(told["data"][0]["b64_json"])
    assert np.array_equal(made[~MASK], original[~MASK])
    box = told["data"][0]["crop"]
    assert box["x"] <= 90
    assert box["x"] + box["width"] >= 104


@pytest.mark.parametrize(
    ("fields", "has_crop", "says"),
    [
        ({"crop": "off"}, False, ""),
        ({"size": "440x300"}, True, "the picture of 440x300"),
        ({"size": "300x300", "fit": "contain"}, False, "fit=cover crops"),  # painted borders are a mask on all sides
        ({"crop": "MASKED", "crop_padding": "70", "strength": "0.5", "feather": "3"}, True, "A crop of"),
    ],
)
def test_crops_and_other_fields(server: Running, fields: dict[str, str], has_crop: bool, says: str) -> None:
    told = answer(server, png(picture(seed=405, size=SIZE)), **fields)
    assert (told["data"][0]["crop"] is not None) == has_crop
    assert says in crop_note(told)


def test_a_crop_that_cannot_be_made_is_said(server: Running) -> None:
    told = answer(server, png(picture(seed=406, size=SIZE)), None, crop="masked")
    assert told["data"][0]["crop"] is None
    assert "no room for a crop" in crop_note(told)


@pytest.mark.parametrize("fields", [{"crop": "middle"}, {"crop_padding": "-1"}, {"crop_padding": "4097"}])
def test_bad_values_are_refused(server: Running, fields: dict[str, str]) -> None:
    refused = send(server, png(picture(seed=407, size=SIZE)), **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(fields)))
