"""A field is declared once: the declaration yields its validation, its error message and its OpenAPI schema."""

from typing import Any, Literal

import msgspec
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler
from helpers.fake_cluster import FACTS
from pydantic import Field

from instgenie.jobs.sampler import flow_sigmas, num_skipped
from instgenie.server.bodies.body import RequestForm
from instgenie.server.bodies.fields import EditFields, Fields, PictureField, parse_fields
from instgenie.server.bodies.forms import take_pictures
from instgenie.server.bodies.schema import form_schema, json_schema
from instgenie.server.errors import ApiError
from instgenie.types import Notes


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
    assert take_pictures(SampleFields, sent) == {"outline": [b"1"], "photo": [b"2"]}
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


@pytest.mark.parametrize("own", [0.9, 0.75])
def test_an_edit_without_a_mask_leaves_out_a_step(own: float) -> None:
    """A schedule that leaves out none begins with pure noise, so that nothing of the picture is left."""
    model = msgspec.structs.replace(FACTS, whole_strength=own)
    scheduler = FlowMatchEulerDiscreteScheduler()
    for steps in (None, *range(1, 51)):
        fields = EditFields(prompt="a", num_inference_steps=steps).for_whole_picture(model, [])
        wish = fields.edit_settings(seed=0)
        assert wish.steps is not None
        num_run = len(flow_sigmas(scheduler, wish.steps, 16, wish.strength)) - 1
        assert 1 <= num_run < wish.steps
        assert num_skipped(wish.steps, wish.strength) >= 1
        assert num_run <= (steps or FACTS.steps)


def test_without_a_prompt_more_of_the_picture_stays() -> None:
    fields = (EditFields(prompt=prompt, num_inference_steps=28) for prompt in ("a cat", " "))
    shown, bare = (one.for_whole_picture(FACTS, []).strength for one in fields)
    assert shown is not None
    assert bare is not None
    assert bare < shown


def test_a_given_strength_stays() -> None:
    notes: Notes = []
    fields = EditFields(prompt="a", strength=1.0)
    assert fields.for_whole_picture(FACTS, notes) is fields
    assert notes == []


@pytest.mark.parametrize(
    ("needs_true", "given", "scale", "note"),
    [
        (True, {}, 2.0, "The negative prompt works through a true_cfg_scale of 2: none was given."),
        (True, {"true_cfg_scale": 1.0}, 1.0, "The negative prompt has no effect: it needs a true_cfg_scale above 1."),
        (True, {"true_cfg_scale": 3.0}, 3.0, None),
        (False, {}, 1.0, None),
        (False, {"guidance_scale": 1.0}, 1.0, "The negative prompt has no effect: it needs a guidance_scale above 1."),
        (False, {"guidance_scale": 1.0, "true_cfg_scale": 2.0}, 2.0, None),
    ],
)
def test_a_negative_prompt_is_used_or_the_answer_says_so(
    needs_true: bool, given: dict[str, float], scale: float, note: str | None
) -> None:
    notes: Notes = []
    model = msgspec.structs.replace(FACTS, needs_true_guidance=needs_true)
    fields = EditFields(prompt="a", negative_prompt="b", **given).guided(model, notes)  # type: ignore[arg-type]
    assert fields.edit_settings(seed=0).true_guidance == scale
    assert notes == ([] if note is None else [note])
