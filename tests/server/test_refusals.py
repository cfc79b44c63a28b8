"""Requests that are refused: each error names the field, and has the type and code OpenAI's clients expect."""

from typing import Any

import numpy as np
import openai
import pytest
from helpers.serving import PICTURE, SIZE, Running, alpha_png, edit, mask, picture, png

BIG = {"prompt": "x" * 32_001}


BAD_EDITS: dict[str, tuple[dict[str, Any], str, str]] = {
    "not a picture": ({"image": b"hello"}, "image", "invalid_value"),
    "an empty file": ({"image": b""}, "image", "invalid_value"),
    "half a picture": ({"image": PICTURE[:500]}, "image", "invalid_value"),
    "one pixel": ({"image": png(picture(size=(1, 1)))}, "image", "invalid_value"),
    "two pictures": ({"image": [PICTURE, PICTURE]}, "image", "invalid_value"),
    "mask without alpha": ({"mask": PICTURE}, "mask", "invalid_value"),
    "mask of another size": ({"mask": alpha_png(mask((41, 56)))}, "mask", "invalid_value"),
    "mask that masks nothing": ({"mask": alpha_png(~np.ones(SIZE, np.bool_))}, "mask", "invalid_value"),
    "mask that is no picture": ({"mask": b"hello"}, "mask", "invalid_value"),
    "long prompt": (BIG, "prompt", "invalid_value"),
    "no pictures": ({"n": 0}, "n", "invalid_value"),
    "too many pictures": ({"n": 11}, "n", "invalid_value"),
    "half a picture asked for": ({"n": 1.5}, "n", "invalid_value"),
    "tiny size": ({"size": "1x1"}, "size", "invalid_value"),
    "huge size": ({"size": "9999x9999"}, "size", "invalid_value"),
    "no size": ({"size": "large"}, "size", "invalid_value"),
    "quality": ({"quality": "superb"}, "quality", "invalid_value"),
    "format": ({"output_format": "gif"}, "output_format", "invalid_value"),
    "partials without stream": ({"partial_images": 1}, "partial_images", "invalid_value"),
    "too many partials": ({"partial_images": 4, "stream": True}, "partial_images", "invalid_value"),
    "seed": ({"extra_body": {"seed": -2}}, "seed", "invalid_value"),
    "seeds beyond the last": ({"extra_body": {"seed": 2**63 - 1}, "n": 2}, "seed", "invalid_value"),
    "steps": ({"extra_body": {"num_inference_steps": 1001}}, "num_inference_steps", "invalid_value"),
    "guidance": ({"extra_body": {"guidance_scale": "nan"}}, "guidance_scale", "invalid_value"),
    "strength": ({"extra_body": {"strength": 0}}, "strength", "invalid_value"),
    "masked content": ({"extra_body": {"masked_content": "fill"}}, "masked_content", "invalid_value"),
    "no surroundings": (
        {"mask": alpha_png(np.ones(SIZE, np.bool_)), "extra_body": {"masked_content": "surroundings"}},
        "masked_content",
        "invalid_value",
    ),
    "mask mode": ({"extra_body": {"mask_mode": "red"}}, "mask_mode", "invalid_value"),
    "feather": ({"extra_body": {"feather": 257}}, "feather", "invalid_value"),
    "misspelt": ({"extra_body": {"num_inference_step": 3}}, "num_inference_step", "unknown_parameter"),
    "image and template": ({"extra_body": {"template": "x"}}, "template", "invalid_value"),
}


@pytest.mark.parametrize("name", BAD_EDITS)
def test_bad_edits(server: Running, name: str) -> None:
    fields, param, code = BAD_EDITS[name]
    with pytest.raises(openai.BadRequestError) as refused:
        edit(server, **fields)
    body = refused.value.body
    assert isinstance(body, dict)
    assert (body["type"], body["param"], body["code"]) == ("invalid_request_error", param, code)
    assert body["message"].endswith((".", "?"))
    assert refused.value.request_id


def test_a_missing_field_is_named(server: Running) -> None:
    with server.http() as client:
        for fields, param in (({"prompt": "a"}, "image"), ({"n": 1}, "prompt")):
            answer = client.post("/v1/images/edits", json=fields)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param)
            assert error["code"] == "missing_required_parameter"


def test_a_strict_server_refuses_other_models(narrow: Running) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        edit(narrow, model="gpt-image-1")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


def test_a_deadline_that_cannot_be_met(server: Running) -> None:
    hopeless = {"num_inference_steps": 999, "deadline_ms": 1500, "on_late": "reject"}
    with pytest.raises(openai.APIStatusError) as refused:
        edit(server, extra_body=hopeless)
    assert (refused.value.status_code, refused.value.code) == (408, "deadline_unreachable")
    assert refused.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.APIError, match="deadline"):
        list(edit(server, stream=True, extra_body=hopeless))


def test_progress_needs_a_stream(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="Progress events need"):
        edit(server, extra_body={"stream_progress": True})


def test_a_template_needs_a_picture(server: Running) -> None:
    with server.http() as client:
        for files, fields in (
            ({"image": b"x"}, {}),
            ({}, {"num_inference_steps": "2"}),
            ({"image": PICTURE}, {"n": "1"}),
        ):
            answer = client.post("/v1/templates", files=files or {"none": b""}, data=fields)
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_unknown_routes_and_methods(server: Running) -> None:
    with server.http() as client:
        lost, wrong = client.get("/v1/images/dreams"), client.put("/v1/templates")
        assert (lost.status_code, lost.json()["error"]["code"]) == (404, "route_not_found")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
        assert wrong.headers["allow"] == "GET, POST"
