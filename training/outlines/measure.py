"""Measures the outlines that the page finds, with the page's own code (Node), on pets which were kept out of training
and on the shipped examples whose mask is an object's outline:

python -m training.outlines.measure PHOTOS [--limit 100] [--weights FILE]
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from PIL import Image

from instgenie.bench.photos import load_photos
from instgenie.pictures.mask import read_mask
from instgenie.types import PixelMask, Pixels

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "instgenie"
WEIGHTS = PACKAGE / "server/static/select/outline.weights.gz"
EXAMPLES = ("wren.jpg", "hibiscus.webp", "coffee.png")
LARGEST = 1024  # pixels of a side, as on the page


def pets(folder: Path, limit: int) -> Iterator[tuple[Pixels, PixelMask]]:
    photos = load_photos(folder, "val")
    rows = [at for at in range(len(photos)) if photos.outlines[at].any()]
    for at in rows[:: max(1, len(rows) // limit)][:limit]:
        yield photos.pictures[at].permute(1, 2, 0).numpy(), photos.outlines[at].numpy()


def examples() -> Iterator[tuple[Pixels, PixelMask]]:
    for name in EXAMPLES:
        path = PACKAGE / "examples" / name
        picture = Image.open(path).convert("RGB")
        masked = read_mask(path.with_suffix(".mask.png").read_bytes(), (picture.height, picture.width))
        mask = Image.fromarray(np.asarray(masked))
        picture.thumbnail((LARGEST, LARGEST))
        yield np.asarray(picture), np.asarray(mask.resize(picture.size))


def write(pictures: Iterable[tuple[Pixels, PixelMask]], path: Path) -> None:
    """Write width and height, red, green, blue and alpha, and the outline (1 inside) of each picture."""
    with open(path, "wb") as file:
        for picture, outline in pictures:
            height, width = outline.shape
            opaque = np.full((height, width, 1), 255, np.uint8)
            file.write(np.array([width, height], "<u4").tobytes())
            file.write(np.concatenate([picture, opaque], 2).tobytes() + outline.astype(np.uint8).tobytes())


def measure(pictures: Iterable[tuple[Pixels, PixelMask]], weights: Path) -> Any:
    """Return IoU by number of clicks (one list per number), with a box, and milliseconds of each outline."""
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "pictures.bin"
        write(pictures, path)
        command = ["node", str(HERE / "measure.mjs"), str(path), str(weights)]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the outlines that clicks and boxes give.")
    parser.add_argument("photos", type=Path)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    given = parser.parse_args()
    scores = measure(pets(given.photos, given.limit), given.weights)
    rows = [(f"{count} clicks", values) for count, values in enumerate(scores["clicks"], 1)] + [("box", scores["box"])]
    print(f"{len(scores['box'])} held-out pets, {median(scores['milliseconds']):.0f} ms per outline (median)")
    for name, values in rows:
        worst = sorted(values)[len(values) // 10]
        print(f"{name:9} mean IoU {mean(values):.3f}, median {median(values):.3f}, worst tenth below {worst:.3f}")
    scores = measure(examples(), given.weights)
    print(f"examples, {median(scores['milliseconds']):.0f} ms per outline (median)")
    for at, name in enumerate(EXAMPLES):
        by_click = " ".join(f"{values[at]:.3f}" for values in scores["clicks"])
        print(f"{name:14} IoU by click {by_click}, box {scores['box'][at]:.3f}")


if __name__ == "__main__":
    main()
