"""Admission: places and bytes are taken before anything is decoded, and released however a request ends."""

import asyncio
import gc
import io
import json
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import pytest
from helpers.clusters import Run
from helpers.fake_cluster import FakeCluster, make_order
from helpers.serving import Running, picture, png, wait_for
from PIL import Image

from instgenie.errors import PictureError, QueueFullError
from instgenie.pictures.header import Header, decoding_bytes, kept_bytes, read_header
from instgenie.server.admission import Admission, Admitted
from instgenie.server.errors import ApiError
from instgenie.server.watch import EditWatch

LONG = {"prompt": "a cat", "num_inference_steps": "400", "stream": "true", "stream_progress": "true"}
SIDE = 300  # two pictures of this size fit into the narrow server's budget


class Front:
    """The part of a cluster that admission asks."""

    def __init__(self, max_queue: int) -> None:
        self.fake = FakeCluster(max_queue=max_queue)
        self.fake.open()
        self.reserve = self.fake.coordinator.front.reserve
        self.retry_after = 3.0


@asynccontextmanager
async def admission(max_bytes: int = 1000, num_decoders: int = 2, max_queue: int = 100) -> AsyncIterator[Admission]:
    made = Admission(Front(max_queue), max_bytes, num_decoders)  # type: ignore[arg-type]
    yield made
    made.close()


def palette_png(side: int) -> bytes:
    encoded = io.BytesIO()
    Image.new("P", (side, side)).save(encoded, "PNG", compress_level=9)
    return encoded.getvalue()


CUT = png(picture(size=(SIDE, SIDE)))[:1000]  # its header is whole; only decoding shows that the rest is missing


def test_a_header_says_what_decoding_takes() -> None:
    large = palette_png(4096)
    assert len(large) < 20_000
    header = read_header(large, PictureError)
    assert header == Header(4096, 4096) == read_header(large[:100], PictureError)  # no pixel is looked at
    assert kept_bytes(header, None) == 4 * 4096**2
    assert kept_bytes(Header(10, 10), (20, 30)) == kept_bytes(Header(30, 20), None)
    assert decoding_bytes(Header(10, 10), header) == decoding_bytes(header) > kept_bytes(header, None)
    with pytest.raises(PictureError, match="4096x4096 pixels; at most 1,000,000"):
        read_header(large, PictureError, 1_000_000)


def test_places_are_reserved_before_edits_exist() -> None:
    cluster = FakeCluster(max_queue=3)
    cluster.open()
    place = cluster.coordinator.front.reserve(2)
    with pytest.raises(QueueFullError, match="2 edits are waiting: at most 3"):
        cluster.accept(make_order(), make_order())
    tickets = cluster.coordinator.accept([make_order(), make_order()], place)
    assert cluster.coordinator.front.num_reserved == 0
    with pytest.raises(QueueFullError):
        cluster.coordinator.front.reserve(2)
    tickets[0].cancel()
    place.release()  # it was used already
    cluster.coordinator.front.reserve(2)


def test_bytes_that_do_not_fit_are_refused_with_the_numbers(run: Run) -> None:
    async def play() -> None:
        async with admission(max_bytes=1000) as made:
            first, second, third = (made.admit(1) for _ in range(3))
            first.keep(600)
            second.keep(400)
            with pytest.raises(ApiError, match="take 1,000 of 1,000 bytes: there is no room for 1 more") as refused:
                third.keep(1)
            assert (refused.value.status, refused.value.code) == (429, "too_many_pictures")
            assert refused.value.headers["retry-after"] == "3"
            first.leave()
            first.leave()
            third.keep(600)
            second.leave()
            third.leave()
            made.admit(1).keep(5000)  # nothing else is kept: even a picture above the budget is taken

    run(play())


def test_decodes_share_the_budget_and_always_go_on(run: Run) -> None:
    async def play() -> None:
        async with admission(max_bytes=1000, num_decoders=2) as made:
            seen: list[tuple[int, int]] = []

            async def decode(num_bytes: int) -> None:
                admitted = made.admit(1)
                admitted.keep(10)
                await admitted.decode(num_bytes, lambda: seen.append((budget.num_decodes, budget.num_decoding)))
                admitted.leave()

            budget = made.budget
            await asyncio.gather(*(decode(num_bytes) for num_bytes in [400] * 8 + [700] * 4 + [9000] * 2))
            assert len(seen) == 14
            assert all(num == 1 or total <= 1000 for num, total in seen)
            assert max(num for num, _ in seen) <= 2
            await asyncio.sleep(0)
            assert (budget.num_kept, budget.num_decodes, budget.num_decoding) == (0, 0, 0)

    run(play())


