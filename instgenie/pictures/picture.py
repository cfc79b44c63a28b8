"""Pictures from file to file: open, choose the size to work at, check the edit, save. Knows no model and no device."""

import io
import math
import os
from pathlib import Path
from typing import SupportsIndex, get_args

import numpy as np
from PIL import Image

from instgenie.errors import EditError, PictureError
from instgenie.machine.files import complete_file
from instgenie.pictures.decode import MAX_PIXELS, MIN_SIDE
from instgenie.pictures.mask import check_mask
from instgenie.pictures.photo import on_white, open_photo
from instgenie.pictures.profiles import to_srgb
from instgenie.pictures.resizing import as_image
from instgenie.types import CropMode, Edit, MaskedContent, OwnPixels, Pixels, Reuse, Source

MAX_STEPS = 1000
MAX_GUIDANCE = 100.0
MAX_FEATHER = 256
MAX_HALO = 256
MAX_CROP_PADDING = 4096
MAX_PROMPT = 32_000
MAX_LORAS = 8
MAX_LORA_SCALE = 100.0
MAX_CONTROLS = 4
MAX_CONTROL_SCALE = 10.0
MAX_SEED = 2**63 - 1
SIZE_MULTIPLE = 16
MIN_SIZE, MAX_SIZE = 32, 4096

FORMAT_OF_SUFFIX = {".png": "PNG", ".webp": "WEBP", ".jpg": "JPEG", ".jpeg": "JPEG"}
MAX_SIDE = {"PNG": 2**31 - 1, "WEBP": 16_383, "JPEG": 65_500}


def open_picture(source: str | Path | bytes, max_pixels: int = MAX_PIXELS) -> Pixels:
    """Decode PNG, JPEG or WebP to sRGB, upright; transparent parts are put on white."""
    return open_photo(source, max_pixels).pixels


def check_edit(edit: Edit) -> None:
    """Raise a typed error for the first field that is out of range."""
    picture = edit.picture
    if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
        is_array = isinstance(picture, np.ndarray)
        found = f"{picture.dtype} {list(picture.shape)}" if is_array else type(picture).__name__
        raise PictureError(f"the picture is {found}: uint8 [height, width, 3] is expected")
    height, width, _ = picture.shape
    if min(height, width) < MIN_SIDE or height * width > MAX_PIXELS:
        raise PictureError(
            f"the picture is {width}x{height} pixels: sides of at least {MIN_SIDE} "
            f"and at most {MAX_PIXELS:,} pixels in all are expected"
        )
    own = edit.source.pixels if edit.source else None
    if own is not None and own.shape[:2] != (height, width):
        raise PictureError(f"the picture is {width}x{height} but its file is {own.shape[1]}x{own.shape[0]}")
    check_mask(edit.mask, (height, width))
    _check_text("prompt", edit.prompt)
    _check_text("negative prompt", edit.negative_prompt)
    _check_whole("seed", edit.seed, 0, MAX_SEED)
    check_steps(edit.steps)
    _check_whole("number of dense steps", edit.dense_steps, 0, MAX_STEPS)
    _check_whole("halo", edit.halo, 0, MAX_HALO)
    _check_whole("feather", edit.feather, 0, MAX_FEATHER)
    _check_real("guidance", edit.guidance, 0.0, MAX_GUIDANCE)
    _check_real("true guidance", edit.true_guidance, 0.0, MAX_GUIDANCE)
    _check_real("strength", edit.strength, 0.0, 1.0)
    if edit.own_steps is not None and not all(0 <= step < edit.steps for step in edit.own_steps):
        raise EditError(f"the own steps are {edit.own_steps}: numbers from 0 to {edit.steps - 1} are expected")
    if not 0 <= edit.max_change < math.inf:
        raise EditError(f"the largest change is {edit.max_change}: a number of at least 0 is expected")
    if edit.reuse not in get_args(Reuse):
        raise EditError(f"the reuse is {edit.reuse!r}: one of {', '.join(get_args(Reuse))} is expected")
    if edit.crop not in get_args(CropMode):
        raise EditError(f"the crop is {edit.crop!r}: one of {', '.join(get_args(CropMode))} is expected")
    if edit.crop_padding is not None:
        _check_whole("crop padding", edit.crop_padding, 0, MAX_CROP_PADDING)
    if edit.strength == 0:
        raise EditError("the strength is 0: more than 0 and at most 1 is expected")
    if edit.masked_content not in get_args(MaskedContent):
        names = ", ".join(get_args(MaskedContent))
        raise EditError(f"the masked content is {edit.masked_content!r}: one of {names} is expected")
    if edit.size is not None:
        _check_working_size(edit.size)
    if len(edit.loras) > MAX_LORAS:
        raise EditError(f"the edit names {len(edit.loras)} LoRAs: at most {MAX_LORAS} are expected")
    for lora in edit.loras:
        _check_real(f"scale of the LoRA {lora.name!r}", lora.scale, -MAX_LORA_SCALE, MAX_LORA_SCALE)
    _check_controls(edit)


def check_steps(steps: int) -> None:
    _check_whole("number of steps", steps, 1, MAX_STEPS)


