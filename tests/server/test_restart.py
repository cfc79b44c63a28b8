"""What a server leaves in its cache folder is there for the next one, and for nobody else."""

import base64
from pathlib import Path

import numpy as np
from helpers.serving import ALICE, BOB, MASK, Running, mask, picture, png, register, running_server, wait_for

from instgenie.pictures.picture import open_picture

STEPS = "4"


def listed(server: Running, key: str) -> dict[str, dict[str, object]]:
    with server.http(key) as client:
        return {one["id"]: one for one in client.get("/v1/templates").json()["data"]}


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_templates_are_listed_used_and_deleted_after_a_restart(folders: dict[str, Path], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    flags = [str(folders["sd_fill"]), "--cache-dir", str(cache), "--api-key", ALICE, "--api-key", BOB]
    with running_server(tmp_path, *flags) as server:
        mine = register(server, png(picture(seed=1)), num_inference_steps=STEPS)
        other = register(server, png(picture(seed=1)), key=BOB, num_inference_steps=STEPS)
        wait_for(lambda: len(list(cache.glob("*/picture.safetensors"))) == 2)
        assert server.stop() == 0
    assert {path.stat().st_mode & 0o777 for path in files(cache)} == {0o600}
    with running_server(tmp_path, *flags) as server:
        wait_for(lambda: listed(server, ALICE) and listed(server, BOB))
        assert (set(listed(server, ALICE)), set(listed(server, BOB))) == ({mine}, {other})
        status = listed(server, ALICE)[mine]
        assert (status["state"], status["num_registered_steps"], status["size"]) == ("ready", 4, "56x40")
        assert status["tier_bytes"]["disk"] > 0  # type: ignore[index]
        fields = {"prompt": "a red cat", "num_inference_steps": STEPS, "template": mine}
        with server.http(BOB) as client:
            assert client.post("/v1/images/edits", files={"mask": MASK}, data=fields).status_code == 404
            assert client.delete(f"/v1/templates/{mine}").status_code == 404
        with server.http() as client:
            [one] = client.post("/v1/images/edits", files={"mask": MASK}, data=fields).json()["data"]
            assert one["cache_tier"] == "disk"
            result = open_picture(base64.b64decode(one["b64_json"]))
            assert np.array_equal(result[~mask()], picture(seed=1)[~mask()])
            assert client.delete(f"/v1/templates/{mine}").json()["deleted"]
        assert listed(server, ALICE) == {}
        wait_for(lambda: len(list(cache.iterdir())) == 1)
        assert set(listed(server, BOB)) == {other}
        assert server.stop() == 0
