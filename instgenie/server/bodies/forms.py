"""Splits a form into its fields and the bytes of its pictures. Knows files and data: URLs; fetches no URL, and trusts
no file name and no declared type."""

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Any

from instgenie.server.bodies.body import RequestForm
from instgenie.server.bodies.fields import EditFields, Fields, PictureField, TemplateFields, parse_fields
from instgenie.server.errors import ApiError, bad, echo
from instgenie.types import Notes

DATA_URL_PREFIX = r"data:image/[a-z0-9.+-]{1,32};base64,"


@dataclass(frozen=True, eq=False)
class EditForm:
    fields: EditFields
    image: bytes | None  # None: a template is named instead
    mask: bytes | None  # None: the whole picture is masked
    notes: Notes  # the form's


def read_edit(form: RequestForm) -> EditForm:
    pictures = take_pictures(EditFields, form)
    fields = parse_fields(EditFields, form)
    image = pictures.get("image")
    if fields.template is None and image is None:
        raise missing_image()
    if fields.template is not None and image is not None:
        raise bad("template", "The request has both an image and a template: one of them is expected.")
    return EditForm(fields, image, pictures.get("mask"), form.notes)


def read_template(form: RequestForm) -> tuple[TemplateFields, bytes]:
    pictures = take_pictures(TemplateFields, form)
    fields = parse_fields(TemplateFields, form)
    if "image" not in pictures:
        raise missing_image()
    return fields, pictures["image"]


def missing_image() -> ApiError:
    return bad("image", "The field 'image' is missing: a picture is expected.", "missing_required_parameter")


def take_pictures(kind: type[Fields], form: RequestForm) -> dict[str, bytes]:
    """Remove the picture fields from the form and return the encoded pictures by field name."""
    found = {picture.name: take_picture(picture, form) for picture in kind.pictures}
    return {name: encoded for name, encoded in found.items() if encoded is not None}


def take_picture(picture: PictureField, form: RequestForm) -> bytes | None:
    name = picture.name
    sent = form.values.pop(name, [])
    if picture.may_be_list:
        sent = [*sent, *form.values.pop(f"{name}[]", [])]
        if form.is_json:
            sent = [one for value in sent for one in (value if isinstance(value, list) else [value])]
    if len(sent) > 1:
        raise bad(name, f"There are {len(sent)} {name}s: one is expected.")
    return picture_bytes(name, sent[0]) if sent else None


def picture_bytes(param: str, sent: Any) -> bytes:
    if isinstance(sent, bytes):
        return sent
    if not isinstance(sent, str):
        raise bad(param, f"The field {param!r} is {echo(sent)}: a picture as a data: URL is expected.")
    return decode_data_url(param, sent)


def decode_data_url(param: str, url: str) -> bytes:
    prefix = re.match(DATA_URL_PREFIX, url, re.IGNORECASE)
    if prefix is None:
        raise not_a_data_url(param, url)
    try:
        return base64.b64decode(url[prefix.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise bad(param, f"The data: URL in {param!r} is not valid base64.") from None


def not_a_data_url(param: str, url: str) -> ApiError:
    if re.match(r"(https?|ftp|file|s3|gs):", url, re.IGNORECASE):
        message = f"The field {param!r} is a URL, but the server fetches none: send a file or a data: URL."
        return bad(param, message, "no_urls")
    return bad(param, f"The field {param!r} is text: a file or a data: URL of a picture is expected.")
