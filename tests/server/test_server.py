"""The server as users of the openai client meet it: a real process, a real client, a tiny model."""

import base64
import io
import json
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from helpers.serving import ALICE, BOB, MASK, PICTURE, SIZE, Running, alpha_png, mask, picture, png, register, wait_for
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from instgenie.pictures.picture import open_picture, resize_mask, resize_picture
from instgenie.types import Pixels

QUICK = {"num_inference_steps": 2, "seed": 5}


def pixels(answer: Any, index: int = 0) -> Pixels:
    return open_picture(base64.b64decode(answer.data[index].b64_json))


def edit(server: Running, key: str = ALICE, **fields: Any) -> Any:
    extra = QUICK | fields.pop("extra_body", {})
    return server.openai(key).images.edit(
        **({"image": PICTURE, "mask": MASK, "prompt": "a red cat"} | fields), extra_body=extra
    )


@pytest.fixture(scope="module")
def edited(server: Running) -> Any:
    """Of a registered picture, as are all that follow: an edit that finds no activations computes every token."""
    register(server, PICTURE, num_inference_steps="2")
    return edit(server)


def alike(one: Pixels, other: Pixels) -> bool:
    """But for rounding, where batches differ."""
    return int(np.abs(one.astype(int) - other).max()) <= 1


def test_an_edit_changes_what_is_masked_and_nothing_else(edited: Any) -> None:
    result = pixels(edited)
    assert np.array_equal(result[~mask()], picture()[~mask()])
    assert not np.array_equal(result[mask()], picture()[mask()])


def test_an_answer_says_how_it_was_made(edited: Any) -> None:
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


def test_several_pictures_have_the_seeds_that_follow(server: Running, edited: Any) -> None:
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


def test_without_a_mask_the_whole_picture_is_edited(server: Running) -> None:
    answer = server.openai().images.edit(image=PICTURE, prompt="a cat", extra_body=QUICK, response_format="url")
    assert answer.data[0].masked_share == 1  # type: ignore[index]
    assert answer.data[0].url is None  # type: ignore[index]
    assert (pixels(answer) != picture()).any(axis=2).mean() > 0.9


def test_masks_of_both_kinds(server: Running, edited: Any) -> None:
    luma = png(mask().astype(np.uint8) * 255)
    assert alike(pixels(edit(server, mask=luma, extra_body={"mask_mode": "luma"})), pixels(edited))


@pytest.mark.parametrize("output_format", ["webp", "jpeg"])
def test_formats(server: Running, edited: Any, output_format: Any) -> None:
    answer = edit(server, output_format=output_format)
    assert answer.output_format == output_format
    data = base64.b64decode(answer.data[0].b64_json)
    assert Image.open(io.BytesIO(data)).format == output_format.upper()
    if output_format == "webp":
        assert alike(open_picture(data), pixels(edited))
        assert np.array_equal(open_picture(data)[~mask()], picture()[~mask()])
        smaller = base64.b64decode(edit(server, output_format="webp", output_compression=10).data[0].b64_json)
        assert len(smaller) < len(data)


def test_the_answer_has_the_size_asked_for(server: Running) -> None:
    size = (64, 48)
    answer = edit(server, size="48x64")
    outside = ~resize_mask(mask(), size)
    assert answer.size == "48x64"
    assert np.array_equal(pixels(answer)[outside], resize_picture(picture(), size)[outside])


@pytest.mark.parametrize("quality", ["auto", "low", "high", "hd", "standard", "fast", "balanced", "exact"])
def test_qualities_of_both_names(server: Running, quality: Any) -> None:
    names = {"low": "low", "fast": "low", "high": "high", "hd": "high", "exact": "high"}
    assert edit(server, quality=quality, extra_body={"num_inference_steps": 1}).quality == names.get(quality, "medium")


