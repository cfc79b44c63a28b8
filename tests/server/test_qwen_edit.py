"""Qwen-Image-Edit over HTTP: the model of one picture, and that of several."""

from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import httpx
import numpy as np
import pytest
from helpers.clusters import QUIRK
from helpers.serving import MASK, PICTURE, QUICK, Running, mask, picture, pixels_of, png, running_server

from instgenie.types import PixelMask

OTHERS = [("image[]", png(picture(seed))) for seed in (7, 8, 9)]
FIELDS = {"prompt": "a red cat", "feather": "0"} | {name: str(value) for name, value in QUICK.items()}


SMALL = """
    from functools import partial
    from instgenie.models.qwen import family

    def make_small(kind, **parts):
        return kind(**parts | {"own_size": 64})

    family.MAKERS.update({name: partial(make_small, kind) for name, kind in family.MAKERS.items()})
"""


def serve(make: Callable[[], Any], folder: Path) -> Iterator[Running]:
    """A server whose model works at 64 pixels and not at 1024, so that edits are quick."""
    import torch

    torch.manual_seed(0)
    make().save_pretrained(folder / "model")
    (folder / "small.py").write_text(dedent(SMALL))
    with running_server(folder, str(folder / "model"), **{QUIRK: str(folder / "small.py")}) as running:
        yield running


@pytest.fixture(scope="module")
def edit_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    from helpers.families import qwen_edit

    yield from serve(qwen_edit, tmp_path_factory.mktemp("qwen_edit"))


@pytest.fixture(scope="module")
def plus_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    from helpers.qwen import qwen_plus

    yield from serve(qwen_plus, tmp_path_factory.mktemp("qwen_plus"))


def post(server: Running, *files: tuple[str, bytes], **fields: str) -> httpx.Response:
    with server.http() as client:
        return client.post("/v1/images/edits", files=list(files), data=FIELDS | fields)


def summary_of(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["data"][0]


def abilities_of(server: Running) -> dict[str, Any]:
    with server.http() as client:
        [model] = client.get("/v1/models").json()["data"]
    assert model["family"] == "qwen"
    return model["abilities"]


def changed(answer: httpx.Response) -> PixelMask:
    return (pixels_of(answer) != picture()).any(axis=2)


def test_a_second_edit_is_served_from_the_template(edit_server: Running) -> None:
    files = ("image", PICTURE), ("mask", MASK)
    off, first = (post(edit_server, *files, reuse=how) for how in ("off", "template"))
    second = post(edit_server, *files, prompt="a blue dog")
    assert [summary_of(one)["reuse"] for one in (off, first, second)] == ["none", "template", "template"]
    nums = [summary_of(one)["num_computed_tokens"] for one in (off, first, second)]
    assert summary_of(off)["num_tokens"] == nums[0] > nums[1] == nums[2]
    for answer in (off, first, second):
        assert changed(answer).any()
        assert not (changed(answer) & ~mask()).any()
    assert not np.array_equal(pixels_of(first), pixels_of(second))


def test_an_edit_without_a_mask_changes_the_whole_picture(edit_server: Running) -> None:
    answer = post(edit_server, ("image", PICTURE))
    assert summary_of(answer)["masked_share"] == 1
    assert changed(answer).mean() > 0.9


def test_a_model_of_one_picture_refuses_more(edit_server: Running) -> None:
    answer = post(edit_server, ("image[]", PICTURE), OTHERS[0])
    assert answer.status_code == 400
    why = "this model edits one picture and has no use for reference pictures"
    assert answer.json()["error"]["message"] == f"There are 2 images: {why}."


def test_others_are_looked_at(plus_server: Running) -> None:
    """With a mask and without."""
    for files in ([("mask", MASK)], []):
        answers = [post(plus_server, ("image[]", PICTURE), *OTHERS[:num], *files) for num in range(3)]
        assert len({pixels_of(one).tobytes() for one in answers if summary_of(one)}) == 3
        assert all(changed(one).any() for one in answers)
        assert not files or not any((changed(one) & ~mask()).any() for one in answers)


def test_a_picture_alone_is_served_from_its_template(plus_server: Running) -> None:
    answer = post(plus_server, ("image", PICTURE), ("mask", MASK), reuse="template")
    assert summary_of(answer)["reuse"] == "template"


def test_a_model_of_several_pictures_refuses_more(plus_server: Running) -> None:
    answer = post(plus_server, ("image[]", PICTURE), *OTHERS)
    assert answer.status_code == 400
    why = "this model edits the first and looks at 2 others at most"
    assert answer.json()["error"]["message"] == f"There are 4 images: {why}."


def test_models_say_what_they_can(edit_server: Running, plus_server: Running) -> None:
    one, several = abilities_of(edit_server), abilities_of(plus_server)
    assert one == {
        "mask": True,
        "max_references": 0,
        "negative_prompt": True,
        "native_size": "64x64",
        "size_multiple": 4,
        "max_side": 4096,
        "steps": 50,
        "guidance_scale": 4.0,
    }
    assert several == one | {"max_references": 2}
