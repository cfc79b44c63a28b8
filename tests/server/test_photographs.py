"""Files of cameras and painting programs through a real server: large pictures, masks of all kinds, profiles, alpha."""

import base64
import io
from typing import Any

import httpx
import numpy as np
import pytest
from helpers.profiles import wide_profile
from helpers.serving import MASK, PICTURE, SIZE, Running, alpha_png, bomb, mask, picture, png
from PIL import Image

from instgenie.pictures.resizing import resize_mask, resize_picture
from instgenie.types import OwnPixels


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


def answer_of(response: httpx.Response) -> tuple[Image.Image, list[str]]:
    """The file in an answer, and the notes."""
    assert response.status_code == 200, response.text
    [one] = response.json()["data"]
    return Image.open(io.BytesIO(base64.b64decode(one["b64_json"]))), response.json()["notes"]


# profiles, alpha, metadata


def own_pixels(seed: int = 1) -> OwnPixels:
    pixels = np.random.default_rng(seed).integers(0, 256, (*SIZE, 4), np.uint8)
    pixels[:, :10, 3], pixels[:, 40:, 3] = 0, 255
    return pixels


@pytest.mark.parametrize("output_format", ["png", "webp"])
@pytest.mark.parametrize("channels", [3, 4])
def test_profile_alpha_and_metadata_survive_and_so_does_every_bit_outside_the_mask(
    server: Running, output_format: str, channels: int
) -> None:
    exif = Image.Exif()
    exif[0x010F] = "Maker"
    exif.get_ifd(0x8825)[1] = "N"
    own = np.ascontiguousarray(own_pixels()[..., :channels])
    image = encode(Image.fromarray(own), icc_profile=wide_profile(), exif=exif.tobytes())
    answer, notes = answer_of(post(server, image, MASK, output_format=output_format, feather="2"))
    assert notes == []
    assert answer.info["icc_profile"] == wide_profile()
    assert answer.getexif()[0x010F] == "Maker"
    assert 0x8825 not in answer.getexif()
    assert np.array_equal(np.array(answer)[~mask()], own[~mask()])
    assert not np.array_equal(np.array(answer)[mask()], own[mask()])
    if channels == 4:
        assert (np.array(answer)[14:22, 14:30, 3] == 255).all()  # well inside the mask


def test_a_partial_picture_has_the_file_s_own_pixels_too(server: Running) -> None:
    own = own_pixels()
    image = encode(Image.fromarray(own), icc_profile=wide_profile())
    response = post(server, image, MASK, stream="true", partial_images="1", num_inference_steps="2")
    events = [line for line in response.text.splitlines() if line.startswith("data: {")]
    assert len(events) == 2
    for event in events:
        encoded = httpx.Response(200, text=event.removeprefix("data: ")).json()["b64_json"]
        assert np.array_equal(np.array(Image.open(io.BytesIO(base64.b64decode(encoded))))[~mask()], own[~mask()])


def test_a_jpeg_of_a_transparent_picture_says_that_it_is_white(server: Running) -> None:
    answer, notes = answer_of(post(server, encode(Image.fromarray(own_pixels())), MASK, output_format="jpeg"))
    assert answer.mode == "RGB"
    assert notes == ["A JPEG has no transparency: transparent parts of the picture are white."]


def test_metadata_is_dropped_on_request(server: Running) -> None:
    exif = Image.Exif()
    exif[0x010F] = "Maker"
    answer, _ = answer_of(post(server, encode(Image.fromarray(picture()), exif=exif.tobytes()), MASK, metadata="none"))
    assert not answer.getexif()


def test_what_is_not_kept_is_refused_or_said(server: Running) -> None:
    deep = encode(Image.fromarray(np.zeros(SIZE, np.uint16)))
    refused = post(server, deep, MASK)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "image")
    assert "16 bits per channel" in refused.text
    frames = [Image.fromarray(picture(seed)) for seed in range(2)]
    _, notes = answer_of(post(server, encode(frames[0], save_all=True, append_images=frames[1:]), MASK))
    assert notes == ["The picture is animated: its first frame is edited."]
    _, notes = answer_of(post(server, encode(frames[0], icc_profile=b"x" * 200), MASK))
    assert notes == ["The picture's colour profile is ignored: it is damaged."]


# masks


def test_masks_of_painting_programs(server: Running) -> None:
    """White on black, twice the size, and as a photograph is stored that is shown turned."""
    usual, _ = answer_of(post(server, PICTURE, MASK))
    luma, notes = answer_of(post(server, PICTURE, png(mask().astype(np.uint8) * 255)))
    assert np.array_equal(np.array(luma), np.array(usual))
    assert "its white part is edited" in notes[0]
    large = alpha_png(mask().repeat(2, axis=0).repeat(2, axis=1))
    scaled, notes = answer_of(post(server, PICTURE, large))
    assert np.array_equal(np.array(scaled), np.array(usual))
    assert notes == ["The mask was scaled from 112x80 to 56x40."]
    exif = Image.Exif()
    exif[0x0112] = 6
    turned, notes = answer_of(post(server, encode(Image.fromarray(picture()), exif=exif.tobytes()), MASK))
    assert turned.size == (40, 56)
    changed = (np.array(turned) != np.rot90(picture(), -1)).any(axis=2)
    assert not changed[~np.rot90(mask(), -1)].any()
    assert changed[np.rot90(mask(), -1)].mean() > 0.9
    assert "turned like the picture" in notes[0]


# sizes


def test_a_size_of_another_shape_never_squashes(server: Running) -> None:
    contained, notes = answer_of(post(server, PICTURE, MASK, size="112x112"))
    assert contained.size == (112, 112)
    inner, outside = resize_picture(picture(), (80, 112)), ~resize_mask(mask(), (80, 112))
    assert np.array_equal(np.array(contained)[16:96][outside], inner[outside])
    assert "the borders up to 112x112 were painted" in notes[0]
    covered, notes = answer_of(post(server, PICTURE, MASK, size="80x80", fit="cover"))
    assert covered.size == (80, 80)
    inner, outside = resize_picture(picture()[:, 8:48], (80, 80)), ~resize_mask(mask()[:, 8:48], (80, 80))
    assert np.array_equal(np.array(covered)[outside], inner[outside])
    assert "of 56x40, 40x40, was cut out" in notes[0]
    refused = post(server, PICTURE, alpha_png(np.eye(*SIZE, k=48, dtype=np.bool_)), size="80x80", fit="cover")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "mask")


def test_a_template_of_a_file_with_a_profile_says_what_its_edits_lose(server: Running) -> None:
    image = encode(Image.fromarray(own_pixels()), icc_profile=wide_profile())
    with server.http() as client:
        made = client.post("/v1/templates", files={"image": image}, data={"num_inference_steps": "1"})
    assert made.status_code == 201, made.text
    assert "sRGB" in made.json()["notes"][0]
