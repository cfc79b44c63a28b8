"""The example edits that ship with the package: photographs, masks and prompts, listed in edits.toml."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instgenie.errors import EditError
from instgenie.pictures.mask import read_mask
from instgenie.pictures.picture import open_picture
from instgenie.types import Edit, PixelMask, Pixels

EXAMPLES = Path(__file__).parent.parent / "examples"


@dataclass(frozen=True)
class Example:
    """A picture, the mask to edit it under, and the prompts to edit it with."""

    name: str
    picture: Pixels
    mask: PixelMask
    prompts: list[str]
    seed: int

    def edits(self, **options: Any) -> list[Edit]:
        return [Edit(self.picture, self.mask, prompt, seed=self.seed, **options) for prompt in self.prompts]


def read_examples(folder: Path) -> list[Example]:
    """Read edits.toml: each [[edit]] names a picture, its mask, the prompts and the seed."""
    path = folder / "edits.toml"
    try:
        entries = tomllib.loads(path.read_text())["edit"]
        return [read_example(folder, **entry) for entry in entries]
    except OSError as error:
        raise EditError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise EditError(f"{path} is not a list of [[edit]] with name, mask, prompts and seed: {error}") from None


def read_example(folder: Path, name: str, mask: str, prompts: list[str], seed: int) -> Example:
    picture = open_picture(folder / f"{name}.png")
    height, width, _ = picture.shape
    return Example(name, picture, read_mask(folder / mask, (height, width)), prompts, seed)
