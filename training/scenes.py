"""Background photographs in memory. A folder holds scenes.csv (id, photo, ...) and tar shards of ID.webp."""

import csv
import io
import os
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from instgenie.bench.photos import PhotoSplit, is_validation


def load_scenes(folder: str | Path, split: PhotoSplit, limit: int | None = None) -> Tensor:
    """Read [N, 3, 256, 256] uint8. The split is by photograph, so all crops of one photograph are on the same side."""
    folder = Path(folder)
    with open(folder / "scenes.csv", newline="", encoding="utf-8") as file:
        photos = {row["id"]: row["photo"] for row in csv.DictReader(file)}
    chosen = {name for name, photo in photos.items() if is_validation(photo) == (split == "val")}
    files = [data for name, data in sorted(_members(folder)) if name in chosen][:limit]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pictures = list(pool.map(_decode, files))
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()


def _members(folder: Path) -> Iterator[tuple[str, bytes]]:
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                data = tar.extractfile(member)
                if data is not None:
                    yield Path(member.name).name.removesuffix(".webp"), data.read()


def _decode(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