@contextmanager
def held_thread() -> Iterator[Any]:
    """Work that a thread does until the block is left."""
    begun, may_end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(60)

    work.begun = begun  # type: ignore[attr-defined]
    try:
        yield work
    finally:
        may_end.set()


def test_what_a_client_leaves_behind_is_not_decoded(run: Run) -> None:
    async def play() -> None:
        async with admission(num_decoders=1) as made:
            runs: list[int] = []

            async def decode(admitted: Admitted, *args: Any) -> None:
                try:
                    await admitted.decode(100, *args)
                finally:
                    admitted.leave()

            with held_thread() as work:
                tasks = [asyncio.create_task(decode(made.admit(1), work))]
                await asyncio.to_thread(work.begun.wait, 60)
                tasks += [asyncio.create_task(decode(made.admit(1), runs.append, index)) for index in range(5)]
                await asyncio.sleep(0)
                assert made.cluster.fake.coordinator.front.num_reserved == 6
                for task in tasks[:-1]:
                    task.cancel()
                await asyncio.gather(*tasks[:-1], return_exceptions=True)
                assert made.cluster.fake.coordinator.front.num_reserved == 1
                assert made.budget.num_decodes == 1  # a thread cannot be stopped: its bytes count to its end
                assert not runs
            await tasks[-1]
            assert runs == [4]

    run(play())


def test_the_pixels_of_a_cancelled_edit_are_freed_at_once(run: Run) -> None:
    """Garbage collection counts objects, not bytes, and may come late."""

    async def play() -> None:
        cluster = FakeCluster()
        cluster.open()
        order = make_order()
        alive = weakref.ref(order)
        async with EditWatch(cluster.accept(order)) as watch:
            await watch.next()
        del order, watch
        cluster.take("prepare")
        for _ in range(3):  # the tasks of the watch end
            await asyncio.sleep(0)
        assert alive() is None

    gc.disable()
    try:
        run(play())
    finally:
        gc.enable()


def post(client: httpx.Client, image: bytes, **fields: str) -> httpx.Response:
    return client.post("/v1/images/edits", files={"image": image}, data={"prompt": "a", **fields})


@contextmanager
def streaming(server: Running, image: bytes, **fields: str) -> Iterator[None]:
    """A long edit, from its acceptance to the client's leaving."""
    with server.http() as client:
        sent = client.stream("POST", "/v1/images/edits", files={"image": image}, data=LONG | fields)
        with sent as answer:
            assert answer.status_code == 200, answer.read()
            lines = answer.iter_lines()
            next(lines)
            yield


def test_bytes_are_refused_before_anything_is_decoded(narrow: Running) -> None:
    large = palette_png(SIDE)
    with narrow.http() as client:
        assert post(client, CUT).status_code == 400
        with streaming(narrow, large), streaming(narrow, large):
            refused = post(client, CUT)  # it cannot be decoded, but nobody has tried
            assert refused.status_code == 429, refused.text
            error = refused.json()["error"]
            assert error["code"] == "too_many_pictures"
            assert error["message"].startswith("The pictures of accepted edits take 720,000 of 1,073,742 bytes")
            assert 1 <= int(refused.headers["retry-after"]) <= 120
        wait_for(lambda: post(client, large, num_inference_steps="1").status_code == 200)


def test_a_full_queue_is_refused_before_anything_is_decoded(narrow: Running) -> None:
    with narrow.http() as client:
        refused = post(client, CUT, n="7")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full"), refused.text
        assert "6 are allowed, and the request has 7" in refused.json()["error"]["message"]


def test_a_storm_of_pictures_that_decode_to_much(narrow: Running) -> None:
    """Each is under 2 KB and decodes to .3 MB: most are refused, none fails, and nothing is held afterwards."""
    large = palette_png(SIDE)
    assert len(large) < 2000

    def send(_: int) -> tuple[int, Any]:
        with narrow.http() as client:
            answer = client.post(
                "/v1/images/edits",
                files={"image": large, "mask": large},
                data={"prompt": "a", "num_inference_steps": "2", "mask_mode": "luma"},
            )
            return answer.status_code, json.loads(answer.text)["error"]["code"]

    with ThreadPoolExecutor(20) as threads:
        answers = list(threads.map(send, range(40)))
    # the mask is empty, which only decoding shows
    assert {status for status, _ in answers} <= {400, 429}
    assert {code for status, code in answers if status == 429} <= {"queue_full", "too_many_pictures"}
    assert any(status == 400 for status, _ in answers)
    wait_for(lambda: narrow.metric("instgenie:num_requests_waiting") == 0)
    with narrow.http() as client:
        assert post(client, large, num_inference_steps="1").is_success
