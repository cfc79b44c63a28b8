"""Chooses the part of a large photograph that is edited: a crop around the mask, so that the masked part gets more of
the model's pixels. Knows sizes and masks; knows no model.

A crop is an edit of another picture: it has its own template. Sizes and places of crops are therefore few: slightly
different masks of one photograph get the same crop, and share its template.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count

import numpy as np

from instgenie.pictures.fitting import crop, name
from instgenie.pictures.resizing import working_size
from instgenie.types import Box, CropMode, Edit, Notes, OwnPixels, PixelMask, Pixels, Source, Whole

PADDING = 0.25  # around the mask on each side, as a share of the mean side of its box
SHAPES = (1.0, 1.5, 1 / 1.5, 2.0, 1 / 2.0)  # width by height of crops, in the order of preference
FIRST_SCALE = 1.0  # pixels of the photograph per pixel of the model in the smallest crops
SCALES_PER_OCTAVE = 4
PLACES_PER_SIDE = (4, 8)  # crops lie at multiples of a quarter of their side or, if none fits, of an eighth
MIN_GAIN = 1.5  # a crop that is worth it has at least so many times more of the model's pixels along each side


@dataclass(frozen=True)
class Canvas:
    """The sizes that a model can work at."""

    multiple: int  # sides are multiples of this
    own_size: int  # side of the square it works best at
    size: tuple[int, int] | None = None  # (height, width) that was asked for; None: any

    def sizes(self) -> list[tuple[int, int]]:
        """The (height, width) of each shape of crop, the preferred one first."""
        if self.size:
            return [self.size]
        return [working_size_of(1000, round(1000 * shape), self.multiple, self.own_size) for shape in SHAPES]

    def scale(self, size: tuple[int, int]) -> float:
        """Pixels per pixel of the model, along a side, of a picture of this size."""
        height, width = self.size or working_size_of(*size, self.multiple, self.own_size)
        return float((size[0] * size[1] / (height * width)) ** 0.5)


working_size_of = lru_cache(working_size)


def choose_box(mask: PixelMask, canvas: Canvas, choice: CropMode, padding: int | None = None) -> Box | None:
    """The part of a photograph to edit; None: all of it, because no crop was asked for, or none is worth it."""
    if choice == "off" or not mask.any():
        return None
    height, width = mask.shape
    whole_scale = canvas.scale((height, width))
    if choice == "auto" and whole_scale <= 1:
        return None
    needed = padded(box_of(mask), padding, (height, width))
    found = smallest(needed, (height, width), canvas)
    if found is None or found.size == (height, width):
        return None
    gain = whole_scale / canvas.scale(found.size)
    return found if choice == "masked" or gain >= MIN_GAIN else None


def box_of(mask: PixelMask) -> Box:
    """The smallest box with all masked pixels."""
    rows, cols = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return Box(range(int(rows[0]), int(rows[-1]) + 1), range(int(cols[0]), int(cols[-1]) + 1))


def padded(box: Box, padding: int | None, size: tuple[int, int]) -> Box:
    """The box with what is around it, as far as the photograph goes."""
    height, width = box.size
    around = round(PADDING * (height * width) ** 0.5) if padding is None else padding
    around = max(around, 1)  # so that the edge of a mask is never the edge of a crop
    rows, cols = (
        range(max(side.start - around, 0), min(side.stop + around, length))
        for side, length in zip(box, size, strict=True)
    )
    return Box(rows, cols)


def smallest(needed: Box, size: tuple[int, int], canvas: Canvas) -> Box | None:
    """The first crop, by its scale and then by its shape, that contains a box. None if only the whole picture does."""
    for number in count():
        scale = FIRST_SCALE * 2 ** (number / SCALES_PER_OCTAVE)
        if all(scale * side >= length for shape in canvas.sizes() for side, length in zip(shape, size, strict=True)):
            return None
        for shape in canvas.sizes():
            lengths = [min(round(scale * side), length) for side, length in zip(shape, size, strict=True)]
            places = [place(*each) for each in zip(needed, lengths, size, strict=True)]
            if all(places):
                rows, cols = (each for each in places if each)
                return Box(rows, cols)
    raise AssertionError("unreachable")


def place(needed: range, length: int, whole: int) -> range | None:
    """The place of a crop's side that contains what is needed, as near to its middle as can be; None if there is none.
    Places are multiples of a part of the side, and the last place."""
    ideal = (needed.start + needed.stop - length) / 2
    for parts in PLACES_PER_SIDE:
        starts = [*range(0, whole - length, max(length // parts, 1)), whole - length]
        fitting = [start for start in starts if start <= needed.start and needed.stop <= start + length]
        if fitting:
            start = min(fitting, key=lambda start: (abs(start - ideal), start))
            return range(start, start + length)
    return None


def cut(picture: Pixels, mask: PixelMask, source: Source | None, box: Box) -> tuple[Pixels, PixelMask, Whole]:
    """The crop of a picture and of its mask, as arrays of their own, and what to put the edited crop back into."""
    own: OwnPixels = picture if source is None or source.pixels is None else source.pixels
    return crop(picture, box).copy(), crop(mask, box).copy(), Whole(own, source, box)


def crop_edit(edit: Edit, box: Box) -> Edit:
    """The edit of a part of the picture."""
    picture, mask, whole = cut(edit.picture, edit.mask, edit.source, box)
    images = tuple(crop(image, box).copy() for image in edit.control_images)
    return replace(edit, picture=picture, mask=mask, source=None, whole=whole, control_images=images)


def describe_crop(box: Box | None, size: tuple[int, int], choice: CropMode, why_not: str, notes: Notes) -> None:
    """Add a note on the crop that is edited, or on why none is where one would be expected."""
    if box and not why_not:
        notes.append(
            f"A crop of {name(box.size)} around the mask was edited, at {box.cols.start},{box.rows.start} of the "
            f"picture of {name(size)}: it gets more detail that way. crop=off edits the whole picture."
        )
    elif box:
        notes.append(f"The whole picture was edited, because {why_not}: crop=masked edits a sharper crop instead.")
    elif choice == "masked":
        notes.append("The whole picture was edited, because the mask leaves no room for a crop.")
