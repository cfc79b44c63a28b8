"""The event loop does no work that grows with pictures: threads do it, and large answers leave in pieces."""

import asyncio
import base64
import json
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest
from helpers.instant import InstantCluster
from helpers.serving import MASK, PICTURE
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from instgenie.pictures import digest
from instgenie.server.app import make_app
from instgenie.server.bodies import answers, body, data_urls, forms, pictures
from instgenie.server.config import read_config
from instgenie.server.routes import events, images, sending, templates
from instgenie.server.service import HttpService

PAINTED = os.urandom(2**20)
FIELDS = {"prompt": "a", "num_inference_steps": "4"}
HEAVY = [
    (digest, "digest"),
    (digest, "share"),
    (answers, "encoded"),
    (images, "images_answer"),
    (images, "read_edit"),
    (images, "blank_edit"),
    (templates, "decode_template"),
    (events, "partial_event"),
    (events, "completed_event"),
    (pictures, "open_photo"),
    (pictures, "read_mask"),
    (pictures, "read_header"),
    (data_urls, "loads"),
    (body, "parse_json"),
    (forms, "decode_base64"),
]


class Sent:
    """Passes everything on, and notes the size of each piece of a body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.sizes: list[int] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def note(message: Message) -> None:
            self.sizes.append(len(message.get("body", b"")))
            await send(message)

        await self.app(scope, receive, note)


def visit(work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]) -> list[int]:
    """Do some work with a client of the application; return the sizes of the pieces that were sent."""

    async def play() -> list[int]:
        config = read_config({"device": "cpu", "host_cache_gib": "0.1"}, {})
        app = Sent(make_app(HttpService(config.http, InstantCluster(config.cluster, PAINTED)), "0"))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            await work(client)
        return app.sizes

    return asyncio.run(play())


def data_url(picture: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


async def send_all_kinds(client: httpx.AsyncClient) -> None:
    files = {"image": PICTURE, "mask": MASK}
    made = [
        await client.post("/v1/images/edits", files=files, data=FIELDS | {"n": "2"}),
        await client.post("/v1/images/edits", files=files, data=FIELDS | {"stream": "true", "partial_images": "1"}),
        await client.post("/v1/images/edits", json={"prompt": "a", "image": data_url(PICTURE), "mask": data_url(MASK)}),
        await client.post("/v1/images/generations", json={"prompt": "a", "size": "64x64"}),
        await client.post("/v1/templates", files={"image": PICTURE}),
    ]
    assert [answer.status_code for answer in made] == [200, 200, 200, 200, 201], [answer.text[:300] for answer in made]


def test_work_on_pictures_is_done_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, set[bool]] = defaultdict(set)  # by function: whether its calls were made by this thread

    def noting(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            threads[name].add(threading.current_thread() is threading.main_thread())
            return function(*given, **named)

        return call

    for module, name in HEAVY:
        monkeypatch.setattr(module, name, noting(getattr(module, name), name))
    visit(send_all_kinds)
    assert dict(threads) == {name: {False} for _, name in HEAVY}


@pytest.mark.parametrize("stream", ["false", "true"])
def test_large_answers_are_sent_in_pieces(stream: str) -> None:
    answered = []

    async def work(client: httpx.AsyncClient) -> None:
        files = {"image": PICTURE, "mask": MASK}
        answered.append(await client.post("/v1/images/edits", files=files, data=FIELDS | {"stream": stream}))

    assert max(visit(work)) <= sending.PIECE
    [answer] = answered
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if '"b64_json"' in line]
    [found] = [json.loads(line) for line in lines] if stream == "true" else answer.json()["data"]
    assert base64.b64decode(found["b64_json"], validate=True) == PAINTED


def test_pictures_are_encoded_in_pieces_that_make_one_whole() -> None:
    for size in (0, 1, 2, 3, answers.PIECE - 1, answers.PIECE, 2 * answers.PIECE + 1):
        picture = os.urandom(size)
        slots = answers.PictureSlots()
        text = json.dumps({"one": slots.slot(picture), "other": slots.slot(b"x"), "word": "ü"})
        expected = {"one": base64.b64encode(picture).decode(), "other": "eA==", "word": "ü"}
        assert json.loads(slots.fill(text)) == expected


def refuse(constant: str) -> None:
    raise ValueError(constant)


LONG = data_url(os.urandom(3 * 10**5))


@pytest.mark.parametrize(
    "value",
    [
        {"image": LONG},
        {"images": [{"image_url": LONG}, {"image_url": {"url": LONG}}], "mask": LONG, "n": 1},
        {"prompt": f'say "{LONG}', "other": [LONG, None, 1.5, "data:x"]},
        {LONG: LONG, "prompt": 'ends with a quote"'},
        {"image": LONG.replace("A", "ü")},
        {"image": LONG.replace("A", "\n")},
        [LONG],
    ],
)
def test_json_with_pictures_is_read_like_any_other(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert data_urls.loads(text.encode(), refuse) == value


@pytest.mark.parametrize("broken", ['{"a": "%s', '{"a": "b"%s"}', '{"a": "%s"', '{"a": \\"%s"}', '{"a": "%s" NaN}'])
def test_broken_json_stays_broken(broken: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        data_urls.loads((broken % LONG).encode(), refuse)


@pytest.mark.parametrize("size", [0, 1, 2, 3, data_urls.PIECE, 3 * data_urls.PIECE + 2])
def test_base64_is_decoded_strictly(size: int) -> None:
    expected = os.urandom(size)
    text = base64.b64encode(expected).decode()
    assert data_urls.decode_base64(text) == expected
    for wrong in (
        text + "A",
        "=" + text,
        "A===" + text,
        text[: len(text) // 2] + "!" + text[len(text) // 2 :],
        text + "ü",
    ):
        with pytest.raises(ValueError, match=r"."):
            data_urls.decode_base64(wrong)
