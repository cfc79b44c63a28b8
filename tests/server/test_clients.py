"""Requests as real clients send them: names, cases and shapes that differ from ours are read as they are meant."""

import base64
from typing import Any

import httpx
import openai
import pytest
from helpers.serving import MASK, PICTURE, QUICK, Running, alike, edit, picture, pixels, png

from instgenie.pictures.picture import open_picture
from instgenie.types import Pixels

TEXT = base64.b64encode(PICTURE).decode()
IMAGE_URL = f"data:image/png;base64,{TEXT}"
WRAPPED_URL = "data:image/png;charset=utf-8;base64,\n" + "\r\n".join(TEXT[i : i + 76] for i in range(0, len(TEXT), 76))
MASK_URL = f"data:image/png;base64,{base64.b64encode(MASK).decode()}"
FILES = {"image": PICTURE, "mask": MASK}
FIELDS = {"prompt": "a red cat"} | {name: str(value) for name, value in QUICK.items()}


def post(server: Running, path: str = "/v1/images/edits", **body: Any) -> httpx.Response:
    with server.http() as client:
        return client.post(path, **body)


def answered(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def first(response: httpx.Response) -> Pixels:
    return open_picture(base64.b64decode(answered(response)["data"][0]["b64_json"]))


@pytest.mark.parametrize(
    "fields",
    [
        {"size": "56X40"},
        {"size": " 56×40 "},
        {"width": "56", "height": "40"},
        {"output_format": "PNG", "quality": "Medium", "background": "OPAQUE"},
        {"safety_identifier": "someone", "complexity": "high", "markup": "none", "user": "someone"},
        dict.fromkeys(("size", "n", "model", "quality", "response_format", "output_format", "user"), ""),
    ],
    ids=lambda fields: " ".join(fields),
)
def test_forms_are_read_as_they_are_meant(server: Running, edited: Any, fields: dict[str, str]) -> None:
    answer = post(server, files=FILES, data=FIELDS | fields)
    assert alike(first(answer), pixels(edited))
    assert answer.json()["notes"] == []


def test_a_file_left_out_of_a_form(server: Running) -> None:
    """Browsers send the file input that nobody used as a part without name and content."""
    boundary = "x"
    parts = [
        b'name="image"; filename="a.png"\r\n\r\n' + PICTURE,
        b'name="mask"; filename=""\r\n\r\n',
        b'name="prompt"\r\n\r\na cat',
        b'name="num_inference_steps"\r\n\r\n1',
    ]
    body = b"".join(b"--x\r\ncontent-disposition: form-data; " + part + b"\r\n" for part in parts) + b"--x--\r\n"
    answer = post(server, content=body, headers={"content-type": f"multipart/form-data; boundary={boundary}"})
    assert answered(answer)["data"][0]["masked_share"] == 1


def test_a_seed_of_minus_one_is_drawn(server: Running) -> None:
    seeds = [edit(server, extra_body={"seed": -1}).data[0].seed for _ in range(2)]
    assert seeds[0] != seeds[1]
    assert min(seeds) >= 0


def test_jpg_is_jpeg(server: Running) -> None:
    answer = edit(server, output_format="JPG", response_format="url")
    assert answer.output_format == "jpeg"
    assert answer.data[0].url.startswith("data:image/jpeg;base64,/9j/")
    assert answer.data[0].b64_json is None


def test_a_url_is_a_data_url(server: Running, edited: Any) -> None:
    url = edit(server, response_format="url").data[0].url
    assert alike(open_picture(base64.b64decode(url.removeprefix("data:image/png;base64,"))), pixels(edited))


@pytest.mark.parametrize(
    "pictures",
    [
        {"image": IMAGE_URL, "mask": MASK_URL},
        {"image_url": WRAPPED_URL, "mask": MASK_URL},
        {"url": WRAPPED_URL, "mask": {"image_url": MASK_URL}},
        {"image": {"url": IMAGE_URL, "type": "image_url"}, "mask": {"url": MASK_URL}},
        {"images": [{"image_url": IMAGE_URL}], "mask": {"image_url": MASK_URL}},
        {"images": [{"type": "image_url", "image_url": {"url": WRAPPED_URL}}], "mask": MASK_URL},
    ],
    ids=["text", "image_url", "url", "object with url", "OpenAI's list", "chat's list"],
)
def test_json_bodies(server: Running, edited: Any, pictures: dict[str, Any]) -> None:
    assert alike(first(post(server, json=pictures | {"prompt": "a red cat"} | QUICK)), pixels(edited))


@pytest.mark.parametrize("name", ["image", "image[]", "image[0]", "image_url", "url", "url[]"])
def test_a_form_may_carry_a_data_url(server: Running, edited: Any, name: str) -> None:
    assert alike(first(post(server, files={"mask": MASK}, data=FIELDS | {name: WRAPPED_URL})), pixels(edited))


def test_a_data_url_may_be_longer_than_other_text(server: Running) -> None:
    large = png(picture(size=(320, 320)))
    url = f"data:image/png;base64,{base64.b64encode(large).decode()}"
    assert len(url) > 256 * 1024
    fields = {"prompt": "a cat", "num_inference_steps": "1"}
    assert answered(post(server, files={"none": ("", b"")}, data=fields | {"image_url": url}))["size"] == "320x320"
    refused = post(server, files=FILES, data=FIELDS | {"user": "x" * 300_000})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "user")


@pytest.mark.parametrize(
    ("pictures", "code"),
    [
        ({"images": [{"image_url": "https://x.test/a.png"}]}, "no_urls"),
        ({"images": [{"file_id": "file-1"}]}, "no_files"),
        ({"image": {"image_url": {"url": {"url": IMAGE_URL}}}}, "invalid_value"),
        ({"image": {"b64": TEXT}}, "invalid_value"),
        ({"image_url": "data:image/png;base64,####"}, "invalid_value"),
        ({"images": []}, "missing_required_parameter"),
    ],
)
def test_pictures_that_are_elsewhere(server: Running, pictures: dict[str, Any], code: str) -> None:
    answer = post(server, json=pictures | {"prompt": "a"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "image", code)


@pytest.mark.parametrize("num_more", [1, 15])
def test_several_pictures_are_refused_for_the_right_reason(server: Running, num_more: int) -> None:
    files = [("image", PICTURE)] + [("image[]", png(picture(seed))) for seed in range(num_more)]
    answer = post(server, files=files, data=FIELDS)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "image")
    assert error["message"] == (
        f"There are {num_more + 1} images: this model edits one picture and has no use for reference pictures."
    )


@pytest.mark.parametrize("model", ["gpt-image-1", "dall-e-2", ""])
def test_any_model_is_served_by_the_one_there_is(server: Running, edited: Any, model: str) -> None:
    answer = edit(server, model=model)
    assert alike(pixels(answer), pixels(edited))
    served = server.openai().models.list().data[0].id
    notes = [f"The model {model!r} is not served here: {served} made the picture."] if model else []
    assert answer.notes == notes


def test_half_a_size(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="a width, but no height") as refused:
        edit(server, extra_body={"width": 64})
    assert refused.value.param == "width"
    with pytest.raises(openai.BadRequestError, match="The size is 48x48, but width and height are 64x64"):
        edit(server, size="48x48", extra_body={"width": 64, "height": 64})


def test_a_wrong_size_is_explained_without_a_pattern(server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        edit(server, size="large")
    assert "The field 'size' is 'large': auto or WIDTHxHEIGHT, such as 1024x768, is expected." in str(refused.value)
