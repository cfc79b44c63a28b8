"""The field `reuse`: the answer says whether a template's activations were used, and a client can pin it."""

from typing import Any

import numpy as np
import openai
import pytest
from helpers.serving import (
    ALICE,
    MASK,
    QUICK,
    SIZE,
    Running,
    alike,
    alpha_png,
    edit,
    picture,
    pixels,
    png,
    register,
)

NEW, KNOWN = (png(picture(seed=seed)) for seed in (301, 302))
STEPS = {"num_inference_steps": 4}


def edit_with(server: Running, image: bytes, reuse: str, **fields: Any) -> Any:
    return edit(server, image=image, **fields, extra_body=STEPS | {"reuse": reuse})


def facts(answer: Any, index: int = 0) -> tuple[str, str | None, bool]:
    one = answer.data[index].model_extra
    return one["reuse"], one["reuse_reason"], one["num_computed_tokens"] < one["num_tokens"]


def test_pinned_reuse_gives_the_same_picture_before_and_after_a_registration(server: Running) -> None:
    """The first edit of a picture and a later one differ only if the client leaves the choice to the server."""
    off = edit_with(server, NEW, "off")
    assert facts(off) == ("none", "The request asks for reuse=off.", False)
    first = edit_with(server, NEW, "template")
    assert facts(first) == ("template", None, True)
    assert facts(edit_with(server, NEW, "auto")) == ("template", None, True)
    assert alike(pixels(edit_with(server, NEW, "template")), pixels(first))
    assert alike(pixels(edit_with(server, NEW, "off")), pixels(off))
    assert not np.array_equal(pixels(first), pixels(off))


def test_an_answer_says_why_every_token_was_computed(server: Running) -> None:
    image = png(picture(seed=303))
    missed = edit(server, image=image, n=2, extra_body=STEPS)
    why = (
        "No activations are registered for the picture with these steps and this guidance, "
        "so the edit read what its own dense steps left behind."
    )
    assert [facts(missed, index) for index in range(2)] == [("own", why, True)] * 2
    exact = edit(server, image=image, quality="high", extra_body=STEPS)
    assert facts(exact) == ("none", "The quality 'exact' computes every token.", False)


def test_own_reuse_gives_the_same_picture_before_and_after_a_registration(server: Running) -> None:
    """With `own`, a template that is there is not read; with `quality=adaptive`, steps are found on the way."""
    image = png(picture(seed=304))
    first = edit_with(server, image, "own")
    assert facts(first)[0] == "own"
    register(server, image, num_inference_steps="4")
    again = edit_with(server, image, "own")
    why = "The request asks for reuse=own, so the edit read what its own dense steps left behind."
    assert facts(again) == ("own", why, True)
    assert alike(pixels(again), pixels(first))
    counted = server.metric('instgenie:edits_total{reuse="own"}')
    adaptive = edit_with(server, image, "own", quality="adaptive")
    assert facts(adaptive)[0] == "own"
    assert server.metric('instgenie:edits_total{reuse="own"}') == counted + 1


def test_a_ready_template_is_used(server: Running) -> None:
    register(server, KNOWN, num_inference_steps="4")
    assert facts(edit_with(server, KNOWN, "auto")) == ("template", None, True)


def test_the_last_event_of_a_stream_says_it_too(server: Running) -> None:
    fields = {"prompt": "a cat", "reuse": "off", "stream": "true"} | {name: str(value) for name, value in QUICK.items()}
    with server.http(ALICE) as client:
        answer = client.post("/v1/images/edits", files={"image": NEW, "mask": MASK}, data=fields)
    assert '"reuse": "none", "reuse_reason": "The request asks for reuse=off."' in answer.text


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"quality": "high"}, "the quality 'exact' computes every token"),
        ({"mask": alpha_png(np.ones(SIZE, np.bool_))}, "the mask covers the whole picture"),
        ({"extra_body": {"num_inference_steps": 1, "reuse": "template"}}, "computes 1 of 1 steps in full"),
        ({"extra_body": {"reuse": "always"}}, "'auto', 'own', 'template' or 'off'"),
    ],
)
def test_a_template_that_cannot_be_used_is_an_error(server: Running, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(openai.BadRequestError, match=why) as refused:
        edit(server, image=NEW, **{"extra_body": {"reuse": "template"} | STEPS} | fields)
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["param"] == "reuse"


def test_a_server_without_reuse_refuses_to_be_pinned_to_it(narrow: Running) -> None:
    with narrow.http() as client:
        files = {"image": NEW, "mask": MASK}
        refused = client.post("/v1/images/edits", files=files, data={"prompt": "a", "reuse": "template"})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "The edit cannot use a template: the server runs without reuse."
