"""Decodes the picture and the mask of an edit. Knows in which order; `instgenie.pictures` knows how, and `admission`
when."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import numpy as np

from instgenie.errors import InstGenieError
from instgenie.pictures.control import make_control_image
from instgenie.pictures.cropping import cut
from instgenie.pictures.digest import measure
from instgenie.pictures.fitting import Fit, fit_photo
from instgenie.pictures.header import Header, read_header
from instgenie.pictures.mask import MaskMode, read_mask
from instgenie.pictures.photo import Metadata, Photo, open_photo
from instgenie.types import Box, Notes, PixelMask, Pixels, Source, Whole

P = ParamSpec("P")
Out = TypeVar("Out")

GREY = 127
HALF = 128  # alpha below it is transparent, as in masks


class PictureDecoder:
    """Threads for work on requests that takes little memory. Decodes have threads of their own, so that nothing else
    waits for them."""

    def __init__(self, num_threads: int, max_pixels: int) -> None:
        self.max_pixels = max_pixels
        self.threads = ThreadPoolExecutor(num_threads, thread_name_prefix="requests")

    async def run(self, work: Callable[P, Out], *args: P.args, **kwargs: P.kwargs) -> Out:
        assert not kwargs, kwargs
        return await asyncio.get_running_loop().run_in_executor(self.threads, work, *args)

    async def header(self, encoded: bytes, error: type[InstGenieError]) -> Header:
        return await self.run(read_header, encoded, error, self.max_pixels)

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, eq=False)
class EditSources:
    """What the picture and the mask of an edit are made from."""

    picture: bytes | Pixels  # pixels: a template's
    mask: bytes | None  # None: the picture's transparent pixels are masked, or if it has none all of it
    mode: MaskMode
    size: tuple[int, int] | None  # (height, width) of the answer; None: the picture's own
    fit: Fit
    metadata: Metadata
    reads_alpha: bool  # False: transparent pixels are no mask
    notes: Notes  # decoding adds to them


def decode_edit(sources: EditSources, max_pixels: int) -> tuple[Photo, PixelMask]:
    """Decode picture and mask, one after the other, fit both to the size that was asked for, and measure them."""
    if isinstance(sources.picture, np.ndarray):
        photo = Photo(sources.picture)
    else:
        photo = open_photo(sources.picture, max_pixels, sources.metadata)
    sources.notes.extend(photo.notes)
    height, width, _ = photo.pixels.shape
    if sources.mask is None:
        mask = mask_of(photo, sources)
    else:
        mask = read_mask(sources.mask, (height, width), sources.mode, max_pixels, photo.orientation, sources.notes)
    if sources.size is not None and sources.size != (height, width):
        photo, mask = fit_photo(photo, mask, sources.size, sources.fit, sources.notes)
    measure(photo.pixels, mask)
    return photo, mask


def decode_control(image: bytes | str, picture: Pixels, max_pixels: int) -> Pixels:
    """A control image of the picture's size, decoded, or made from the picture as a word says."""
    return make_control_image(image if isinstance(image, str) else open_photo(image, max_pixels).pixels, picture)


def cut_out(picture: Pixels, mask: PixelMask, source: Source | None, box: Box) -> tuple[Pixels, PixelMask, Whole]:
    """Cut a crop out of a decoded picture and its mask, and measure it."""
    part, part_of_mask, whole = cut(picture, mask, source, box)
    measure(part, part_of_mask)
    return part, part_of_mask, whole


def mask_of(photo: Photo, sources: EditSources) -> PixelMask:
    """Return the mask of an edit that has none of its own."""
    if sources.reads_alpha and photo.source and photo.source.has_alpha:
        assert photo.source.pixels is not None
        transparent: PixelMask = photo.source.pixels[..., -1] < HALF
        if transparent.any():
            sources.notes.append("There is no mask, so the transparent part of the picture was edited.")
            return transparent
    return np.ones(photo.pixels.shape[:2], np.bool_)


def decode_template(image: bytes, max_pixels: int) -> Photo:
    photo = open_photo(image, max_pixels)
    measure(photo.pixels)
    return photo


def decode_reference(image: bytes, max_pixels: int) -> Pixels:
    return open_photo(image, max_pixels).pixels


def blank_edit(size: tuple[int, int]) -> tuple[Photo, PixelMask]:
    """Return the picture and the mask of a generation. All of it is masked, so none of the picture remains."""
    blank, mask = np.full((*size, 3), GREY, np.uint8), np.ones(size, np.bool_)
    measure(blank, mask)
    return Photo(blank), mask
