"""Limits of a server: a full queue, slow and large bodies, large pictures, foreign origins."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import pytest
from helpers.serving import ORIGIN, PICTURE, Running

from instgenie.cli import main

if TYPE_CHECKING:
    from playwright.sync_api import Browser

LONG = {"prompt": "a cat", "num_inference_steps": "60", "n": "2"}


def edit(server: Running, fields: dict[str, str]) -> httpx.Response:
    with server.http() as client:
        return client.post("/v1/images/edits", files={"image": PICTURE}, data=fields)


def test_bodies_are_counted_as_they_arrive(narrow: Running) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(64):
            yield b"x" * 65536

    headers = {"content-type": "multipart/form-data; boundary=x"}
    with narrow.http() as client:
        declared = client.post("/v1/images/edits", content=b"x" * 2**21, headers=headers)
        assert (declared.status_code, declared.json()["error"]["code"]) == (413, "body_too_large")
        try:
            undeclared = client.post("/v1/images/edits", content=chunks(), headers=headers)
        except httpx.TransportError:  # the server closed while we were still sending
            return
        assert undeclared.status_code in (400, 413)


def test_the_limit_on_pixels_is_an_option(narrow: Running) -> None:
    with narrow.http() as client:
        answer = client.post("/v1/images/generations", json={"prompt": "a", "size": "1024x1024"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "size")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"num_inference_steps": "901"}, "num_inference_steps", "The number of steps is 901: this server allows 900"),
        ({"n": "10"}, "n", "The number of pictures is 10: this server allows 9"),
    ],
)
def test_limits_on_the_work_of_a_request_are_options(
    narrow: Running, fields: dict[str, str], param: str, message: str
) -> None:
    refused = edit(narrow, {"prompt": "a", "num_inference_steps": "1"} | fields)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, param, "invalid_value")
    assert error["message"].startswith(message)
    with narrow.http() as client:
        limits = client.get("/page/facts").json()["fields"]
    assert (limits["num_inference_steps"]["maximum"], limits["n"]["maximum"]) == (900, 9)


def test_without_reuse_nothing_is_registered(narrow: Running) -> None:
    with narrow.http() as client:
        refused = client.post("/v1/templates", files={"image": PICTURE})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_reuse")
        for _ in range(3):
            [one] = edit(narrow, {"prompt": "a", "num_inference_steps": "1"}).json()["data"]
            assert (one["cache_tier"], one["num_computed_tokens"]) == (None, one["num_tokens"])
        assert client.get("/v1/templates").json()["data"] == []


def test_a_body_that_trickles_is_cut_off(narrow: Running) -> None:
    place = urlsplit(narrow.url)
    with socket.create_connection((place.hostname, place.port), timeout=30) as connection:
        connection.sendall(
            b"POST /v1/images/edits HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
        )
        assert b"408" in connection.recv(4096)
    with narrow.http() as client:
        assert client.get("/health").status_code == 200


def test_an_allowed_origin_may_call(narrow: Running) -> None:
    asks = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    with narrow.http() as client:
        assert client.options("/v1/images/edits", headers=asks).headers["access-control-allow-origin"] == ORIGIN
        seen = client.get("/health", headers={"origin": ORIGIN}).headers
        assert seen["access-control-allow-origin"] == ORIGIN
        stranger = client.get("/health", headers={"origin": "https://evil.test"}).headers
        assert "access-control-allow-origin" not in stranger


def test_a_server_without_a_key_does_not_answer_foreign_pages(narrow: Running) -> None:
    """Neither a page that calls from afar, nor one whose name was re-pointed to this machine."""
    calls = [("GET", "/v1/templates"), ("DELETE", "/v1/templates/x"), ("GET", "/engine/events"), ("GET", "/")]
    with narrow.http() as client:
        for method, path in calls:
            taken = {"host": "evil.example", "origin": "http://evil.example"}
            answers = [client.request(method, path, headers=one) for one in (taken, {"origin": "http://evil.example"})]
            assert [answer.status_code for answer in answers] == [403, 403]
            assert [answer.json()["error"]["code"] for answer in answers] == ["host_not_allowed", "origin_not_allowed"]


def test_a_full_queue_refuses_and_says_when_to_retry(narrow: Running) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: edit(narrow, LONG), range(8)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert {answer.status_code for answer in answers} == {200, 429}
    for answer in refused:
        assert answer.json()["error"]["code"] == "queue_full"
        assert 1 <= int(answer.headers["retry-after"]) <= 120
    too_many = edit(narrow, {"prompt": "a", "num_inference_steps": "1", "n": "9"})
    assert too_many.status_code in (200, 429)


def test_a_port_that_is_taken(narrow: Running, capsys: pytest.CaptureFixture[str]) -> None:
    port = str(urlsplit(narrow.url).port)
    assert main(["serve", "--port", port]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_the_page_works_without_a_key(narrow: Running, browser: "Browser") -> None:
    from helpers.browser import WAIT, Visitor, drag, fill_settings, open_picture_on
    from playwright.sync_api import expect

    visitor = Visitor(browser, narrow.url)
    page = visitor.open()
    open_picture_on(page)
    drag(page, (0.4, 0.4), (0.6, 0.6))
    fill_settings(page)
    page.click("#run")
    expect(page.locator("#result")).to_be_visible(timeout=WAIT)
    expect(page.locator("dialog")).to_have_count(0)
    visitor.close()
    assert visitor.faults == []
