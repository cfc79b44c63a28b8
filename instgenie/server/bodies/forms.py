"""From a form to what an edit needs: fields, and the bytes of picture and mask. Knows part names and data: URLs; takes
no other URL, trusts no file name and no declared type."""

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Any

from instgenie.server.bodies.body import Form
from instgenie.server.bodies.fields import EditFields, TemplateFields, parse_fields
from instgenie.server.errors import ApiError, bad, echo

IMAGE_NAMES = ("image", "image[]")
DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class EditForm:
    fields: EditFields
    image: bytes | None  # None: a template is named instead
    mask: bytes | None  # None: everything is masked


def read_edit(form: Form) -> EditForm:
    image, mask = take_image(form), take_mask(form)
    fields = parse_fields(EditFields, form)
    if fields.template is None and image is None:
        raise bad("image", "The field 'image' is missing: a picture is expected.", "missing_required_parameter")
    if fields.template is not None and image is not None:
        raise bad("template", "An image and a template are given: one of them is expected.")
    return EditForm(fields, image, mask)


def read_template(form: Form) -> tuple[TemplateFields, bytes]:
    image = take_image(form)
    fields = parse_fields(TemplateFields, form)
    if image is None:
        raise bad("image", "The field 'image' is missing: a picture is expected.", "missing_required_parameter")
    return fields, image


def take_image(form: Form) -> bytes | None:
    """One picture, sent as `image`, or as a list of one."""
    given = [value for name in IMAGE_NAMES for value in form.values.pop(name, [])]
    if form.is_json:
        given = [one for value in given for one in (value if isinstance(value, list) else [value])]
    if len(given) > 1:
        raise bad("image", f"There are {len(given)} images: one is expected.")
    return picture_bytes("image", given[0]) if given else None


def take_mask(form: Form) -> bytes | None:
    given = form.values.pop("mask", [])
    if len(given) > 1:
        raise bad("mask", f"There are {len(given)} masks: one is expected.")
    return picture_bytes("mask", given[0]) if given else None


def picture_bytes(param: str, given: Any) -> bytes:
    if isinstance(given, bytes):
        return given
    if not isinstance(given, str):
        raise bad(param, f"The field {param!r} is {echo(given)}: a picture as a data: URL is expected.")
    return decode_data_url(param, given)


def decode_data_url(param: str, url: str) -> bytes:
    start = DATA_URL.match(url)
    if start is None:
        raise no_url(param, url)
    try:
        return base64.b64decode(url[start.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise bad(param, f"The data: URL of {param!r} is not valid base64.") from None


def no_url(param: str, url: str) -> ApiError:
    if re.match(r"(https?|ftp|file|s3|gs):", url, re.IGNORECASE):
        return bad(param, f"The field {param!r} is a URL: nothing is fetched, send a file or a data: URL.", "no_urls")
    return bad(param, f"The field {param!r} is text: a file, or a data: URL of a picture, is expected.")
