"""Measures the outlines that the page finds on pets which were kept out of training, with the page's own code (Node):

python -m training.outlines.measure PHOTOS [--limit 100] [--weights FILE]
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from instgenie.bench.photos import load_photos

HERE = Path(__file__).parent
WEIGHTS = HERE.parents[1] / "instgenie/server/static/select/outline.weights.gz"
SIDE = 256


def write_pets(folder: Path, limit: int, path: Path) -> int:
    """Write the pictures (red, green, blue, alpha) and outlines of held-out pets."""
    photos = load_photos(folder, "val")
    pets = [at for at in range(len(photos)) if photos.outlines[at].any()]
    pets = pets[:: max(1, len(pets) // limit)][:limit]
    with open(path, "wb") as file:
        for at in pets:
            picture = np.full((SIDE, SIDE, 4), 255, np.uint8)
            picture[..., :3] = photos.pictures[at].permute(1, 2, 0).numpy()
            file.write(picture.tobytes() + photos.outlines[at].numpy().astype(np.uint8).tobytes())
    return len(pets)


def measure(path: Path, weights: Path) -> Any:
    command = ["node", str(HERE / "measure.mjs"), str(path), str(SIDE), str(weights)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the outlines that clicks and boxes give.")
    parser.add_argument("photos", type=Path)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "pets.bin"
        num_pets = write_pets(given.photos, given.limit, path)
        scores = measure(path, given.weights)
    rows = [(f"{count} clicks", values) for count, values in enumerate(scores["clicks"], 1)] + [("box", scores["box"])]
    print(f"{num_pets} held-out pets, {median(scores['milliseconds']):.0f} ms per outline (median)")
    for name, values in rows:
        worst = sorted(values)[len(values) // 10]
        print(f"{name:9} mean IoU {mean(values):.3f}, median {median(values):.3f}, worst tenth below {worst:.3f}")


if __name__ == "__main__":
    main()
