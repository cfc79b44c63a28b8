"""Splits a form into its fields and the bytes of its pictures. Knows files and data: URLs; fetches no URL, and trusts
no file name and no declared type."""

import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from instgenie.pictures.control import MADE_HERE
from instgenie.server.bodies.body import RequestForm
from instgenie.server.bodies.controls import is_word, with_files
from instgenie.server.bodies.data_urls import decode_base64
from instgenie.server.bodies.fields import EditFields, Fields, ImageFields, PictureField, TemplateFields, parse_fields
from instgenie.server.errors import ApiError, bad, echo
from instgenie.types import Notes

FieldsT = TypeVar("FieldsT", bound=ImageFields)

DATA_URL_PREFIX = r"data:image/[a-z0-9.+-]{1,32}(;[a-z0-9-]{1,32}=[^;,]{0,64}){0,4};base64,"
MAX_PICTURES = 16  # of one field; OpenAI's limit
WHITESPACE = b" \t\r\n"  # allowed within base64


@dataclass(frozen=True, eq=False)
class EditForm:
    fields: EditFields
    image: bytes | None  # None: a template is named instead
    mask: bytes | None  # None: the whole picture is masked
    notes: Notes  # the form's
    references: tuple[bytes, ...] = ()  # pictures to look at beside the edited one


def read_edit(form: RequestForm, kind: type[EditFields] = EditFields) -> EditForm:
    pictures = take_pictures(kind, form)
    files = take_control_files(form)
    fields = with_control_files(parse_fields(kind, form), files)
    images = pictures.get("image", [])
    image = images[0] if images else None
    if fields.template is None and image is None:
        raise missing_image()
    if fields.template is not None and image is not None:
        raise bad("template", "The request has both an image and a template: one of them is expected.")
    mask = next(iter(pictures.get("mask", ())), None)
    return EditForm(fields, image, mask, form.notes, tuple(images[1:]))


def read_template(form: RequestForm) -> tuple[TemplateFields, bytes]:
    pictures = take_pictures(TemplateFields, form)
    fields = parse_fields(TemplateFields, form)
    if "image" not in pictures:
        raise missing_image()
    image, *others = pictures["image"]
    if others:
        raise bad("image", f"There are {1 + len(others)} images: a template is one picture.")
    return fields, image


def take_control_files(form: RequestForm) -> list[bytes]:
    """Remove the files of control images from a form, and return them in the order in which they came."""
    names = [name for name in list(form.values) if re.fullmatch(r"control_images?(\[\d{0,2}\])?", name)]
    return [picture_bytes("control_image", sent) for name in names for sent in form.values.pop(name)]


def with_control_files(fields: FieldsT, files: Sequence[bytes]) -> FieldsT:
    """The fields with the images of their ControlNets."""
    num_open = sum(one["image"] is None for one in fields.controls)
    if num_open != len(files):
        raise bad(
            "controls",
            f"{num_open} of the {len(fields.controls)} controls have no image, and there are {len(files)} files "
            "control_image: as many are expected. An image may also be a data: URL, or "
            f"{MADE_HERE!r} for the picture's edges.",
        )
    for one in fields.controls:
        if one["image"] is not None and not is_word(one["image"]):
            decode_data_url("controls", one["image"])
    return fields.model_copy(update={"controls": with_files(fields.controls, files)}) if files else fields


def missing_image() -> ApiError:
    return bad("image", "The field 'image' is missing: a picture is expected.", "missing_required_parameter")


def take_pictures(kind: type[Fields], form: RequestForm) -> Mapping[str, Sequence[bytes]]:
    """Remove the picture fields from the form and return the encoded pictures by field name."""
    found = {picture.name: take_picture(picture, form) for picture in kind.pictures}
    return {name: encoded for name, encoded in found.items() if encoded}


def take_picture(picture: PictureField, form: RequestForm) -> list[bytes]:
    """Remove all fields that carry the picture, in a list or not, and return the pictures they hold, in their order."""
    sent = [one for name in list(form.values) if is_of(picture, name) for one in form.values.pop(name)]
    if picture.may_be_list and form.is_json:
        sent = [one for value in sent for one in (value if isinstance(value, list) else [value])]
    if len(sent) > 1 and not picture.may_be_list:
        raise bad(picture.name, f"There are {len(sent)} {picture.name}s: one is expected.")
    if len(sent) > MAX_PICTURES:
        raise bad(picture.name, f"There are {len(sent)} {picture.name}s: at most {MAX_PICTURES} are read.")
    return [picture_bytes(picture.name, one) for one in sent]


def check_references(num: int, most: int) -> None:
    """Raise unless a model that takes `most` references can edit one picture with `num` of them."""
    if num <= most:
        return
    why = "this model edits one picture and has no use for reference pictures"
    if most:
        why = f"this model edits the first and looks at {most} other{'s' if most > 1 else ''} at most"
    raise bad("image", f"There are {1 + num} images: {why}.")


def is_of(picture: PictureField, name: str) -> bool:
    """True of the picture's names; of a list also with brackets, as in `image[]` and `image[0]`."""
    if picture.may_be_list:
        name = re.sub(r"\[\d{0,2}\]$", "", name)
    return name in (picture.name, *picture.other_names)


def picture_bytes(param: str, sent: Any) -> bytes:
    url = unwrapped(param, sent)
    if isinstance(url, bytes):
        return url
    if not isinstance(url, str):
        raise bad(param, f"The field {param!r} is {echo(sent)}: a picture as a data: URL is expected.")
    return decode_data_url(param, url)


def unwrapped(param: str, sent: Any) -> Any:
    """Return the URL in an object such as `{"image_url": URL}`, `{"url": URL}` or `{"image_url": {"url": URL}}`."""
    for _ in range(2):
        if isinstance(sent, dict):
            if sent.get("file_id"):
                message = f"The field {param!r} names a file, but the server keeps none: send a file or a data: URL."
                raise bad(param, message, "no_files")
            sent = sent.get("image_url") or sent.get("url")
    return sent


def decode_data_url(param: str, url: str) -> bytes:
    url = url.strip()
    prefix = re.match(DATA_URL_PREFIX, url, re.IGNORECASE)
    if prefix is None:
        raise not_a_data_url(param, url)
    try:
        return decode_base64(url[prefix.end() :], WHITESPACE)
    except (binascii.Error, ValueError):
        raise bad(param, f"The data: URL in {param!r} is not valid base64.") from None


def not_a_data_url(param: str, url: str) -> ApiError:
    if re.match(r"(https?|ftp|file|s3|gs):", url, re.IGNORECASE):
        message = f"The field {param!r} is a URL, but the server fetches none: send a file or a data: URL."
        return bad(param, message, "no_urls")
    return bad(param, f"The field {param!r} is text: a file or a data: URL of a picture is expected.")
