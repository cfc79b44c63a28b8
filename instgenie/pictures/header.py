"""Headers of picture files: the size of a picture before anything is decoded, and the memory that decoding it takes."""

from dataclasses import dataclass

from instgenie.errors import InstGenieError
from instgenie.pictures.decode import MAX_PIXELS, checked_image
from instgenie.types import Box

PICTURE_BYTES = 3  # per pixel that an edit keeps: RGB
MASK_BYTES = 1  # per pixel that an edit keeps
DECODING_BYTES = 24  # per pixel while a file is decoded: the file's own pixels, RGBA, its copy on white, RGB, the array
CONVERTING_BYTES = 12  # per pixel, if the file has alpha or a profile: its own pixels and its colours in sRGB, too


@dataclass(frozen=True)
class Header:
    width: int
    height: int
    own_bytes: int = 0  # per pixel that an edit keeps of the file's own pixels, if these are not RGB of sRGB

    @property
    def num_pixels(self) -> int:
        return self.width * self.height


def read_header(encoded: bytes, error: type[InstGenieError], max_pixels: int = MAX_PIXELS) -> Header:
    """Read the size of a picture, and nothing else. Defects of the header, and sizes that are not accepted, are raised
    as `error`."""
    with checked_image(encoded, error, max_pixels) as image:
        own_bytes = 4 if image.has_transparency_data else 3 if image.info.get("icc_profile") else 0
        return Header(*image.size, own_bytes)


def kept_bytes(picture: Header, size: tuple[int, int] | None) -> int:
    """Bytes that an edit keeps until it is answered: its picture, the pixels of its file, and its mask, as sent or as
    resized to `size`."""
    num_pixels = max(picture.num_pixels, size[0] * size[1] if size else 0)
    return (PICTURE_BYTES + picture.own_bytes + MASK_BYTES) * num_pixels


def crop_bytes(box: Box) -> int:
    """Bytes that the edit of a crop keeps beside those of the whole picture."""
    height, width = box.size
    return (PICTURE_BYTES + MASK_BYTES) * height * width


def decoding_bytes(*files: Header) -> int:
    """Bytes that decoding takes at its peak, if the files are decoded one after the other."""
    per_pixel = ((DECODING_BYTES + CONVERTING_BYTES * (file.own_bytes > 0)) * file.num_pixels for file in files)
    return max(per_pixel, default=0)
