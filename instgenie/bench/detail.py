"""Detail of edits against the photograph around them, edited whole and on a crop, side by side.

Detail is the RMS of the luma's finest band (what a box filter of 5 pixels takes away) inside the mask, divided by the
same in the ring around it. Grain that is added counts as detail, so the crop is also shown without it.
"""

import hashlib
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from instgenie.engine.finish import decode, finish
from instgenie.engine.loop import Engine
from instgenie.engine.prepare import prepare
from instgenie.errors import PictureError
from instgenie.jobs.job import Job
from instgenie.models.model import Model
from instgenie.pictures.compositing import composite
from instgenie.pictures.cropping import Canvas, choose_box, crop_edit
from instgenie.pictures.fitting import crop
from instgenie.pictures.matching import around, blurred
from instgenie.pictures.photo import open_photo
from instgenie.pictures.picture import FORMAT_OF_SUFFIX
from instgenie.types import Edit, OwnPixels, PixelMask, Pixels

MIN_PIXELS = 2_000_000  # smaller photographs are left out
EDGE = 4  # pixels on both sides of the mask's edge that are not looked at
RING_WIDTH = 64  # pixels
RADIUS = 2  # pixels of the photograph, of the finest band
LUMA = np.array([0.299, 0.587, 0.114], np.float32)


@dataclass(frozen=True)
class Details:
    """The detail of one edit, by how it was made; that of the photograph itself is there to compare with."""

    photo: str
    masked: float  # share of the pixels
    scale: float  # pixels of the photograph per pixel of the model, in the crop
    photograph: float
    off: float
    plain: float  # a crop, without tones and grain
    auto: float


def bench_detail(
    folder: Path, model: Model, shares: list[float], prompt: str, steps: int, out: Path | None, keep: Path | None
) -> None:
    """Print the detail of edits of each photograph in a folder; `keep` gets pictures of the masks' surroundings."""
    table = Table("photograph", "masked", "scale", "photograph", "off", "crop, no grain", "auto", title="detail / ring")
    found = []
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
    for path in photographs(folder):
        for share in shares:
            one = measure(path, share, prompt, steps, model, keep)
            found.append(one)
            table.add_row(*row(one.photo, one))
    if not found:
        raise PictureError(f"{folder} holds no photograph of at least {MIN_PIXELS / 1e6:g} megapixels")
    medians = {name: statistics.median(getattr(one, name) for one in found) for name in list(asdict(found[0]))[1:]}
    table.add_section()
    table.add_row(*row("median", Details(photo="median", **medians)))
    Console().print(table)
    if out:
        out.write_text(json.dumps({"median": medians, "edits": [asdict(one) for one in found]}, indent=1) + "\n")


def row(heading: str, one: Details) -> list[str]:
    values = (one.photograph, one.off, one.plain, one.auto)
    return [heading, f"{one.masked:.3f}", f"{one.scale:.2f}", *(f"{value:.2f}" for value in values)]


def photographs(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in FORMAT_OF_SUFFIX:
            with Image.open(path) as image:
                if image.width * image.height >= MIN_PIXELS:
                    yield path


def measure(path: Path, share: float, prompt: str, steps: int, model: Model, keep: Path | None = None) -> Details:
    """Edit an ellipse of a photograph, whole and on a crop. Its place depends on the file's name alone."""
    picture = open_photo(path).pixels
    mask = ellipse(picture.shape[:2], share, path.name)
    edit = Edit(picture, mask, prompt, steps=steps, guidance=model.guidance)
    whole = finish(denoised(edit, model), model)
    canvas = Canvas(model.size_multiple, model.own_size)
    box = choose_box(mask, canvas, "auto")
    plain = auto = whole
    if box:
        job = denoised(crop_edit(edit, box), model)
        auto = finish(job, model)
        [decoded] = decode([job.latents], [job.edit.mask], job.grid, model)
        plain = picture.copy()
        part = composite(crop(picture, box), decoded, job.edit.mask)
        plain[box.rows.start : box.rows.stop, box.cols.start : box.cols.stop] = part
    if keep:
        near = around(mask, round(0.3 * mask.sum() ** 0.5))
        beside = np.concatenate([crop(each, near) for each in (picture, whole, plain, auto)], axis=1)
        Image.fromarray(beside).save(keep / f"{path.stem}-{share:g}.png")
    details = (detail(each, mask) for each in (picture, whole, plain, auto))
    return Details(path.name, share, canvas.scale(box.size if box else mask.shape), *details)


def denoised(edit: Edit, model: Model) -> Job:
    job, engine = prepare(edit, model), Engine(model)
    engine.join(job)
    while engine.jobs:
        engine.step()
    return job


def ellipse(size: tuple[int, int], share: float, name: str) -> PixelMask:
    """An ellipse that covers a share of a picture and lies wholly inside."""
    height, width = size
    digits = hashlib.sha256(name.encode()).hexdigest()
    x, y = (int(digits[start : start + 8], 16) / 16**8 for start in (0, 8))
    radius = (share * height * width / np.pi) ** 0.5
    rows, cols = np.ogrid[:height, :width]
    middle = radius + y * (height - 2 * radius), radius + x * (width - 2 * radius)
    inside: PixelMask = (rows - middle[0]) ** 2 + (cols - middle[1]) ** 2 <= radius**2
    return inside


def detail(picture: OwnPixels | Pixels, mask: PixelMask) -> float:
    """The RMS of the finest band inside a mask, as a share of that in the ring around it."""
    near = around(mask, RING_WIDTH + EDGE)
    luma = (crop(picture, near) @ LUMA)[..., None].astype(np.float32)
    fine = (luma - blurred(luma, RADIUS, 1))[..., 0]
    inside = crop(mask, near)[..., None].astype(np.float32)
    share = blurred(inside, EDGE, 1)[..., 0]
    energy = [float(np.sqrt(np.mean(np.square(fine[where])))) for where in (share > 0.999, share < 0.001)]
    return energy[0] / max(energy[1], 1e-6)
