"""Background photographs in memory. A folder holds scenes.csv (id, photo, ...) and tar shards of ID.webp."""

import csv
import hashlib
from pathlib import Path

import torch
from torch import Tensor

from instgenie.bench.photos import Photos, PhotoSplit, decode_pictures, is_validation, read_members


def load_scenes(folder: str | Path, split: PhotoSplit, limit: int | None = None) -> Tensor:
    """Read [N, 3, 256, 256] uint8 in the order of a hash of their ids, so that the first few are a fair sample.

    The split is by photograph, so all crops of one photograph are on the same side.
    """
    folder = Path(folder)
    with open(folder / "scenes.csv", newline="", encoding="utf-8") as file:
        ids = [row["id"] for row in csv.DictReader(file) if is_validation(row["photo"]) == (split == "val")]
    first = sorted(ids, key=lambda name: hashlib.sha1(name.encode()).digest())[:limit]
    files = dict(read_members(folder, {shard.name for shard in folder.glob("*.tar")}, set(first)))
    return decode_pictures([files[f"{name}.webp"] for name in first if f"{name}.webp" in files])


def with_scenes(photos: Photos, scenes: Tensor) -> Photos:
    """Photographs and scenes in one table; a scene has no caption and its species is `scene`."""
    num = len(scenes)
    return Photos(
        pictures=torch.cat([photos.pictures, scenes]),
        outlines=torch.cat([photos.outlines, torch.zeros(num, *photos.outlines.shape[1:], dtype=torch.bool)]),
        captions=photos.captions + [""] * num,
        labels=photos.labels + [""] * num,
        species=photos.species + ["scene"] * num,
        colours=photos.colours + [""] * num,
        ids=photos.ids + [f"scene {row}" for row in range(num)],
    )
