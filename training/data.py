"""Captioned photographs in memory: pictures, pet outlines, captions. Knows files and words, no model."""

import csv
import hashlib
import io
import os
import re
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

COLOURS = ("black", "white", "grey", "red", "orange", "yellow", "green", "blue", "purple", "pink", "brown")
SPECIES_WORDS = {
    "cat": ("a photo of a cat", "a cat", "cat", "kitten"),
    "dog": ("a photo of a dog", "a dog", "dog", "puppy"),
    "flower": ("a photo of a flower", "a flower", "flower", "flowers"),
    "clothing": ("a photo of clothes", "clothes", "clothing", "garment"),
}
BACKGROUND_CAPTIONS = ("background", "nothing", "an empty background", "a photo of the background", "empty", "remove")


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
    """One photograph in twenty is kept out of training, chosen by its id alone."""
    return int(hashlib.sha1(photo_id.encode()).hexdigest(), 16) % 20 == 1


def load_photos(folder: str | Path, split: str, limit: int | None = None) -> Photos:
    """Reads the rows of one split whose shard is present in the folder."""
    assert split in ("train", "val"), split
    folder = Path(folder)
    with open(folder / "captions.csv", newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if (folder / row["shard"]).exists()]
    rows = [row for row in rows if is_validation(row["id"]) == (split == "val")]
    if limit is not None:
        rows = rows[:: max(1, len(rows) // limit)][:limit]
    files = dict(_members(folder, {row["shard"] for row in rows}, {row["id"] for row in rows}))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pictures = list(pool.map(lambda row: _decode(files[row["id"] + ".webp"], "RGB"), rows))
        outlines = list(pool.map(lambda row: _outline(files.get(row["id"] + ".mask.png")), rows))
    return Photos(
        pictures=torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous(),
        outlines=torch.from_numpy(np.stack(outlines)),
        captions=[row["caption"] for row in rows],
        labels=[row["label"] for row in rows],
        species=[row["species"] for row in rows],
        colours=[row["color"] for row in rows],
        ids=[row["id"] for row in rows],
    )


def _members(folder: Path, shards: set[str], ids: set[str]) -> Iterator[tuple[str, bytes]]:
    for shard in sorted(shards):
        with tarfile.open(folder / shard) as tar:
            for member in tar:
                name = Path(member.name).name
                if name.removesuffix(".webp").removesuffix(".mask.png") in ids:
                    data = tar.extractfile(member)
                    assert data is not None, f"{shard}: {name} is not a file"
                    yield name, data.read()


def _decode(data: bytes, mode: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert(mode))


def _outline(data: bytes | None) -> np.ndarray:
    return np.zeros((256, 256), bool) if data is None else _decode(data, "L") > 0


def caption_variants(caption: str, label: str, species: str) -> list[str]:
    """Eight ways to say it, from the whole sentence to the species alone; each is drawn equally often."""
    phrase = caption.removeprefix("a photo of ")
    bare = re.sub(r"^(an?|pair of|a pair of) ", "", phrase)
    grey = caption.replace(" grey ", " gray ")
    return [caption, caption, grey, phrase, phrase, bare, label.lower(), _species_caption(species, label)]


def _species_caption(species: str, label: str) -> str:
    words = SPECIES_WORDS[species]
    return words[sum(map(ord, label)) % len(words)]


def recoloured(caption: str, colour: str, new: str) -> str:
    """`a photo of a red hat` -> `a photo of an orange hat`."""
    caption = re.sub(rf"\b{colour}\b", new, caption)
    return re.sub(r"\ban? (?=\w)(\w)", lambda m: ("an " if m[1] in "aeiou" else "a ") + m[1], caption)


def vocabulary(photos: Photos) -> list[str]:
    """Every word the captions can hold, in a fixed order."""
    texts = [*BACKGROUND_CAPTIONS, *COLOURS, "gray", "an", *(w for words in SPECIES_WORDS.values() for w in words)]
    for caption, label, species in zip(photos.captions, photos.labels, photos.species, strict=True):
        texts += caption_variants(caption, label, species)
    return sorted({word for text in texts for word in text.lower().split()})
