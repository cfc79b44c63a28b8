"""Decodes pictures and masks in a few threads. Knows how many run at once; `instgenie.pictures` knows how.

Pillow releases the GIL while it decodes. Few threads bound the memory: a picture that waits for one is still encoded.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import numpy as np

from instgenie.pictures.mask import MaskMode, read_mask
from instgenie.pictures.picture import open_picture
from instgenie.pictures.resizing import resize_mask, resize_picture
from instgenie.types import PixelMask, Pixels

P = ParamSpec("P")
Out = TypeVar("Out")

GREY = 127


class PictureDecoder:
    def __init__(self, num_threads: int, max_pixels: int) -> None:
        self.max_pixels = max_pixels
        self.threads = ThreadPoolExecutor(num_threads, thread_name_prefix="decode")

    async def run(self, work: Callable[P, Out], *args: P.args, **kwargs: P.kwargs) -> Out:
        assert not kwargs, kwargs
        return await asyncio.get_running_loop().run_in_executor(self.threads, work, *args)

    async def open(self, image: bytes) -> Pixels:
        return await self.run(open_picture, image, self.max_pixels)

    async def mask(self, picture: Pixels, mask: bytes | None, mode: MaskMode) -> PixelMask:
        """Decode a mask of the picture's size; without a mask the whole picture is masked."""
        height, width, _ = picture.shape
        if mask is None:
            return np.ones((height, width), np.bool_)
        return await self.run(read_mask, mask, (height, width), mode, self.max_pixels)

    async def fit(self, picture: Pixels, mask: PixelMask, size: tuple[int, int] | None) -> tuple[Pixels, PixelMask]:
        """Stretch both to `size`, (height, width)."""
        if size is None or picture.shape[:2] == size:
            return picture, mask
        return await self.run(resize_picture, picture, size), await self.run(resize_mask, mask, size)

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)


def blank_picture(size: tuple[int, int]) -> Pixels:
    """Return the source picture of a generation. It is fully masked, so none of it remains."""
    return np.full((*size, 3), GREY, np.uint8)
