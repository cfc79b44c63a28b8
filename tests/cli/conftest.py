"""A desk for tests of commands."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from instgenie.pictures.mask import box_mask


@pytest.fixture
def desk(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a photograph and masks of it, and an empty cache elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    noise = np.random.default_rng(0).integers(0, 256, (60, 100, 3), np.uint8)
    Image.fromarray(noise).save("photo.jpg")
    mask = box_mask((20, 10, 40, 30), (60, 100))
    Image.fromarray(mask).save("luma.png")
    Image.fromarray(np.dstack([noise, np.where(mask, 0, 255).astype(np.uint8)])).save("alpha.png")
    Image.new("RGBA", (100, 60), "white").save("empty.png")
    Image.new("RGBA", (101, 60), (0, 0, 0, 0)).save("other.png")
    Image.new("1", (9000, 8000)).save("huge.png")
    Image.new("RGB", (8, 8)).save("tiny.png")
    Path("text.png").write_text("not a picture")
    Path("cut.jpg").write_bytes(Path("photo.jpg").read_bytes()[:2000])
    return tmp_path
