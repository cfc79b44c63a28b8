"""Requests with an idempotency key: repeated ones run once."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from helpers.serving import ALICE, BOB, MASK, PICTURE, Running, picture, png, wait_for

from instgenie.cluster.orders import Finished
from instgenie.server.idempotency import Idempotency
from instgenie.server.runs import EditRun, RunTicket

FIELDS = {"prompt": "a red cat", "num_inference_steps": "2"}


def post(server: Running, key: str | None, tenant: str = ALICE, header: bool = True, **fields: str) -> httpx.Response:
    headers = {"idempotency-key": key} if key and header else {}
    sent = FIELDS | fields | ({"idempotency_key": key} if key and not header else {})
    with server.http(tenant) as client:
        return client.post("/v1/images/edits", files={"image": PICTURE, "mask": MASK}, data=sent, headers=headers)


def num_edits(server: Running) -> float:
    return server.metric("instgenie:request_success_total")


def test_a_repeated_key_gets_the_kept_answer(server: Running) -> None:
    """Also without a seed, and whether the key is in the header or in the body."""
    before = num_edits(server)
    first, second, third = post(server, "kept"), post(server, "kept"), post(server, "kept", header=False)
    assert first.status_code == 200, first.text
    assert first.json()["data"] == second.json()["data"] == third.json()["data"]
    assert num_edits(server) == before + 1
    assert "idempotent-replayed" not in first.headers
    assert second.headers["idempotent-replayed"] == "true"
    assert any("ran once" in note for note in second.json()["notes"])
    assert not any("ran once" in note for note in first.json()["notes"])


def test_repeated_keys_join_the_running_edit(server: Running) -> None:
    before = num_edits(server)
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: post(server, "joined", num_inference_steps="20"), range(4)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["data"][0]["b64_json"] for answer in answers}) == 1
    assert sum("idempotent-replayed" in answer.headers for answer in answers) == 3
    assert num_edits(server) == before + 1


def test_a_stream_joins_too(server: Running) -> None:
    first = post(server, "streamed")
    second = post(server, "streamed", stream="true", stream_progress="true")
    assert "event: image_edit.completed" in second.text
    assert second.text.endswith("data: [DONE]\n\n")
    assert first.json()["data"][0]["b64_json"] in second.text
    assert second.headers["idempotent-replayed"] == "true"


@pytest.mark.parametrize("other", [{"prompt": "a dog"}, {"seed": "7"}, {"n": "2"}])
def test_another_request_with_the_same_key_is_refused(server: Running, other: dict[str, str]) -> None:
    assert post(server, "taken").status_code == 200
    refused = post(server, "taken", **other)
    assert refused.status_code == 422
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("idempotency_key_reused", "idempotency_key")
    assert "belongs to another request" in error["message"]


def test_another_picture_with_the_same_key_is_refused(server: Running) -> None:
    post(server, "picture")
    with server.http() as client:
        files = {"image": png(picture(9)), "mask": MASK}
        refused = client.post("/v1/images/edits", files=files, data=FIELDS, headers={"idempotency-key": "picture"})
    assert refused.status_code == 422


def test_two_tenants_may_use_the_same_key(server: Running) -> None:
    post(server, "mine")
    other = post(server, "mine", BOB, prompt="a dog", store="false")
    assert other.status_code == 200
    assert "idempotent-replayed" not in other.headers
    assert get(server, "mine", BOB).json()["data"] == other.json()["data"]
    assert get(server, "mine", BOB).json()["data"] != get(server, "mine").json()["data"]


@pytest.mark.parametrize(("header", "body"), [("", None), ("ü", None), ("x" * 256, None), ("one", "other")])
def test_keys_that_are_not_valid_are_refused(server: Running, header: str, body: str | None) -> None:
    with server.http() as client:
        fields = FIELDS | ({"idempotency_key": body} if body else {})
        refused = client.post(
            "/v1/images/edits",
            files={"image": PICTURE},
            data=fields,
            headers=[(b"idempotency-key", header.encode("latin-1"))],
        )
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == "idempotency_key"


def test_a_refused_request_leaves_its_key_free(server: Running) -> None:
    with server.http() as client:
        headers = {"idempotency-key": "free"}
        refused = client.post("/v1/images/edits", files={"image": b"no picture"}, data=FIELDS, headers=headers)
    assert refused.status_code == 400
    assert post(server, "free").status_code == 200


def get(server: Running, id: str, tenant: str = ALICE) -> httpx.Response:
    with server.http(tenant) as client:
        return client.get(f"/v1/images/edits/{id}")


def test_the_answer_is_found_by_key_and_by_request_id(server: Running) -> None:
    first = post(server, "found")
    assert get(server, "found").json()["data"] == first.json()["data"]
    assert get(server, first.headers["x-request-id"]).json()["data"] == first.json()["data"]
    for missing in (get(server, "never"), get(server, "found", BOB)):
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "edit_not_found"


def test_an_edit_whose_client_left_runs_on(server: Running) -> None:
    def leave() -> None:
        with server.http() as client:
            client.timeout = 0.5
            files: Any = {"image": PICTURE, "mask": MASK}
            fields = FIELDS | {"num_inference_steps": "400"}
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/images/edits", files=files, data=fields, headers={"idempotency-key": "left"})

    before = num_edits(server)
    leave()
    running = get(server, "left")
    assert (running.status_code, running.json()["state"]) == (202, "running")
    wait_for(lambda: get(server, "left").status_code == 200)
    answer = post(server, "left", num_inference_steps="400")
    assert answer.headers["idempotent-replayed"] == "true"
    assert num_edits(server) == before + 1


def test_a_deadline_ends_a_request_but_not_its_run(server: Running) -> None:
    before = num_edits(server)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(post, server, "late", num_inference_steps="100")
        wait_for(lambda: get(server, "late").status_code == 202)
        late = post(server, "late", num_inference_steps="100", deadline_ms="100", on_late="reject")
    assert (late.status_code, late.json()["error"]["code"]) == (408, "deadline_exceeded")
    assert first.result().status_code == 200
    assert post(server, "late", num_inference_steps="100").headers["idempotent-replayed"] == "true"
    assert num_edits(server) == before + 1


def test_a_hopeless_request_leaves_its_key_free(server: Running) -> None:
    hopeless = post(server, "hopeless", num_inference_steps="999", deadline_ms="1000", on_late="reject")
    assert (hopeless.status_code, hopeless.json()["error"]["code"]) == (408, "deadline_unreachable")
    answer = post(server, "hopeless", num_inference_steps="2")
    assert answer.status_code == 200
    assert "idempotent-replayed" not in answer.headers


def test_generations_have_keys_too(server: Running) -> None:
    with server.http() as client:
        body = {"prompt": "a cat", "num_inference_steps": 2, "size": "64x64"}
        first, second = (
            client.post("/v1/images/generations", json=body, headers={"idempotency-key": "made"}) for _ in range(2)
        )
    assert first.json()["data"] == second.json()["data"]
    assert second.headers["idempotent-replayed"] == "true"


def test_without_a_key_nothing_is_kept(server: Running) -> None:
    before, first = num_edits(server), post(server, None)
    post(server, None)
    assert num_edits(server) == before + 2
    assert get(server, first.headers["x-request-id"]).status_code == 404


def test_answers_are_kept_up_to_a_number_of_bytes_and_seconds() -> None:
    now, forgotten = [0.0], list[str]()

    async def play() -> None:
        cluster: Any = SimpleNamespace(clerk=SimpleNamespace(forget=forgotten.append))
        kept = Idempotency(cluster, 8, 60.0, lambda: now[0])
        for name in ("a", "b", "b", "c"):
            kept._keep(ended_run(name))
            now[0] += 10
        assert (list(kept._runs), list(kept._names), kept._num_bytes) == (["b", "c"], ["request b", "request c"], 8)
        now[0] = 85.0
        kept._drop_old()
        assert (list(kept._runs), forgotten, kept._num_bytes) == (["c"], ["a", "b"], 4)

    asyncio.run(play())


def ended_run(name: str) -> EditRun:
    run, facts = EditRun(name, "body", f"request {name}"), Any
    run.tickets = [RunTicket(name)]
    run.tickets[0].tell(Finished(b"1234", facts))  # type: ignore[arg-type]
    run.tickets[0].tell(None)
    return run