def _check_controls(edit: Edit) -> None:
    num_controls, num_images = len(edit.controls), len(edit.control_images)
    if num_controls > MAX_CONTROLS:
        raise EditError(f"the edit names {num_controls} ControlNets: at most {MAX_CONTROLS} are expected")
    if num_controls != num_images:
        raise EditError(
            f"the edit has {num_controls} ControlNets and {num_images} control images: as many are expected"
        )
    for use, image in zip(edit.controls, edit.control_images, strict=True):
        what = f"of the ControlNet {use.name!r}"
        _check_real(f"scale {what}", use.scale, -MAX_CONTROL_SCALE, MAX_CONTROL_SCALE)
        _check_real(f"start {what}", use.start, 0.0, 1.0)
        _check_real(f"end {what}", use.end, 0.0, 1.0)
        if use.start >= use.end:
            raise EditError(f"the start {what} is {use.start:g} and its end {use.end:g}: an earlier start is expected")
        if image.shape != edit.picture.shape:
            raise EditError(f"the image {what} is {list(image.shape)}: {list(edit.picture.shape)} is expected")


def _check_text(name: str, text: str) -> None:
    if not isinstance(text, str):
        raise EditError(f"the {name} is {type(text).__name__}: text is expected")
    if len(text) > MAX_PROMPT:
        raise EditError(f"the {name} has {len(text):,} characters: at most {MAX_PROMPT:,} are accepted")
    try:
        text.encode()
    except UnicodeEncodeError as broken:
        raise EditError(f"the {name} is not valid text at character {broken.start}: UTF-8 is expected") from None


def _check_whole(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, SupportsIndex) or isinstance(value, (bool, np.ndarray)) or not low <= value <= high:
        raise EditError(f"the {name} is {value!r}: a whole number from {low} to {high} is expected")


def _check_real(name: str, value: float, low: float, high: float) -> None:
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # nan fails the comparison
        raise EditError(f"the {name} is {value!r}: a number from {low:g} to {high:g} is expected")


def _check_working_size(size: tuple[int, int]) -> None:
    fits = isinstance(size, (tuple, list)) and len(size) == 2
    if not fits or any(
        not isinstance(side, int) or side % SIZE_MULTIPLE or not MIN_SIZE <= side <= MAX_SIZE for side in size
    ):
        raise EditError(
            f"the working size is {size!r}: (height, width), each a multiple of {SIZE_MULTIPLE} "
            f"from {MIN_SIZE} to {MAX_SIZE}, is expected"
        )


def check_target(path: str | Path) -> None:
    """Raise a PictureError unless a picture can be saved under this name."""
    path = Path(path)
    if path.suffix.lower() not in FORMAT_OF_SUFFIX:
        raise PictureError(f"{path} has no known picture suffix: {', '.join(FORMAT_OF_SUFFIX)} are known")
    if not os.path.isdir(path.parent):
        raise PictureError(f"{path} cannot be saved: there is no folder {path.parent}")
    if os.path.isdir(path):
        raise PictureError(f"{path} cannot be saved: it is a folder")


def encode_picture(
    picture: OwnPixels, file_format: str, quality: int = 100, is_quick: bool = False, source: Source | None = None
) -> bytes:
    """Encode a picture, with the profile and the metadata of the file that it came from. PNG is lossless, and so is
    WebP at a quality of 100. JPEG's quality is capped at 95, above which files only get larger; transparent parts of it
    are white. A quick PNG takes half the time and a few percent more bytes."""
    file_format = file_format.upper()
    height, width, _ = picture.shape
    if max(height, width) > MAX_SIDE[file_format]:
        raise PictureError(f"{width}x{height} is more than the {MAX_SIDE[file_format]} a {file_format} side can be")
    image, options = as_image(picture), _kept_options(source)
    if file_format == "JPEG":
        image = on_white(image)
    elif file_format == "WEBP" and "icc_profile" in options and image.mode in ("L", "LA"):
        image = _coloured(image, options.pop("icc_profile"))  # a WebP is never grey
    encoded = io.BytesIO()
    if file_format == "WEBP":
        # exact: colours of transparent pixels are kept too
        is_lossless = quality == 100
        level = 80 if is_lossless else quality
        image.save(encoded, file_format, lossless=is_lossless, quality=level, exact=is_lossless, **options)
    elif file_format == "JPEG":
        image.save(encoded, file_format, quality=min(quality, 95), subsampling=0, **options)
    else:
        image.save(encoded, file_format, compress_level=1 if is_quick else 6, **options)
    return encoded.getvalue()


def _kept_options(source: Source | None) -> dict[str, bytes]:
    kept = {"icc_profile": source.profile, "exif": source.exif} if source else {}
    return {name: value for name, value in kept.items() if value}


def _coloured(image: Image.Image, profile: bytes) -> Image.Image:
    """A grey image with a profile in sRGB."""
    coloured = to_srgb(image.getchannel("L"), profile)
    if image.mode == "LA":
        coloured.putalpha(image.getchannel("A"))
    return coloured


def save_picture(picture: OwnPixels, path: str | Path, source: Source | None = None) -> None:
    """Save in the format of the suffix, PNG and WebP without loss, with what is to be kept of the file that the picture
    came from. The file appears only when it is complete."""
    path = Path(path)
    check_target(path)
    encoded = encode_picture(picture, FORMAT_OF_SUFFIX[path.suffix.lower()], source=source)
    try:
        with complete_file(path) as partial:
            partial.write_bytes(encoded)
    except OSError as failed:
        raise PictureError(f"{path} cannot be saved: {failed.strerror}") from None
