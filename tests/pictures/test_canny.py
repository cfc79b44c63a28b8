"""Edges of pictures, for ControlNets that follow them."""

import numpy as np
import pytest

from instgenie.errors import ControlError
from instgenie.pictures.canny import canny, grow
from instgenie.pictures.control import make_control_image, read_controls
from instgenie.types import ControlUse


def square() -> np.ndarray:
    picture = np.full((40, 50, 3), 30, np.uint8)
    picture[10:30, 15:35, 1] = 220  # in one colour alone
    return picture


def test_a_square_has_a_thin_closed_outline() -> None:
    edges = canny(square())[..., 0] > 0
    assert edges.any()
    rows, columns = np.nonzero(edges)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (9, 29, 14, 34)
    assert edges[20].sum() == 2  # its left and its right side, one pixel each
    assert edges[:, 25].sum() == 2
    assert not edges[15:25, 20:30].any()


def test_flat_and_faint_pictures_have_no_edges() -> None:
    assert not canny(np.full((30, 30, 3), 99, np.uint8)).any()
    faint = np.full((30, 30, 3), 100, np.uint8)
    faint[:, 15:] = 110
    assert not canny(faint).any()
    assert canny(faint, low=10, high=20).any()


def test_weak_edges_go_on_from_strong_ones() -> None:
    weak = np.zeros((5, 9), np.bool_)
    weak[2] = True
    weak[0, 0] = True  # touches nothing strong
    strong = np.zeros_like(weak)
    strong[2, 8] = True
    assert np.array_equal(grow(strong, weak), np.arange(5)[:, None] == np.full((5, 9), 2))


def test_edges_are_those_of_a_turned_picture() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    turned = canny(np.ascontiguousarray(picture.transpose(1, 0, 2))).transpose(1, 0, 2)
    assert (canny(picture) == turned).mean() > 0.97  # ties are broken by direction


def test_what_is_not_made_here_says_what_it_needs() -> None:
    with pytest.raises(ControlError, match="'openpose' would need a pose estimator"):
        make_control_image("openpose", square())
    with pytest.raises(ControlError, match="is 'cany': a picture, or 'canny'"):
        make_control_image("cany", square())
    with pytest.raises(ControlError, match="is 20x20, the picture 50x40"):
        make_control_image(np.zeros((20, 20, 3), np.uint8), square())
    uses, images = read_controls([{"name": "a", "image": "canny", "scale": 0.5}], square())
    assert uses == (ControlUse("a", 0.5),)
    assert np.array_equal(images[0], canny(square()))
    with pytest.raises(ControlError, match="name and image"):
        read_controls([{"name": "a"}], square())
