"""The example edits that ship with the package: photographs, masks and prompts, listed in edits.toml."""

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from instgenie.errors import EditError
from instgenie.pictures.fitting import crop
from instgenie.pictures.mask import read_mask
from instgenie.pictures.picture import open_picture
from instgenie.pictures.resizing import resize_mask, resize_picture
from instgenie.types import Box, Edit, MaskedContent, PixelMask, Pixels

EXAMPLES = Path(__file__).parent.parent / "examples"
THUMBNAIL = ".thumb.webp"  # what the file name of an example's thumbnail ends with
CONTEXT = 1.6  # side of a close-up in sides of the mask


@dataclass(frozen=True)
class Example:
    """A picture, the mask to edit it under, and the prompts to edit it with."""

    name: str
    picture: Pixels
    mask: PixelMask
    prompts: list[str]
    seed: int
    masked_content: MaskedContent = "original"

    def edits(self, **options: Any) -> list[Edit]:
        """One edit per prompt, each with a seed of its own."""
        return [
            Edit(self.picture, self.mask, prompt, seed=self.seed + index, **options)
            for index, prompt in enumerate(self.prompts)
        ]

    def close_up(self, size: tuple[int, int]) -> "Example":
        """The part around the mask, scaled to `size`: a picture as small as the model's."""
        box = around_mask(self.mask, size[1] / size[0])
        picture, mask = resize_picture(crop(self.picture, box), size), resize_mask(crop(self.mask, box), size)
        return replace(self, picture=picture, mask=mask)


def around_mask(mask: PixelMask, shape: float) -> Box:
    """A box around the mask, `shape` times as wide as high, as large as the picture allows and not much larger than the
    mask."""
    height, width = mask.shape
    rows, cols = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    high = max(rows[-1] - rows[0] + 1, (cols[-1] - cols[0] + 1) / shape) * CONTEXT
    high = min(high, height, width / shape)
    return Box(
        middle_range((rows[0] + rows[-1] + 1) / 2, round(high), height),
        middle_range((cols[0] + cols[-1] + 1) / 2, round(high * shape), width),
    )


def middle_range(middle: float, length: int, limit: int) -> range:
    """`length` places around the middle, moved so that they lie between 0 and the limit."""
    length = min(max(length, 1), limit)
    start = min(max(round(middle - length / 2), 0), limit - length)
    return range(start, start + length)


def read_examples(folder: Path) -> list[Example]:
    """Read edits.toml: each [[edit]] names itself, its picture and mask, the prompts and the first seed, and maybe what
    its masked part starts from."""
    path = folder / "edits.toml"
    try:
        entries = tomllib.loads(path.read_text())["edit"]
        return [read_example(folder, **entry) for entry in entries]
    except OSError as error:
        raise EditError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        needed = "name, picture, mask, prompts and seed"
        raise EditError(f"{path} is not a list of [[edit]] with {needed}: {error}") from None


def read_example(
    folder: Path,
    name: str,
    picture: str,
    mask: str,
    prompts: list[str],
    seed: int,
    masked_content: MaskedContent = "original",
) -> Example:
    if not prompts:
        raise EditError(f"the edit {name!r} of {folder / 'edits.toml'} has no prompt: at least one is needed")
    pixels = open_picture(folder / picture)
    height, width, _ = pixels.shape
    return Example(name, pixels, read_mask(folder / mask, (height, width)), prompts, seed, masked_content)
