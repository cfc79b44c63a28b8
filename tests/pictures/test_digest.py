"""Digests of pictures."""

import numpy as np
import pytest

from instgenie.pictures import digest as module
from instgenie.pictures.digest import Digests, digest


def test_digests_depend_on_size_and_pixels() -> None:
    picture = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    other = picture.copy()
    other[0, 0, 0] ^= 1
    assert digest(picture) == digest(picture.copy())
    assert len({digest(picture), digest(other), digest(picture.reshape(4, 2, 3))}) == 3


def test_an_array_is_hashed_once_while_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    monkeypatch.setattr(module, "digest", lambda picture: (hashed.append(picture.shape), digest(picture))[1])
    digests = Digests()
    picture, other = np.zeros((2, 2, 3), np.uint8), np.ones((2, 2, 3), np.uint8)
    assert [digests.of(one) for one in (picture, other, picture)] == [digest(picture), digest(other), digest(picture)]
    assert len(hashed) == 2
    for value in range(20):  # new arrays may lie where old ones lay
        picture = np.full((2, 2, 3), value, np.uint8)
        assert digests.of(picture) == digest(picture)
    del picture, other
    hashed.clear()
    assert len(digests) == 0  # nothing is remembered of pictures that are gone
