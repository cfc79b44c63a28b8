"""Edits and generations through the openai client: a real server process, a tiny model."""

import base64
import io
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from helpers.serving import MASK, PICTURE, QUICK, Running, alike, edit, mask, picture, pixels, png, register, wait_for
from PIL import Image

from instgenie.pictures.picture import open_picture
from instgenie.pictures.resizing import resize_mask, resize_picture


def test_an_edit_changes_only_masked_pixels(edited: Any) -> None:
    result = pixels(edited)
    assert np.array_equal(result[~mask()], picture()[~mask()])
    assert not np.array_equal(result[mask()], picture()[mask()])


def test_an_answer_describes_its_edit(edited: Any) -> None:
    one = edited.data[0].model_extra
    assert (edited.size, edited.output_format, edited.quality, edited.background) == (
        "56x40",
        "png",
        "medium",
        "opaque",
    )
    assert (one["seed"], one["num_attempts"], one["worker"]) == (5, 1, 0)
    assert 0 < one["num_masked_tokens"] < one["num_tokens"]
    assert one["masked_share"] == pytest.approx(one["num_masked_tokens"] / one["num_tokens"], abs=1e-3)
    assert one["cache_tier"] in ("gpu", "host")
    assert one["num_masked_tokens"] <= one["num_computed_tokens"] < one["num_tokens"]
    assert set(one["seconds"]) == {"queue", "prepare", "denoise", "finish"}
    assert all(seconds >= 0 for seconds in one["seconds"].values())
    assert one["seconds"]["denoise"] > 0
    assert edited.usage.output_tokens == one["num_masked_tokens"]
    assert edited.usage.total_tokens == edited.usage.input_tokens + edited.usage.output_tokens


