"""Ranges and choices of the fields of an edit, for pages that offer controls for them. Read off the fields themselves,
narrowed by what the operator allows; knows no page."""

from typing import Any, TypedDict

from instgenie.cluster.wire import ModelFacts
from instgenie.server.bodies.fields import EditFields
from instgenie.server.config import HttpConfig

KEYWORDS = {
    "minimum": "minimum",
    "exclusiveMinimum": "minimum",
    "maximum": "maximum",
    "maxLength": "max_length",
    "enum": "choices",
}


class Limits(TypedDict, total=False):
    minimum: float
    maximum: float
    max_length: int
    choices: list[str]
    own: float  # the model's value, which an omitted field takes


def field_limits(config: HttpConfig, model: ModelFacts | None) -> dict[str, Limits]:
    """Return the limits of every field of an edit, by name. Before the model is loaded its own values are left out."""
    limits = {name: limits_of(schema) for name, schema in EditFields.model_json_schema()["properties"].items()}
    steps = limits["num_inference_steps"]
    limits["n"]["maximum"] = config.max_n
    steps["maximum"] = min(config.max_steps, steps["maximum"])
    if model:
        steps["maximum"] = max(steps["maximum"], model.steps)
        steps["own"] = model.steps
        limits["guidance_scale"]["own"] = model.guidance
    return limits


def limits_of(schema: dict[str, Any]) -> Limits:
    """Return the limits that a field's JSON schema states; those of an optional field are in one of its branches."""
    limits = Limits()
    for branch in (schema, *schema.get("anyOf", ())):
        for keyword, name in KEYWORDS.items():
            if keyword in branch:
                limits[name] = branch[keyword]  # type: ignore[literal-required]
    return limits
