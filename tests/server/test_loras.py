"""LoRAs over HTTP: named in requests, listed, registered and refused."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from helpers.serving import ALICE, BOB, MASK, PICTURE, Running, pixels_of, running_server

from instgenie.adapters.keys import NETWORK

if TYPE_CHECKING:
    from helpers.browser import Visitor
    from playwright.sync_api import Browser

    from instgenie.models.model import Model

FIELDS = {"prompt": "a red cat", "num_inference_steps": "2", "seed": "5", "reuse": "off"}


@pytest.fixture(scope="module")
def loras(
    folders: dict[str, Path], models: "dict[str, Model]", tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    import torch
    from helpers.loras import save_lora
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("loras")
    (folder / "dir").mkdir()
    model = models["sd_fill"]
    names = list(model.layer_table.shapes[NETWORK])
    for seed, name in enumerate(["dir/one", "dir/two", "style", "secret"]):
        save_lora(folder / f"{name}.safetensors", model, names, seed=seed)
    save_lora(folder / "dir" / "other.safetensors", models["sdxl"], ["add_embedding.linear_1"])
    good = (folder / "dir" / "one.safetensors").read_bytes()
    (folder / "dir" / "cut.safetensors").write_bytes(good[:-3])
    tensors = load_file(folder / "dir" / "one.safetensors")
    save_file({key: tensor * float("nan") for key, tensor in tensors.items()}, folder / "dir" / "nan.safetensors")
    save_file(
        {key.replace("down_blocks", "nowhere"): tensor for key, tensor in tensors.items()}, folder / "ghost.safetensors"
    )
    first = next(key for key, tensor in tensors.items() if tensor.ndim == 2)
    save_file(tensors | {first: torch.zeros(7, 5)}, folder / "shapes.safetensors")
    flags = ["--lora-dir", str(folder / "dir"), "--lora-modules", f"style={folder / 'style.safetensors'}"]
    keys = ["--api-key", ALICE, "--api-key", BOB, "--served-model-name", "tiny"]
    with running_server(folder, str(folders["sd_fill"]), *flags, *keys) as running:
        yield running


def edit(server: Running, key: str = ALICE, **fields: Any) -> httpx.Response:
    with server.http(key) as client:
        return client.post("/v1/images/edits", files={"image": PICTURE, "mask": MASK}, data=FIELDS | fields)


def painted(server: Running, **fields: Any) -> Any:
    answer = edit(server, **fields)
    assert answer.status_code == 200, answer.text
    return pixels_of(answer)


def test_an_edit_with_a_lora_says_so(loras: Running) -> None:
    plain, answer = painted(loras), edit(loras, lora="style")
    assert answer.status_code == 200, answer.text
    [one] = answer.json()["data"]
    assert one["loras"]["from_step"] == 0  # 30 % of 2 steps is none: it waited for its LoRA
    assert one["loras"]["waited_seconds"] >= 0
    assert not np.array_equal(plain, pixels_of(answer))
    again = edit(loras, lora="style", lora_scale="1").json()
    assert again["data"][0]["loras"] == {"from_step": 0, "tier": "host", "waited_seconds": 0.0}
    assert "The LoRA 'style' was applied from the first of 2 steps." in again["notes"]
    assert edit(loras).json()["data"][0]["loras"] is None
    assert np.array_equal(plain, painted(loras))
    assert loras.metric("instgenie:lora_edits_total") == 2
    assert loras.metric("instgenie:lora_loads_total") == 1
    assert loras.metric("instgenie:lora_bytes") > 0


def test_ways_to_name_loras(loras: Running) -> None:
    for name in ("one", "two"):
        painted(loras, lora=name)  # in memory from here on
    both = painted(loras, loras=json.dumps([{"name": "one", "scale": 0.5}, {"name": "two"}]))
    assert np.array_equal(both, painted(loras, loras="one:0.5,two"))
    assert not np.array_equal(both, painted(loras, loras="one,two"))
    assert np.array_equal(painted(loras, lora="one"), painted(loras, model="one"))
    assert np.array_equal(painted(loras), painted(loras, lora="one", lora_scale="0"))


def test_edits_with_different_loras_share_a_server(loras: Running) -> None:
    """A request with several pictures, and others beside it, get what they would get alone."""
    from concurrent.futures import ThreadPoolExecutor

    wanted: list[dict[str, Any]] = [{"lora": "one"}, {"lora": "two"}, {}, {"loras": "one:0.5,two"}, {"lora": "style"}]
    alone = [painted(loras, **fields) for fields in wanted]
    with ThreadPoolExecutor(5) as threads:
        together = list(threads.map(lambda fields: painted(loras, **fields), wanted))
    for one, other in zip(alone, together, strict=True):
        assert int(np.abs(one.astype(int) - other).max()) <= 1


@pytest.mark.parametrize(
    ("fields", "status", "code", "message"),
    [
        ({"lora": "nobody"}, 404, "lora_not_found", "The LoRA 'nobody' does not exist."),
        ({"lora": "../secret"}, 404, "lora_not_found", "does not exist"),
        ({"lora": "other"}, 400, "invalid_lora", "The LoRA 'other' does not fit: the key 'unet.add_embedding"),
        ({"lora": "cut"}, 400, "invalid_lora", "truncated"),
        ({"lora": "nan"}, 400, "invalid_value", "values that are not finite numbers"),
        ({"lora": "one", "loras": "two"}, 400, "invalid_value", "both lora and loras"),
        ({"lora_scale": "1"}, 400, "invalid_value", "no lora"),
        ({"lora": "one", "lora_scale": "1000"}, 400, "invalid_value", "100"),
        ({"loras": "[1]"}, 400, "invalid_value", "each is expected"),
        ({"loras": "one:x"}, 400, "invalid_value", "a scale from -100 to 100"),
        ({"loras": "[{"}, 400, "invalid_value", "a list in JSON"),
        ({"loras": ",".join(["one"] * 9)}, 400, "invalid_value", "at most 8"),
        ({"lora_weight": "1"}, 400, "unknown_parameter", "it is called 'lora_scale' here"),
    ],
)
def test_bad_names_and_files_are_refused(
    loras: Running, fields: dict[str, str], status: int, code: str, message: str
) -> None:
    answer = edit(loras, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), answer.text
    assert message in error["message"]


def test_loras_are_listed_as_models(loras: Running) -> None:
    with loras.http() as client:
        listed = {one["id"]: one for one in client.get("/v1/models").json()["data"]}
        assert set(listed) == {"tiny", "one", "two", "nan", "other", "style"}  # the truncated file is none
        assert {"family", "abilities"} < set(listed["tiny"])
        assert not {"root", "parent"} & set(listed["tiny"])  # which LoRAs alone have
        assert (listed["one"]["parent"], listed["one"]["root"]) == ("tiny", "one.safetensors")
        assert client.get("/v1/models/one").json() == listed["one"]
        assert client.get("/v1/models/none").status_code == 404
        assert [one["id"] for one in client.get("/v1/loras").json()["data"]] == ["nan", "one", "other", "style", "two"]


def test_a_lora_belongs_to_the_key_that_named_it(loras: Running) -> None:
    with loras.http() as client, loras.http(BOB) as other:
        made = client.post("/v1/loras", json={"name": "mine", "path": "one.safetensors"})
        assert made.status_code == 201, made.text
        assert made.json()["num_bytes"] > 0
        assert (made.json()["shared"], made.json()["root"]) == (False, "one.safetensors")
        assert client.get("/v1/loras/mine").json() == made.json()
        assert np.array_equal(painted(loras, lora="one"), painted(loras, lora="mine"))
        refused = [other.get("/v1/loras/mine"), other.delete("/v1/loras/mine"), edit(loras, BOB, lora="mine")]
        assert [(one.status_code, one.json()["error"]["code"]) for one in refused] == [(404, "lora_not_found")] * 3
        assert "mine" not in [one["id"] for one in other.get("/v1/models").json()["data"]]
        assert client.delete("/v1/loras/mine").json() == {"id": "mine", "object": "lora", "deleted": True}
        assert client.get("/v1/loras/mine").status_code == 404
        wrong = {
            "../secret.safetensors": (400, "not inside the folder"),
            "nothing.safetensors": (404, "has no"),
            "other.safetensors": (400, "does not fit"),
            "cut.safetensors": (400, "truncated"),
        }
        for path, (status, message) in wrong.items():
            answer = client.post("/v1/loras", json={"lora_name": "x", "lora_path": path})
            assert answer.status_code == status, answer.text
            assert message in answer.json()["error"]["message"]
        assert client.delete("/v1/loras/style").status_code == 400  # the server's own
        assert client.post("/v1/loras", json={"name": "x"}).json()["error"]["param"] == "path"


def test_attacks_lose_nothing(loras: Running) -> None:
    """Files that are wrong in every way, and one that is damaged after it was named, while an honest edit runs."""
    from concurrent.futures import ThreadPoolExecutor

    folder = loras.log.parent
    honest = {"lora": "style", "num_inference_steps": "6"}
    alone = painted(loras, **honest)
    with loras.http() as client, ThreadPoolExecutor(1) as threads:
        for name in ("ghost", "shapes"):
            (folder / f"{name}.safetensors").rename(folder / "dir" / f"{name}.safetensors")
        running = threads.submit(painted, loras, **honest)
        wrong = {"ghost": "nowhere", "shapes": "has the shape [7, 5]", "nan": "not finite", "cut": "truncated"}
        for name, message in wrong.items():
            refused = edit(loras, lora=name)
            assert refused.status_code == 400, refused.text
            assert message in refused.json()["error"]["message"]
        good = (folder / "dir" / "two.safetensors").read_bytes()
        late = folder / "dir" / "late.safetensors"
        late.write_bytes(good)
        assert client.post("/v1/loras", json={"name": "victim", "path": late.name}).status_code == 201
        late.write_bytes(good[: len(good) // 2])
        assert "truncated" in edit(loras, lora="victim").json()["error"]["message"]
        late.unlink()
        assert "is gone" in edit(loras, lora="victim").json()["error"]["message"]
        assert np.array_equal(alone, running.result())
    assert loras.metric("instgenie:worker_restarts_total") == 0
    assert np.array_equal(alone, painted(loras, **honest))


@pytest.fixture
def visitor(browser: "Browser", loras: Running) -> "Iterator[Visitor]":
    from helpers.browser import Visitor

    visitor = Visitor(browser, loras.url, ALICE)
    yield visitor
    visitor.close()
    assert visitor.faults == []


def test_loras_on_the_page(visitor: "Visitor") -> None:
    """They are chosen from a list and have scales, are named beside the result, and outlive a reload."""
    from helpers.browser import WAIT, drag, fill_settings, open_picture_on, sent_forms
    from playwright.sync_api import expect

    page = visitor.open()
    open_picture_on(page)
    drag(page, (0.4, 0.4), (0.6, 0.6))
    page.select_option("#add-lora", "style")
    page.select_option("#add-lora", "two")
    page.get_by_label("Scale of style").fill("0.5")
    page.get_by_label("Remove two").click()
    page.select_option("#add-lora", "one")
    expect(page.locator("#add-lora option", has_text="one")).to_have_count(0)  # none is chosen twice
    fill_settings(page, steps=2)
    page.click("#run")
    expect(page.locator("#facts")).to_contain_text("style × 0.5, one × 1", timeout=WAIT)
    expect(page.locator("#facts")).to_contain_text("The LoRAs 'style', 'one' were applied from the first of 2 steps")
    [form] = sent_forms(page)
    assert form["loras"] == b"style:0.5,one:1"
    page.get_by_label("Remove one").click()
    expect(page).to_have_url(re.compile("loras=style%3A0.5&"))
    page.reload()
    expect(page.get_by_label("Scale of style")).to_have_value("0.5")
    expect(page.locator("#loras li")).to_have_count(1)
    page.click("#strip button")
    page.click("#again")  # the settings of the result
    expect(page.locator("#loras li")).to_have_text(["style0.5×", "one1×"])


def test_loras_behind_a_url(folders: dict[str, Path], models: "dict[str, Model]", tmp_path: Path) -> None:
    """They are copied to the disk while an edit takes steps, refused like others, and answer 503 while their store is
    away."""
    from helpers.loras import save_lora
    from helpers.s3 import BUCKET, Server

    style = save_lora(tmp_path / "style.safetensors", models["sd_fill"])
    s3 = Server()
    try:
        s3.files().put_file(str(style), f"{BUCKET}/loras/style.safetensors")
        s3.files().pipe_file(f"{BUCKET}/loras/cut.safetensors", style.read_bytes()[:-3])
        variables = {f"FSSPEC_S3_{name.upper()}": value for name, value in s3.options.items()}
        flags = ["--lora-remote", f"s3://{BUCKET}/loras", "--lora-disk-dir", str(tmp_path / "disk")]
        with running_server(tmp_path, str(folders["sd_fill"]), *flags, "--api-key", ALICE, **variables) as server:
            plain, answer = painted(server), edit(server, lora="style")
            assert answer.json()["data"][0]["loras"]["tier"] in ("remote", "host")  # it may have come before the edit
            assert not np.array_equal(plain, pixels_of(answer))
            assert [one.suffix for one in sorted((tmp_path / "disk").iterdir())] == [".lock", ".safetensors"]
            assert server.metric('instgenie:lora_loads_total{tier="remote"}') == 1
            with server.http() as client:
                names = {one["id"]: one["root"] for one in client.get("/v1/loras").json()["data"]}
            assert names == {name: f"{name}.safetensors" for name in ("cut", "style")}
            refused = edit(server, lora="cut")
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_lora")
            assert edit(server, lora="nobody").status_code == 404
            s3.kill()
            assert np.array_equal(pixels_of(answer), painted(server, lora="style"))
            away = edit(server, lora="other")
            assert (away.status_code, away.json()["error"]["code"]) == (503, "lora_unavailable")
            assert "does not answer" in away.json()["error"]["message"]
            assert int(away.headers["retry-after"]) > 0
    finally:
        s3.kill()