def test_pictures_may_come_as_file_list_tuple_or_bytes(server: Running, edited: Any, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(PICTURE)
    with path.open("rb") as file:
        images: list[Any] = [path, file, [PICTURE], [path], ("../../x.exe", PICTURE, "text/html")]
        for image in images:
            assert alike(pixels(edit(server, image=image)), pixels(edited)), image


def test_json_with_data_urls(server: Running, edited: Any) -> None:
    image, masked = (f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in (PICTURE, MASK))
    for given in (image, [image]):
        body = {"image": given, "mask": masked, "prompt": "a red cat", "n": None, **QUICK}
        with server.http() as client:
            answer = client.post("/v1/images/edits", json=body)
        assert answer.status_code == 200, answer.text
        assert alike(open_picture(base64.b64decode(answer.json()["data"][0]["b64_json"])), pixels(edited))


def test_a_chunked_body_without_a_length(server: Running) -> None:
    request = httpx.Request(
        "POST", server.url, files={"image": PICTURE, "mask": MASK}, data={"prompt": "a cat", "num_inference_steps": "1"}
    )
    body, kind = request.read(), request.headers["content-type"]
    chunks = (body[start : start + 1000] for start in range(0, len(body), 1000))
    with server.http() as client:
        answer = client.post("/v1/images/edits", content=chunks, headers={"content-type": kind})
        assert "content-length" not in answer.request.headers
    assert answer.status_code == 200, answer.text


def test_several_pictures_have_consecutive_seeds(server: Running, edited: Any) -> None:
    four = edit(server, n=4)
    assert [one.seed for one in four.data] == [5, 6, 7, 8]
    assert alike(pixels(four), pixels(edited))
    assert alike(pixels(four, 2), pixels(edit(server, extra_body={"seed": 7})))
    assert not alike(pixels(four, 0), pixels(four, 1))


def test_without_a_seed_pictures_differ(server: Running) -> None:
    one_step = {"image": PICTURE, "prompt": "a cat", "extra_body": {"num_inference_steps": 1}}
    first, second = (server.openai().images.edit(**one_step).data[0] for _ in range(2))  # type: ignore[index,call-overload]
    assert first.seed != second.seed
    assert first.b64_json != second.b64_json


def test_alpha_and_luma_masks(server: Running, edited: Any) -> None:
    luma = png(mask().astype(np.uint8) * 255)
    assert alike(pixels(edit(server, mask=luma, extra_body={"mask_mode": "luma"})), pixels(edited))


@pytest.mark.parametrize("output_format", ["webp", "jpeg"])
def test_output_formats(server: Running, edited: Any, output_format: Any) -> None:
    answer = edit(server, output_format=output_format)
    assert answer.output_format == output_format
    data = base64.b64decode(answer.data[0].b64_json)
    assert Image.open(io.BytesIO(data)).format == output_format.upper()
    if output_format == "webp":
        assert alike(open_picture(data), pixels(edited))
        assert np.array_equal(open_picture(data)[~mask()], picture()[~mask()])
        smaller = base64.b64decode(edit(server, output_format="webp", output_compression=10).data[0].b64_json)
        assert len(smaller) < len(data)


def test_the_result_has_the_requested_size(server: Running) -> None:
    size = (60, 84)
    answer = edit(server, size="84x60")
    outside = ~resize_mask(mask(), size)
    assert answer.size == "84x60"
    assert np.array_equal(pixels(answer)[outside], resize_picture(picture(), size)[outside])


@pytest.mark.parametrize("quality", ["auto", "low", "high", "hd", "standard", "fast", "balanced", "exact"])
def test_openai_s_names_and_ours_for_qualities(server: Running, quality: Any) -> None:
    names = {"low": "low", "fast": "low", "high": "high", "hd": "high", "exact": "high"}
    assert edit(server, quality=quality, extra_body={"num_inference_steps": 1}).quality == names.get(quality, "medium")


def test_every_extension_is_accepted(server: Running) -> None:
    extra = {"guidance_scale": 3.5, "negative_prompt": "a dog", "strength": 0.9, "feather": 2, "deadline_ms": 60_000}
    answer = edit(server, extra_body=extra, user="me", background="opaque", input_fidelity="high")
    outside = ~mask()
    assert np.array_equal(pixels(answer)[outside], picture()[outside])


def test_an_edit_starts_from_the_surroundings_of_its_mask(server: Running) -> None:
    """What is masked has no say, whatever it is; with a strength of 1 it never has."""
    kept, gone = ({"masked_content": content, "seed": 3} for content in ("original", "surroundings"))
    plain, one = (edit(server, extra_body=QUICK | extra) for extra in (kept, gone))
    few = edit(server, extra_body=gone | {"num_inference_steps": 1})
    for answer in (plain, one, few):
        assert np.array_equal(pixels(answer)[~mask()], picture()[~mask()])
    assert not np.array_equal(pixels(one), pixels(plain))
    assert np.array_equal(pixels(one), pixels(edit(server, extra_body=QUICK | gone)))
    from_noise = edit(server, extra_body=QUICK | gone | {"strength": 1})
    assert np.array_equal(pixels(from_noise), pixels(plain))


def test_a_stream_shows_partial_pictures_and_ends_with_the_same_one(server: Running) -> None:
    four_steps = {"num_inference_steps": 4}
    register(server, PICTURE, num_inference_steps="4")
    events = list(edit(server, stream=True, partial_images=2, extra_body=four_steps))
    assert [event.type for event in events] == ["image_edit.partial_image"] * 2 + ["image_edit.completed"]
    assert [event.partial_image_index for event in events[:2]] == [0, 1]
    for event in events:
        assert (event.size, event.quality, event.background, event.output_format) == (
            "56x40",
            "medium",
            "opaque",
            "png",
        )
        assert np.array_equal(open_picture(base64.b64decode(event.b64_json))[~mask()], picture()[~mask()])
        assert time.time() - event.created_at < 600
    last = open_picture(base64.b64decode(events[-1].b64_json))
    assert alike(last, pixels(edit(server, extra_body=four_steps)))
    assert events[-1].usage.output_tokens == events[-1].num_masked_tokens


def test_a_stream_of_several_pictures(server: Running) -> None:
    events = list(edit(server, stream=True, n=3))
    assert sorted((event.index, event.seed) for event in events) == [(0, 5), (1, 6), (2, 7)]


def test_generations(server: Running) -> None:
    client = server.openai()
    answer = client.images.generate(prompt="a red cat", n=2, size="64x32", extra_body=QUICK)
    assert (answer.size, len(answer.data or [])) == ("64x32", 2)
    assert pixels(answer).shape == (32, 64, 3)
    events = list(client.images.generate(prompt="a red cat", stream=True, partial_images=1, extra_body=QUICK))
    assert [event.type for event in events] == ["image_generation.partial_image", "image_generation.completed"]


def test_edits_of_a_client_that_disconnects_are_cancelled(server: Running) -> None:
    cancelled = 'instgenie:request_success_total{finished_reason="abort"}'
    long_edit = {"prompt": "a cat", "num_inference_steps": "999", "n": "2"}
    for stream in ("false", "true"):
        before = server.metric(cancelled)
        with server.http() as client, pytest.raises(httpx.TimeoutException):
            client.post("/v1/images/edits", files={"image": PICTURE}, data=long_edit | {"stream": stream}, timeout=1.0)
        wait_for(lambda before=before: server.metric(cancelled) >= before + 2)  # type: ignore[misc]
    wait_for(lambda: server.metric("instgenie:num_requests_running") == 0)


def event_names(server: Running, **fields: str) -> list[str]:
    data = {"prompt": "a cat", "stream": "true", "num_inference_steps": "2", **fields}
    with server.http() as client:
        answer = client.post("/v1/images/edits", files={"image": PICTURE, "mask": MASK}, data=data)
    assert answer.status_code == 200, answer.text
    return [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]


def test_progress_events_are_sent_on_request(server: Running) -> None:
    told = event_names(server, stream_progress="true")
    assert told[0] == "instgenie.queued"
    assert told.count("instgenie.step") == 2
    assert told[-1] == "image_edit.completed"
    assert event_names(server) == ["image_edit.completed"]
