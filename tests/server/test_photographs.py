"""Files of cameras and painting programs through a real server: large pictures, masks of all kinds, profiles, alpha."""

import io
from typing import Any

import httpx
import numpy as np
from helpers.serving import Running, bomb
from PIL import Image


def encode(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    encoded = io.BytesIO()
    image.save(encoded, file_format, **options)
    return encoded.getvalue()


def post(server: Running, image: bytes, mask: bytes | None = None, **fields: str) -> httpx.Response:
    files = {"image": image} | ({"mask": mask} if mask else {})
    data = {"prompt": "a cat", "num_inference_steps": "1", "seed": "5"} | fields
    with server.http() as client:
        return client.post("/v1/images/edits", files=files, data=data)


def test_pictures_of_todays_cameras_are_accepted(server: Running) -> None:
    image = encode(Image.fromarray(np.zeros((4000, 6000), np.uint8)))
    masked = np.zeros((4000, 6000), np.uint8)
    masked[:100, :100] = 255
    answer = post(server, image, encode(Image.fromarray(masked)), mask_mode="luma", output_format="jpeg")
    assert answer.status_code == 200, answer.text
    assert answer.json()["size"] == "6000x4000"


def test_a_picture_that_is_too_large_names_the_limit_and_its_option(server: Running) -> None:
    refused = post(server, bomb(6400))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "image")
    assert "6400x6400" in refused.text
    assert "40,000,000 (the server's option --max-megapixels)" in refused.text