def test_every_extension_is_taken(server: Running) -> None:
    extra = {"guidance_scale": 3.5, "negative_prompt": "a dog", "strength": 0.9, "feather": 2, "deadline_ms": 60_000}
    answer = edit(server, extra_body=extra, user="me", background="opaque", input_fidelity="high")
    outside = ~mask()
    assert np.array_equal(pixels(answer)[outside], picture()[outside])


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


def test_a_stream_of_several(server: Running) -> None:
    events = list(edit(server, stream=True, n=3))
    assert sorted((event.index, event.seed) for event in events) == [(0, 5), (1, 6), (2, 7)]


def test_generations(server: Running) -> None:
    client = server.openai()
    answer = client.images.generate(prompt="a red cat", n=2, size="64x32", extra_body=QUICK)
    assert (answer.size, len(answer.data or [])) == ("64x32", 2)
    assert pixels(answer).shape == (32, 64, 3)
    events = list(client.images.generate(prompt="a red cat", stream=True, partial_images=1, extra_body=QUICK))
    assert [event.type for event in events] == ["image_generation.partial_image", "image_generation.completed"]


def test_models(server: Running) -> None:
    client = server.openai()
    assert [model.id for model in client.models.list()] == ["tiny", "org/tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    assert client.models.retrieve("org/tiny").id == "org/tiny"
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-image-1")
    assert refused.value.code == "model_not_found"


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
    "transparent": ({"background": "transparent"}, "background", "invalid_value"),
    "partials without stream": ({"partial_images": 1}, "partial_images", "invalid_value"),
    "too many partials": ({"partial_images": 4, "stream": True}, "partial_images", "invalid_value"),
    "seed": ({"extra_body": {"seed": -1}}, "seed", "invalid_value"),
    "seeds beyond the last": ({"extra_body": {"seed": 2**63 - 1}, "n": 2}, "seed", "invalid_value"),
    "steps": ({"extra_body": {"num_inference_steps": 1001}}, "num_inference_steps", "invalid_value"),
    "guidance": ({"extra_body": {"guidance_scale": "nan"}}, "guidance_scale", "invalid_value"),
    "strength": ({"extra_body": {"strength": 0}}, "strength", "invalid_value"),
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


def test_what_is_missing_is_named(server: Running) -> None:
    with server.http() as client:
        for fields, param in (({"prompt": "a"}, "image"), ({"n": 1}, "prompt")):
            answer = client.post("/v1/images/edits", json=fields)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param)
            assert error["code"] == "missing_required_parameter"


def test_a_model_that_is_not_served(server: Running) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        edit(server, model="gpt-image-1")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


def test_a_deadline_that_passes(server: Running) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        edit(server, extra_body={"num_inference_steps": 999, "deadline_ms": 100})
    assert (refused.value.status_code, refused.value.code) == (408, "deadline_exceeded")
    assert refused.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.APIError, match="deadline"):
        list(edit(server, stream=True, extra_body={"num_inference_steps": 999, "deadline_ms": 100}))


