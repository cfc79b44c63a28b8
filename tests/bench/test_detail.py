"""The measure of detail: it sees blur inside a mask, and masks depend on file names alone."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from instgenie.bench.detail import bench_detail, detail, ellipse
from instgenie.errors import PictureError
from instgenie.models.model import Model
from instgenie.pictures.matching import blurred


def test_detail_falls_with_blur() -> None:
    photo = np.random.default_rng(0).integers(0, 256, (200, 240, 3), np.uint8)
    mask = ellipse((200, 240), 0.05, "a.jpg")
    soft = np.where(mask[..., None], blurred(photo.astype(np.float32), 2, 1), photo).astype(np.uint8)
    assert detail(photo, mask) == pytest.approx(1, rel=0.1)
    assert detail(soft, mask) < 0.5


def test_masks_have_their_share_and_their_place() -> None:
    one, again, other = (ellipse((300, 400), 0.04, name) for name in ("a.jpg", "a.jpg", "b.jpg"))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    assert one.mean() == pytest.approx(0.04, rel=0.05)


def test_a_folder_without_large_photographs_is_refused(tmp_path: Path, models: dict[str, Model]) -> None:
    Image.new("RGB", (100, 100)).save(tmp_path / "small.png")
    with pytest.raises(PictureError, match="2 megapixels"):
        bench_detail(tmp_path, models["sd_fill"], [0.01], "a cat", 2, None, None)


def test_pictures_are_kept_in_a_folder_of_their_own(tmp_path: Path, models: dict[str, Model]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (1250, 1610, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "large.jpg")
    bench_detail(tmp_path, models["sd_fill"], [0.01], "a cat", 1, None, tmp_path / "kept" / "here")
    with Image.open(tmp_path / "kept" / "here" / "large-0.01.png") as kept:
        assert kept.width % 4 == 0  # the photograph, whole, crop without grain, crop
        assert kept.width > kept.height
