"""Edits without a mask, as chat front ends send them, and variations: the result depends on the picture."""

from typing import Any

import numpy as np
import pytest
from helpers.serving import PICTURE, QUICK, Running, edit, mask, picture, pixels, png

OTHER = png(picture(1))


@pytest.fixture(params=["server", "narrow"])
def running(request: pytest.FixtureRequest) -> Running:
    """A server of each family: a transformer with a flow schedule, a UNet."""
    found: Running = request.getfixturevalue(request.param)
    return found


def unmasked(running: Running, image: bytes, **extra: Any) -> Any:
    return running.openai().images.edit(image=image, prompt="a cat", extra_body={"seed": 5} | extra)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_without_a_mask_the_picture_matters(running: Running, steps: int) -> None:
    one, other = (unmasked(running, image, num_inference_steps=steps) for image in (PICTURE, OTHER))
    assert one.data[0].masked_share == 1
    assert not np.array_equal(pixels(one), pixels(other))
    assert (pixels(one) != picture()).any(axis=2).mean() > 0.9
    [note] = one.notes
    assert note.startswith("There is no mask, so the whole picture was edited with a strength of 0.")


def test_a_strength_of_one_starts_from_noise(running: Running) -> None:
    one, other = (unmasked(running, image, num_inference_steps=2, strength=1) for image in (PICTURE, OTHER))
    assert np.array_equal(pixels(one), pixels(other))
    assert one.notes == []


def test_a_given_strength_is_kept(server: Running) -> None:
    low, default = (unmasked(server, PICTURE, num_inference_steps=5, **extra) for extra in ({"strength": 0.2}, {}))
    assert low.notes == []
    assert not np.array_equal(pixels(low), pixels(default))


def test_transparent_pixels_are_the_mask(server: Running, edited: Any) -> None:
    holed = png(np.dstack([picture(), np.where(mask(), 0, 255).astype(np.uint8)]))
    answer = server.openai().images.edit(image=holed, prompt="a red cat", extra_body=QUICK)
    result = pixels(answer)
    assert answer.data[0].masked_share == edited.data[0].masked_share  # type: ignore[index]
    assert np.array_equal(result[~mask()], picture()[~mask()])
    assert not np.array_equal(result[mask()], picture()[mask()])
    assert answer.notes == ["There is no mask, so the transparent part of the picture was edited."]  # type: ignore[attr-defined]


def test_slightly_transparent_pixels_are_no_mask(server: Running) -> None:
    veiled = png(np.dstack([picture(), np.where(mask(), 200, 255).astype(np.uint8)]))
    assert unmasked(server, veiled, num_inference_steps=2).data[0].masked_share == 1


def test_a_mask_keeps_its_strength(server: Running) -> None:
    plain, full = edit(server), edit(server, extra_body={"strength": 1})
    assert plain.notes == []
    assert np.array_equal(pixels(plain), pixels(full))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the client's own, of an endpoint that it still has
def test_variations_need_no_prompt(server: Running) -> None:
    answers = [
        server.openai().images.create_variation(
            image=image, n=2, extra_body={"num_inference_steps": 3, "seed": 5}, response_format="b64_json"
        )
        for image in (PICTURE, OTHER)
    ]
    one, other = (pixels(answer) for answer in answers)
    assert not np.array_equal(one, other)
    assert not np.array_equal(one, pixels(answers[0], 1))
    assert not np.array_equal(one, picture())
