"""Captioned photographs in memory: pictures, pet outlines, captions. Knows files and no model.

A folder holds captions.csv (id, source, species, label, color, caption, shard) and the shards, tar files with an
ID.webp for each row and, for pets, an ID.mask.png: 1 = foreground.
"""

import csv
import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from instgenie.errors import PictureError
from instgenie.types import PixelMask, Pixels

PhotoSplit = Literal["train", "val"]


@dataclass
class Photos:
    pictures: Tensor  # [N, 3, 256, 256] uint8
    outlines: Tensor  # [N, 256, 256] bool: a pet's foreground, all False for the rest
    captions: list[str]
    labels: list[str]
    species: list[str]
    colours: list[str]
    ids: list[str]

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device | str) -> "Photos":
        self.pictures, self.outlines = self.pictures.to(device), self.outlines.to(device)
        return self


def is_validation(photo_id: str) -> bool:
    """True for the one photograph in twenty that is held out of training, chosen by its id alone."""
    return int(hashlib.sha1(photo_id.encode()).hexdigest(), 16) % 20 == 1


def load_photos(folder: str | Path, split: PhotoSplit, limit: int | None = None) -> Photos:
    """Read the photographs of one split whose shards are present; with a limit, at most that many, evenly spread."""
    folder = Path(folder)
    if not (folder / "captions.csv").is_file():
        raise PictureError(f"{folder} holds no captions.csv: a folder of captioned photographs is expected")
    with open(folder / "captions.csv", newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if (folder / row["shard"]).exists()]
    rows = [row for row in rows if is_validation(row["id"]) == (split == "val")]
    if not rows:
        raise PictureError(f"{folder} holds no photographs of the split {split!r}: at least one is expected")
    if limit is not None:
        rows = rows[:: max(1, len(rows) // limit)][:limit]
    files = dict(read_members(folder, {row["shard"] for row in rows}, {row["id"] for row in rows}))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outlines = list(pool.map(lambda row: _outline(files.get(row["id"] + ".mask.png")), rows))
    return Photos(
        pictures=decode_pictures([files[row["id"] + ".webp"] for row in rows]),
        outlines=torch.from_numpy(np.stack(outlines)),
        captions=[row["caption"] for row in rows],
        labels=[row["label"] for row in rows],
        species=[row["species"] for row in rows],
        colours=[row["color"] for row in rows],
        ids=[row["id"] for row in rows],
    )


def read_members(folder: Path, shards: set[str], ids: set[str]) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of every file of the shards that belongs to one of the ids."""
    for shard in sorted(shards):
        with tarfile.open(folder / shard) as tar:
            for member in tar:
                name = Path(member.name).name
                if name.removesuffix(".webp").removesuffix(".mask.png") in ids:
                    data = tar.extractfile(member)
                    assert data is not None, f"{shard}: {name} is not a file"
                    yield name, data.read()


def decode_pictures(files: list[bytes]) -> Tensor:  # [N, 3, 256, 256] uint8
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pictures = list(pool.map(lambda data: _decode(data, "RGB"), files))
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()


def _decode(data: bytes, mode: str) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(data)).convert(mode))


def _outline(data: bytes | None) -> PixelMask:
    return np.zeros((256, 256), np.bool_) if data is None else _decode(data, "L") > 0
