"""Headers of picture files: the size of a picture before anything is decoded, and the memory that decoding it takes."""

from dataclasses import dataclass

from instgenie.errors import InstGenieError
from instgenie.pictures.decode import MAX_PIXELS, checked_image

PICTURE_BYTES = 3  # per pixel that an edit keeps: RGB
MASK_BYTES = 1  # per pixel that an edit keeps
DECODING_BYTES = 24  # per pixel while a file is decoded: the file's own pixels, RGBA, its copy on white, RGB, the array


@dataclass(frozen=True)
class Header:
    width: int
    height: int

    @property
    def num_pixels(self) -> int:
        return self.width * self.height


def read_header(encoded: bytes, error: type[InstGenieError], max_pixels: int = MAX_PIXELS) -> Header:
    """Read the size of a picture, and nothing else. Defects of the header, and sizes that are not accepted, are raised
    as `error`."""
    with checked_image(encoded, error, max_pixels) as image:
        return Header(*image.size)


def kept_bytes(picture: Header, size: tuple[int, int] | None) -> int:
    """Bytes that an edit keeps until it is answered: its picture and its mask, as sent or as resized to `size`."""
    num_pixels = max(picture.num_pixels, size[0] * size[1] if size else 0)
    return (PICTURE_BYTES + MASK_BYTES) * num_pixels


def decoding_bytes(*files: Header) -> int:
    """Bytes that decoding takes at its peak, if the files are decoded one after the other."""
    return DECODING_BYTES * max((file.num_pixels for file in files), default=0)
