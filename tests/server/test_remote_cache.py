"""A server with a remote cache and no disk: templates outlive it, and are deleted though the store is away for a while.
The store is a real S3-compatible server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.s3 import URL, Server
from helpers.serving import ALICE, MASK, Running, picture, png, register, running_server, wait_for

STEPS = "4"


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    server = Server()
    yield server
    server.kill()


def objects(s3: Server) -> set[str]:
    """The names of the files that the remote cache has of templates."""
    found = s3.files().find(URL.removeprefix("s3://"))
    return {path.rpartition("/")[2] for path in found}


def edit(server: Running, **fields: str) -> Any:
    given = {"prompt": "a red cat", "num_inference_steps": STEPS, "seed": "5"} | fields
    files = {"mask": MASK} | ({} if "template" in fields else {"image": png(picture(seed=1))})
    with server.http() as client:
        answer = client.post("/v1/images/edits", files=files, data=given)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"][0]


def listed(server: Running) -> dict[str, str]:
    with server.http() as client:
        return {one["id"]: one["state"] for one in client.get("/v1/templates").json()["data"]}


def test_a_remote_cache_keeps_templates_and_deletes_them(folders: dict[str, Path], tmp_path: Path, s3: Server) -> None:
    variables = {f"FSSPEC_S3_{name.upper()}": value for name, value in s3.options.items()}
    flags = [str(folders["sd_fill"]), "--remote-cache", URL, "--api-key", ALICE, "--shutdown-timeout", "60"]
    flags += ["--batching", "static"]  # one process per worker, which starts sooner
    with running_server(tmp_path, *flags, "--no-auto-register", **variables) as server:
        edit(server)
        name = register(server, png(picture(seed=1)), num_inference_steps=STEPS)
        first = edit(server)
        assert server.stop() == 0  # whatever is not yet written is written now
    assert first["cache_tier"] == "host"
    assert {"0000-0003.safetensors", "picture.safetensors", "asked"} <= objects(s3)

    with running_server(tmp_path, *flags, **variables) as server:
        wait_for(lambda: listed(server) == {name: "ready"})
        again = edit(server, template=name)
        assert (again["cache_tier"], again["b64_json"]) == ("remote", first["b64_json"])
        s3.hang()
        with server.http() as client:
            pending = client.delete(f"/v1/templates/{name}")
            assert pending.status_code == 202, pending.text
            assert pending.json()["deleted"] is False
            assert "not yet deleted everywhere" in pending.json()["message"]
            assert listed(server) == {}
            assert client.get(f"/v1/templates/{name}").status_code == 404
            assert edit(server, store="false")["cache_tier"] is None
            assert client.delete(f"/v1/templates/{name}").status_code == 202
            s3.go_on()
            wait_for(lambda: client.delete(f"/v1/templates/{name}").status_code == 404)
        assert objects(s3) == set()
        assert edit(server, store="false")["cache_tier"] is None
        assert listed(server) == {}
        assert server.stop() == 0
    assert objects(s3) == set()
