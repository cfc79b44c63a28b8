"""A field is declared once: the declaration yields its validation, its error message and its OpenAPI schema."""

from typing import Any, Literal

import pytest
from pydantic import Field

from instgenie.server.bodies.body import RequestForm
from instgenie.server.bodies.fields import Fields, PictureField, parse_fields
from instgenie.server.bodies.forms import take_pictures
from instgenie.server.bodies.schema import form_schema, json_schema
from instgenie.server.errors import ApiError


class SampleFields(Fields):
    pictures = (PictureField("outline"), PictureField("photo", may_be_list=True))

    priority: int | None = Field(None, ge=0, le=9, description="Lower runs first.")
    reuse: Literal["off", "template"] = Field("template", description="What may be reused.")


def form(is_json: bool = False, **values: Any) -> RequestForm:
    return RequestForm({name: [value] for name, value in values.items()}, is_json)


def test_form_parts_are_converted_and_json_values_are_not() -> None:
    assert parse_fields(SampleFields, form(priority="3", reuse="off")) == SampleFields(priority=3, reuse="off")
    assert parse_fields(SampleFields, form(is_json=True, priority=3)) == SampleFields(priority=3)
    with pytest.raises(ApiError, match="The field 'priority' is '3'"):
        parse_fields(SampleFields, form(is_json=True, priority="3"))


@pytest.mark.parametrize(
    ("values", "param", "code", "message"),
    [
        ({"priority": "10"}, "priority", "invalid_value", "The field 'priority' is '10': input should be less than"),
        ({"reuse": "all"}, "reuse", "invalid_value", "The field 'reuse' is 'all': input should be 'off' or 'template'"),
        ({"priorty": "1"}, "priorty", "unknown_parameter", "Unknown field 'priorty': did you mean priority?"),
        ({"reuse": b"off"}, "reuse", "invalid_value", "The field 'reuse' was sent as a file: text is expected."),
    ],
)
def test_an_error_names_the_field_and_the_value(values: dict[str, Any], param: str, code: str, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_fields(SampleFields, form(**values))
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, param, code)
    assert message in refused.value.message


def test_pictures_are_taken_out_of_the_form() -> None:
    sent = RequestForm({"outline": [b"1"], "photo[]": [b"2"], "reuse": ["off"]})
    assert take_pictures(SampleFields, sent) == {"outline": b"1", "photo": b"2"}
    assert list(sent.values) == ["reuse"]
    listed = form(is_json=True, outline=["data:image/png;base64,MQ=="])
    with pytest.raises(ApiError, match=r"The field 'outline' is .* a picture as a data: URL is expected"):
        take_pictures(SampleFields, listed)


def test_the_schemas_describe_every_field() -> None:
    in_json, in_form = json_schema(SampleFields)["properties"], form_schema(SampleFields)["properties"]
    assert set(in_json) == {"priority", "reuse", "outline", "photo"}
    assert set(in_form) == {"priority", "reuse", "outline", "photo", "photo[]"}
    assert in_form["priority"] == {
        "type": "integer", "minimum": 0, "maximum": 9, "title": "Priority", "description": "Lower runs first.",
    }  # fmt: skip
    assert {"type": "null"} in in_json["reuse"]["anyOf"]
    assert in_form["reuse"]["enum"] == ["off", "template"]
