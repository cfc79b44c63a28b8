"""Captioned photographs from tar shards."""

from pathlib import Path

import pytest
from helpers.photos import write_photos

from instgenie.bench.photos import load_photos
from instgenie.errors import PictureError


def test_splits_are_apart_and_outlines_are_the_pets(tmp_path: Path) -> None:
    write_photos(tmp_path, 4, 6)
    val, train = load_photos(tmp_path, "val"), load_photos(tmp_path, "train")
    assert (len(val), len(train)) == (4, 6)
    assert not set(val.ids) & set(train.ids)
    assert val.pictures.shape == (4, 3, 256, 256)
    assert val.outlines.any(2).any(1).tolist() == [species == "cat" for species in val.species]
    assert len(load_photos(tmp_path, "train", limit=3)) == 3


def test_what_is_no_folder_of_photographs_says_so(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match=r"no captions\.csv"):
        load_photos(tmp_path, "val")
    write_photos(tmp_path, 0, 2)
    with pytest.raises(PictureError, match="no photographs of the split 'val'"):
        load_photos(tmp_path, "val")
