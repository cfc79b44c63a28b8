"""Images for ControlNets: as they are given, or made from the picture. Knows no model."""

from collections.abc import Iterable, Mapping
from typing import Any

from instgenie.errors import ControlError
from instgenie.pictures.canny import canny
from instgenie.pictures.resizing import resize_picture
from instgenie.types import ControlUse, Pixels

MAX_STRETCH = 1.02  # between the shapes of a picture and of its control image
MADE_HERE = "canny"
NEEDS = {  # what would make the images that are not made here
    "depth": "a depth estimator",
    "normal": "an estimator of surface normals",
    "openpose": "a pose estimator",
    "pose": "a pose estimator",
    "segmentation": "a segmentation model",
    "seg": "a segmentation model",
    "scribble": "an edge detector such as HED",
    "softedge": "an edge detector such as HED or PiDiNet",
    "hed": "the HED edge detector",
    "lineart": "a model of line drawings",
    "mlsd": "the M-LSD detector of straight lines",
    "face": "a detector of face landmarks",
}


def read_controls(given: Iterable[Any], picture: Pixels) -> tuple[tuple[ControlUse, ...], tuple[Pixels, ...]]:
    """ControlNets as users write them, {"name": ..., "image": ...} and maybe "scale", "start", "end" and "mode", with
    their images at the picture's size."""
    uses, images = [], []
    for one in given:
        known = {"name", "image", "scale", "start", "end", "mode"}
        if not isinstance(one, Mapping) or not {"name", "image"} <= set(one) <= known:
            raise ControlError(f"a control is {one!r}: name and image, and maybe scale, start, end, mode, are expected")
        uses.append(ControlUse(**{name: value for name, value in one.items() if name != "image"}))
        images.append(make_control_image(one["image"], picture))
    return tuple(uses), tuple(images)


def make_control_image(image: Pixels | str, picture: Pixels) -> Pixels:
    """An image of the picture's size: one that is given, or `canny` for the picture's own edges."""
    if not isinstance(image, str):
        return fitted(image, picture)
    check_word(image)
    return canny(picture)


def check_word(image: str) -> None:
    """Raise a ControlError unless a word names an image that is made here."""
    if image in NEEDS:
        raise ControlError(
            f"the control image {image!r} would need {NEEDS[image]}, which is no part of this software: give the image "
            f"itself, or {MADE_HERE!r} for the picture's edges"
        )
    if image != MADE_HERE:
        raise ControlError(f"the control image is {image[:64]!r}: a picture, or {MADE_HERE!r}, is expected")


def fitted(image: Pixels, picture: Pixels) -> Pixels:
    height, width = picture.shape[:2]
    own_height, own_width = image.shape[:2]
    stretch = own_width * height / (own_height * width)
    if not 1 / MAX_STRETCH <= stretch <= MAX_STRETCH:
        raise ControlError(
            f"the control image is {own_width}x{own_height}, the picture {width}x{height}: the same shape is expected"
        )
    return resize_picture(image, (height, width))
