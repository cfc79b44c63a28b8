"""A desk for tests of commands."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from instgenie.pictures.mask import box_mask


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a photograph, masks of it and pictures that are bad in some way."""
    folder = tmp_path_factory.mktemp("pictures")
    noise = np.random.default_rng(0).integers(0, 256, (60, 100, 3), np.uint8)
    Image.fromarray(noise).save(folder / "photo.jpg")
    mask = box_mask((20, 10, 40, 30), (60, 100))
    Image.fromarray(mask).save(folder / "luma.png")
    Image.fromarray(np.dstack([noise, np.where(mask, 0, 255).astype(np.uint8)])).save(folder / "alpha.png")
    Image.new("RGBA", (100, 60), "white").save(folder / "empty.png")
    Image.new("RGBA", (101, 60), (0, 0, 0, 0)).save(folder / "other.png")
    Image.new("1", (9000, 8000)).save(folder / "huge.png")
    Image.new("RGB", (8, 8)).save(folder / "tiny.png")
    (folder / "text.png").write_text("not a picture")
    (folder / "cut.jpg").write_bytes((folder / "photo.jpg").read_bytes()[:2000])
    return folder


@pytest.fixture
def desk(
    pictures: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder to work in, with copies of the pictures, and an empty cache elsewhere."""
    monkeypatch.chdir(shutil.copytree(pictures, tmp_path, dirs_exist_ok=True))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    return tmp_path
