"""Edits the sample pictures into one contact sheet. Knows the samples and the sheet; the editor does the rest."""

import argparse
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console

from instgenie.cli import EXIT_BAD_INPUT, EXIT_INTERRUPTED
from instgenie.cli.arguments import add_model
from instgenie.cli.screen import edit_progress, hide_loading_bars, quiet_libraries, show_steps
from instgenie.errors import EditError, InstGenieError
from instgenie.pictures.mask import read_mask
from instgenie.pictures.picture import check_edit, check_target, edge_distance, open_picture, save_picture
from instgenie.types import Edit, PixelMask, Pixels

EXAMPLES = Path(__file__).parent.parent / "examples"
OUTPUT = Path("out/demo.png")

CELL, GAP, MARGIN = 256, 16, 32
LINE, NUM_LINES = 20, 2  # room for the text under a picture
TEXT = ImageFont.load_default(15)
TITLE = ImageFont.load_default(26)
PAPER, INK, PALE_INK = "#ffffff", "#1f2328", "#6e7781"
TINT = np.array([226, 38, 112])


@dataclass(frozen=True)
class Sample:
    """A picture, where to edit it, and what it is turned into."""

    name: str
    picture: Pixels
    mask: PixelMask
    prompts: list[str]
    seed: int

    def edits(self, **options: Any) -> list[Edit]:
        return [Edit(self.picture, self.mask, prompt, seed=self.seed, **options) for prompt in self.prompts]


@dataclass(frozen=True)
class Row:
    """A sample and its edited pictures, one for each prompt."""

    sample: Sample
    pictures: list[Pixels]


def read_samples(folder: Path) -> list[Sample]:
    """Reads edits.toml: for each [[edit]] the name of a picture, its mask, the prompts and the seed."""
    path = folder / "edits.toml"
    try:
        entries = tomllib.loads(path.read_text())["edit"]
        return [read_sample(folder, **entry) for entry in entries]
    except OSError as error:
        raise EditError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise EditError(f"{path} is not a list of [[edit]] with name, mask, prompts and seed: {error}") from None


def read_sample(folder: Path, name: str, mask: str, prompts: list[str], seed: int) -> Sample:
    picture = open_picture(folder / f"{name}.png")
    height, width, _ = picture.shape
    return Sample(name, picture, read_mask(folder / mask, (height, width)), prompts, seed)


def tinted(picture: Pixels, mask: PixelMask) -> Pixels:
    """The picture with its mask in colour and outlined."""
    result = picture.copy()
    rim = mask & (edge_distance(mask, 4) < 3)
    result[mask] = np.rint(picture[mask] * 0.45 + TINT * 0.55).astype(np.uint8)
    result[rim] = TINT
    return result


def draw_sheet(rows: Sequence[Row], subtitle: str) -> Pixels:
    """source | mask | one column for each prompt; a row for each sample."""
    num_columns = 2 + max(len(row.pictures) for row in rows)
    row_height = CELL + 8 + NUM_LINES * LINE + GAP
    top = MARGIN + 68
    width = 2 * MARGIN + num_columns * (CELL + GAP) - GAP
    sheet = Image.new("RGB", (width, top + len(rows) * row_height - GAP + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN - 6), "InstGenIE", INK, TITLE)
    draw.text((MARGIN, MARGIN + 30), subtitle, PALE_INK, TEXT)
    for index, row in enumerate(rows):
        sample = row.sample
        pictures = [sample.picture, tinted(sample.picture, sample.mask), *row.pictures]
        captions = ["source", f"mask: {sample.mask.mean():.0%} of the picture", *sample.prompts]
        for column, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
            x, y = MARGIN + column * (CELL + GAP), top + index * row_height
            image = fit(picture)
            sheet.paste(image, (x + (CELL - image.width) // 2, y + (CELL - image.height) // 2))
            ink = PALE_INK if column < 2 else INK
            for number, line in enumerate(wrap(caption)):
                draw.text((x, y + CELL + 8 + number * LINE), line, ink, TEXT)
    return np.array(sheet)


def fit(picture: Pixels) -> Image.Image:
    """As large as a cell holds."""
    height, width, _ = picture.shape
    scale = CELL / max(height, width)
    size = max(round(width * scale), 1), max(round(height * scale), 1)
    return Image.fromarray(picture).resize(size, Image.Resampling.LANCZOS)


def wrap(text: str) -> list[str]:
    """Lines as wide as a cell, the last one cut short if the text has no room."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and TEXT.getlength(longer) > CELL:
            lines.append(word)
        else:
            lines[-1] = longer
    shown = lines[:NUM_LINES]
    if len(lines) > NUM_LINES:
        shown[-1] += " …"
    return [shorten(line) for line in shown]


def shorten(line: str) -> str:
    if TEXT.getlength(line) <= CELL:
        return line
    while TEXT.getlength(f"{line}…") > CELL:
        line = line[:-1].rstrip(" …")
    return f"{line}…"


def make_sheet(options: argparse.Namespace, console: Console) -> None:
    samples = read_samples(options.examples)
    if not samples:
        raise EditError(f"{options.examples / 'edits.toml'} lists no edit: at least one is needed")
    for sample in samples:
        for edit in sample.edits(steps=options.steps, size=options.size):
            check_edit(edit)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    check_target(options.output)
    with console.status("loading the model"):
        from instgenie.editor import Editor  # brings torch and diffusers

        hide_loading_bars()
        editor = Editor(model=options.model, device=options.device)
    rows = []
    with edit_progress(console) as progress:
        for sample in samples:
            on_step = show_steps(progress, sample.name)
            results = editor.edit_many(sample.edits(steps=options.steps, size=options.size), on_step)
            rows.append(Row(sample, [result.picture for result in results]))
    num_edits = sum(len(row.pictures) for row in rows)
    subtitle = f"{num_edits} edits, {options.steps} steps each, model {Path(options.model).name}"
    save_picture(draw_sheet(rows, subtitle), options.output)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m instgenie.cli.demo", description="Edit the sample pictures.")
    parser.add_argument("--examples", type=Path, default=EXAMPLES, help="folder with edits.toml and its pictures")
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT, help="the contact sheet")
    parser.add_argument("--steps", type=int, default=28, help="number of denoising steps (default 28)")
    add_model(parser)
    options = parser.parse_args(arguments)
    quiet_libraries()
    try:
        make_sheet(options, Console(stderr=True))
    except InstGenieError as error:
        print(f"demo: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    print(f"contact sheet: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
