"""Two servers that share a worker on Ray, real HTTP, and one of them is killed under load."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from helpers.rays import RayNodes
from helpers.serving import MASK, PICTURE, Running, alike, pixels_of, running_server, wait_for

NUM_EDITS = 6
STEPS = 24


@pytest.fixture(scope="module")
def servers(
    rays: RayNodes, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, Running]]:
    flags = [
        "--cluster", rays.address, "--cluster-name", "two-fronts", "--workers", "1", "--no-reuse",
        "--worker-resources", "CPU=1,slot=1", "--max-batch-size", "2",
    ]  # fmt: skip
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(running_server(tmp_path_factory.mktemp(name), str(folders["sd_fill"]), *flags))
            for name in ("one", "other")
        )
        yield one, other


def post(server: Running, seed: int, key: str | None = None, steps: int = STEPS) -> httpx.Response:
    headers = {"idempotency-key": key, "x-request-id": f"request-{key}"} if key else {}
    fields = {"prompt": "a red cat", "num_inference_steps": str(steps), "seed": str(seed)}
    with server.http(None) as client:
        files = {"image": PICTURE, "mask": MASK}
        return client.post("/v1/images/edits", files=files, data=fields, headers=headers)


def get(server: Running, id: str) -> httpx.Response:
    with server.http(None) as client:
        return client.get(f"/v1/images/edits/{id}")


def num_jobs(server: Running) -> float:
    """Jobs that the worker has begun, without the one that asks."""
    assert post(server, 0, steps=1).status_code == 200
    return server.metric("instgenie:worker_jobs_total") - 1


def test_a_killed_front_costs_no_edit_and_no_step(servers: tuple[Running, Running]) -> None:
    """Clients that retry with their key at the other front get their result, which was computed once. A client that
    does not send its request again gets it, too, by the request's id."""
    doomed, other = servers
    long = {"seed": 100, "steps": 200}

    def patient() -> None:
        with suppress(httpx.TransportError):
            post(doomed, **long, key="patient")

    def stubborn(seed: int) -> httpx.Response:
        try:
            return post(doomed, seed, f"key-{seed}")
        except httpx.TransportError:
            return post(other, seed, f"key-{seed}")

    undisturbed = [post(other, seed) for seed in range(NUM_EDITS)] + [post(other, **long)]
    assert {answer.status_code for answer in undisturbed} == {200}
    before = num_jobs(other)
    finished = doomed.metric("instgenie:request_success_total")
    with ThreadPoolExecutor(NUM_EDITS + 1) as threads:
        threads.submit(patient)
        wait_for(lambda: doomed.metric("instgenie:num_requests_running") > 0)
        retried = [threads.submit(stubborn, seed) for seed in range(NUM_EDITS)]
        wait_for(lambda: doomed.metric("instgenie:request_success_total") > finished)
        os.kill(doomed.process.pid, signal.SIGKILL)
        answers = [*(one.result() for one in retried), get(other, "request-patient")]
    assert {answer.status_code for answer in answers} == {200}, [answer.text[:300] for answer in answers]
    assert num_jobs(other) == before + 1 + len(answers)  # and the one that asked before
    for answer, expected in zip(answers, undisturbed, strict=True):
        assert alike(pixels_of(answer), pixels_of(expected))
    for seed in range(NUM_EDITS):
        for id in (f"key-{seed}", f"request-key-{seed}"):
            found = get(other, id)
            assert found.status_code == 200, found.text[:300]
            assert found.json()["data"][0]["seed"] == seed