def test_request_ids(server: Running) -> None:
    with server.http() as client:
        assert client.get("/v1/models", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
        for insane in ("x" * 129, "a b", "<script>"):
            made = client.get("/v1/models", headers={"x-request-id": insane}).headers["x-request-id"]
            assert made.startswith("req_")


def test_the_log_is_json_and_knows_the_request(server: Running) -> None:
    with server.http() as client:
        client.get("/v1/models?secret=1", headers={"x-request-id": "look-for-me"})
    wait_for(lambda: "look-for-me" in whole_lines(server))  # it is written after the answer is sent
    lines = [json.loads(line) for line in whole_lines(server).splitlines()]
    [line] = [line for line in lines if line.get("request_id") == "look-for-me"]
    assert (line["method"], line["path"], line["status"]) == ("GET", "/v1/models", 200)
    assert ALICE not in server.log.read_text()
    assert "secret" not in server.log.read_text()


def whole_lines(server: Running) -> str:
    """Of the log; the last may be half-written."""
    return server.log.read_text().rpartition("\n")[0]


def test_a_client_that_leaves_ends_its_edits(server: Running) -> None:
    cancelled = 'instgenie:request_success_total{finished_reason="abort"}'
    long_edit = {"prompt": "a cat", "num_inference_steps": "999", "n": "2"}
    for stream in ("false", "true"):
        before = server.metric(cancelled)
        with server.http() as client, pytest.raises(httpx.TimeoutException):
            client.post("/v1/images/edits", files={"image": PICTURE}, data=long_edit | {"stream": stream}, timeout=1.0)
        wait_for(lambda before=before: server.metric(cancelled) >= before + 2)  # type: ignore[misc]
    wait_for(lambda: server.metric("instgenie:num_requests_running") == 0)


def test_metrics(server: Running, edited: Any) -> None:
    """Names, kinds and labels are what dashboards are made of."""
    with server.http() as client:
        text = client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    kinds = {name.removeprefix("instgenie:"): one.type for name, one in families.items() if "instgenie:" in name}
    assert kinds == {
        "num_requests_running": "gauge", "num_requests_waiting": "gauge", "e2e_request_latency_seconds": "histogram",
        "request_queue_time_seconds": "histogram", "request_success": "counter", "step_time_seconds": "histogram",
        "batch_size": "histogram", "mask_ratio": "histogram", "cache_queries": "counter", "cache_hits": "counter",
        "cache_usage_bytes": "gauge", "http_requests": "counter", "step_loop_interruptions": "counter",
    }  # fmt: skip

    def labels(name: str, label: str) -> set[str]:
        samples = families[f"instgenie:{name}"].samples
        return {sample.labels[label] for sample in samples if label in sample.labels}

    assert labels("request_success", "finished_reason") == {"stop", "abort", "error"}
    assert labels("cache_hits", "tier") == labels("cache_usage_bytes", "tier") == {"gpu", "host", "disk", "remote"}
    assert "\ninstgenie:request_success_total{" in text
    assert "\ninstgenie:cache_hits_total{" in text
    assert "\ninstgenie:cache_queries_total " in text
    assert '\ninstgenie:step_loop_interruptions_total{worker="0"} 0.0' in text
    for name in (
        "e2e_request_latency_seconds_count",
        "step_time_seconds_count",
        "batch_size_count",
        "mask_ratio_count",
    ):
        assert server.metric(f"instgenie:{name}") > 0, name
    assert server.metric('instgenie:request_success_total{finished_reason="stop"}') > 0


def test_a_template_is_registered_used_and_forgotten(server: Running) -> None:
    name = register(server, png(picture(seed=9)), num_inference_steps="2")
    with server.http() as client:
        status = client.get(f"/v1/templates/{name}").json()
        assert (status["num_registered_steps"], status["num_steps"], status["size"]) == (2, 2, "56x40")
        assert sum(status["tier_bytes"].values()) > 0
        assert name in [one["id"] for one in client.get("/v1/templates").json()["data"]]
        fields = {"prompt": "a red cat", "num_inference_steps": "2", "template": name}
        answer = client.post("/v1/images/edits", files={"mask": MASK}, data=fields)
        assert answer.status_code == 200, answer.text
        one = answer.json()["data"][0]
        assert one["cache_tier"] in ("gpu", "host")
        result = open_picture(base64.b64decode(one["b64_json"]))
        assert np.array_equal(result[~mask()], picture(seed=9)[~mask()])
        with server.http(BOB) as other:
            seen = [other.get(f"/v1/templates/{name}"), other.delete(f"/v1/templates/{name}")]
            seen += [other.post("/v1/images/edits", files={"mask": MASK}, data=fields)]
            assert [(one.status_code, one.json()["error"]["code"]) for one in seen] == [(404, "template_not_found")] * 3
            assert other.get("/v1/templates").json()["data"] == []
        assert client.delete(f"/v1/templates/{name}").json() == {"id": name, "object": "template", "deleted": True}
        assert client.delete(f"/v1/templates/{name}").status_code == 404
        assert client.post("/v1/images/edits", files={"mask": MASK}, data=fields).status_code == 404


def test_a_template_needs_a_picture(server: Running) -> None:
    with server.http() as client:
        for files, fields in (
            ({"image": b"x"}, {}),
            ({}, {"num_inference_steps": "2"}),
            ({"image": PICTURE}, {"n": "1"}),
        ):
            answer = client.post("/v1/templates", files=files or {"none": b""}, data=fields)
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


GUARDED = [
    ("GET", "/v1/models"), ("GET", "/v1/models/tiny"), ("POST", "/v1/images/edits"), ("POST", "/v1/images/generations"),
    ("GET", "/v1/templates"), ("POST", "/v1/templates"), ("GET", "/v1/templates/x"), ("DELETE", "/v1/templates/x"),
    ("GET", "/metrics"), ("GET", "/openapi.json"),
    ("GET", "/page/facts"), ("GET", "/engine/events"), ("GET", "/nowhere"), ("GET", "/health/"), ("GET", "//health"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_the_key_guards_everything(server: Running, method: str, path: str) -> None:
    headers = [{}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {ALICE}"}, {"authorization": ALICE}]
    with server.http(key=None) as client:
        for header in headers:
            answer = client.request(method, server.url + path, headers=header)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["code"]) == (
                401,
                "authentication_error",
                "invalid_api_key",
            )


def test_health_is_open_to_all(server: Running) -> None:
    with server.http(key=None) as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/ready").json() == {"status": "ok"}


def test_routes_that_are_not_there(server: Running) -> None:
    with server.http() as client:
        lost, wrong = client.get("/v1/images/variations"), client.put("/v1/templates")
        assert (lost.status_code, lost.json()["error"]["code"]) == (404, "route_not_found")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
        assert wrong.headers["allow"] == "GET, POST"


def test_no_origin_is_allowed_unless_named(server: Running) -> None:
    with server.http() as client:
        assert (
            "access-control-allow-origin" not in client.get("/health", headers={"origin": "https://evil.test"}).headers
        )


def events_of(server: Running, **fields: str) -> list[str]:
    data = {"prompt": "a cat", "stream": "true", "num_inference_steps": "2", **fields}
    with server.http() as client:
        answer = client.post("/v1/images/edits", files={"image": PICTURE, "mask": MASK}, data=data)
    assert answer.status_code == 200, answer.text
    return [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]


def test_progress_is_told_to_those_who_ask_for_it(server: Running) -> None:
    told = events_of(server, stream_progress="true")
    assert told[0] == "instgenie.queued"
    assert told.count("instgenie.step") == 2
    assert told[-1] == "image_edit.completed"
    assert events_of(server) == ["image_edit.completed"]


def test_progress_needs_a_stream(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="Progress events need"):
        edit(server, extra_body={"stream_progress": True})


def test_the_pages_come_with_a_policy_and_are_open_to_all(server: Running) -> None:
    with server.http(key=None) as client:
        for path in ("/", "/engine", "/static/edit.js", "/static/examples/daisies.png"):
            answer = client.get(path)
            assert answer.status_code == 200
            assert "script-src 'self';" in answer.headers["content-security-policy"]
            assert client.get(path, headers={"if-none-match": answer.headers["etag"]}).status_code == 304
        for path in ("/static/", "/static/../gate.py", "/static/%2e%2e/gate.py", "/static/examples/edits.toml"):
            assert client.get(path).status_code in (401, 404)


def test_the_engine_tells_how_it_is_doing(server: Running) -> None:
    with server.http() as client, client.stream("GET", "/engine/events") as answer:
        line = next(line for line in answer.iter_lines() if line)
    snapshot = json.loads(line.removeprefix("data: "))
    assert snapshot["model"]["name"] == "tiny"
    assert [worker["state"] for worker in snapshot["workers"]] == ["ready"]
    assert ALICE not in line
