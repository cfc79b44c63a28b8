"""The edits of one request: one that fails stops no other, and a deadline counts from the request's first byte."""

import asyncio
import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from helpers.fake_cluster import FakeCluster, make_order
from helpers.serving import MASK, PICTURE, Running

from instgenie.cluster import wire
from instgenie.cluster.orders import Finished
from instgenie.server.bodies.answers import images_answer
from instgenie.server.bodies.fields import EditFields
from instgenie.server.bodies.pictures import PictureDecoder
from instgenie.server.errors import ApiError
from instgenie.server.routes.events import EventStream, Submission
from instgenie.server.watch import Deadline, EditWatch, in_time

FIELDS = EditFields(prompt="a cat", n=3)


def run_all_but(cluster: FakeCluster, *failing: int) -> None:
    """Finish the edits, except for those with these numbers: they fail."""
    cluster.prepare()
    jobs = [job for message in cluster.take("denoise") for job in message.jobs]
    for number, job in enumerate(jobs):
        if number in failing:
            cluster.answer("denoise", 0, wire.JobFailed(job.id, job.attempt, "out_of_memory", "no room"))
        else:
            cluster.denoised(job)
    cluster.finish()


def outcome(*failing: int, deadline: Deadline | None = None) -> tuple[dict[int, Finished], dict[int, ApiError]]:
    async def watch() -> tuple[dict[int, Finished], dict[int, ApiError]]:
        cluster = FakeCluster()
        cluster.open()
        async with EditWatch(cluster.accept(*(make_order(seed) for seed in range(3))), deadline) as watch:
            run_all_but(cluster, *failing)
            return await watch.all(), watch.errors

    return asyncio.run(watch())


def test_one_of_several_fails() -> None:
    results, errors = outcome(1)
    assert sorted(results) == [0, 2]
    answer = json.loads(images_answer(results, errors, FIELDS, []))
    assert [one["index"] for one in answer["data"]] == [0, 2]
    assert [one["seed"] for one in answer["data"]] == [0, 2]
    [failed] = answer["errors"]
    assert (failed["index"], failed["error"]["code"]) == (1, "out_of_memory")


def test_all_fail() -> None:
    with pytest.raises(ApiError) as failed:
        outcome(0, 1, 2)
    assert (failed.value.status, failed.value.code) == (503, "out_of_memory")


def test_none_fails() -> None:
    results, errors = outcome()
    assert json.loads(images_answer(results, errors, FIELDS, []))["errors"] == []


def test_pictures_made_before_the_deadline_are_kept() -> None:
    async def watch() -> tuple[list[int], dict[int, ApiError], int]:
        cluster = FakeCluster(max_batch_size=1)
        cluster.open()
        tickets = cluster.accept(make_order(0)) + cluster.accept(make_order(1))
        async with EditWatch(tickets, Deadline(time.monotonic(), 500)) as watch:
            cluster.prepare()
            cluster.denoised(cluster.take("denoise")[0].jobs[0])
            cluster.finish()
            found = sorted(await watch.all())
            return found, watch.errors, len(cluster.entries)

    found, errors, num_left = asyncio.run(watch())
    assert found == [0]
    assert (errors[1].status, errors[1].code) == (408, "deadline_exceeded")
    assert num_left == 0


def test_a_deadline_counts_from_the_first_byte() -> None:
    with pytest.raises(ApiError, match="The deadline of 1000 ms has passed"):
        Deadline(time.monotonic() - 2, 1000).check()
    Deadline(time.monotonic(), 1000_000).check()


def test_a_deadline_ends_the_wait_for_a_decoder() -> None:
    with pytest.raises(ApiError, match="The deadline of 1000 ms has passed"):
        asyncio.run(in_time(Deadline(time.monotonic() - 0.9, 1000), asyncio.sleep(60)))
    assert asyncio.run(in_time(None, asyncio.sleep(0, "done"))) == "done"


class StreamedEdits:
    """Plays the service to a stream: three edits, of which some fail."""

    def __init__(self, *failing: int) -> None:
        self.failing = failing
        self.decoder = PictureDecoder(num_threads=1, max_pixels=1)

    def watch(self, orders: Any, deadline: Deadline | None, *admitted: Any) -> "StreamedEdits":
        self.cluster = FakeCluster()
        self.cluster.open()
        self.edits = EditWatch(self.cluster.accept(*orders), deadline)
        return self

    async def __aenter__(self) -> EditWatch:
        watch = await self.edits.__aenter__()
        run_all_but(self.cluster, *self.failing)
        return watch

    async def __aexit__(self, *error: object) -> None:
        await self.edits.__aexit__(*error)


def test_a_stream_sends_errors_after_the_pictures() -> None:
    sent = streamed(StreamedEdits(0))
    kinds = [event.get("type") or (event["error"]["code"], event["index"]) for event in sent]
    assert kinds == ["image_edit.completed", "image_edit.completed", ("out_of_memory", 0)]


def streamed(service: Any) -> list[dict[str, Any]]:
    chunks: list[bytes] = []

    async def send(message: Any) -> None:
        chunks.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.sleep(60)

    request: Any = httpx.Request("POST", "http://x")
    request.receive, request.scope = receive, {"start": time.monotonic()}
    orders = [make_order(seed) for seed in range(3)]
    stream = EventStream(Submission(request, service, None, orders, FIELDS, [], "image_edit"))  # type: ignore[arg-type]
    asyncio.run(stream({}, receive, send))
    service.decoder.close()
    data = [line[6:] for line in b"".join(chunks).decode().split("\n") if line.startswith("data: {")]
    return [json.loads(one) for one in data]


def test_a_slow_upload_counts_towards_the_deadline(server: Running) -> None:
    fields = {"prompt": "a cat", "num_inference_steps": "1", "deadline_ms": "1000", "on_late": "reject"}
    built = httpx.Request("POST", server.url, files={"image": PICTURE, "mask": MASK}, data=fields)
    body = built.read()
    place = urlsplit(server.url)
    head = (
        f"POST /v1/images/edits HTTP/1.1\r\nhost: {place.netloc}\r\nauthorization: Bearer alice-key\r\n"
        f"content-type: {built.headers['content-type']}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
    )
    with socket.create_connection((str(place.hostname), int(place.port or 0)), timeout=60) as connection:
        connection.sendall(head.encode())  # its last line is missing: the server has bytes, and no request yet
        time.sleep(1.2)
        connection.sendall(b"\r\n" + body)
        answer = b"".join(iter(lambda: connection.recv(2**16), b""))
    assert answer.startswith(b"HTTP/1.1 408"), answer[:300]
    assert b"deadline_exceeded" in answer
