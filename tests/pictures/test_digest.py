"""Digests of pictures."""

import numpy as np
import pytest

from instgenie.pictures import digest as module
from instgenie.pictures.digest import ArrayMemo, digest, masked_share, picture_digest


def test_digests_depend_on_size_and_pixels() -> None:
    picture = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    other = picture.copy()
    other[0, 0, 0] ^= 1
    assert digest(picture) == digest(picture.copy())
    assert len({digest(picture), digest(other), digest(picture.reshape(4, 2, 3))}) == 3


def test_an_array_is_hashed_once_while_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    monkeypatch.setattr(module, "digest", lambda picture: (hashed.append(picture.shape), digest(picture))[1])
    digests = ArrayMemo(lambda picture: module.digest(picture))
    monkeypatch.setattr(module, "_digests", digests)
    picture, other = np.zeros((2, 2, 3), np.uint8), np.ones((2, 2, 3), np.uint8)
    found = [picture_digest(one) for one in (picture, other, picture)]
    assert found == [digest(picture), digest(other), digest(picture)]
    assert len(hashed) == 2
    for value in range(20):  # new arrays may lie where old ones lay
        picture = np.full((2, 2, 3), value, np.uint8)
        assert picture_digest(picture) == digest(picture)
    del picture, other
    hashed.clear()
    assert len(digests) == 0  # nothing is remembered of pictures that are gone


def test_masked_shares() -> None:
    mask = np.zeros((3, 4), np.bool_)
    assert masked_share(mask) == 0
    mask = mask.copy()
    mask[1, :3] = True
    assert masked_share(mask) == 0.25
    assert masked_share(~mask) == 0.75
    assert masked_share(np.ones((1000, 999), np.bool_)) == 1
