"""LoRAs in requests and answers: how a request names them, and what an answer says about them."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from instgenie.cluster.orders import Facts
from instgenie.pictures.picture import MAX_LORA_SCALE, MAX_LORAS
from instgenie.server.errors import bad
from instgenie.types import Notes

NAME_SCHEMA = {"type": "string", "minLength": 1, "maxLength": 128}
SCALE_SCHEMA = {"type": "number", "minimum": -MAX_LORA_SCALE, "maximum": MAX_LORA_SCALE}
LORA_SCHEMA = {
    "type": "object",
    "properties": {"name": NAME_SCHEMA, "scale": SCALE_SCHEMA},
    "required": ["name"],
    "additionalProperties": False,
}


def read_loras(given: Any) -> list[dict[str, Any]]:
    """A list of names, or of names with scales; in a form as JSON, or as NAME:SCALE with commas between."""
    if isinstance(given, str):
        given = read_text(given)
    found = [read_lora(one) for one in (given if isinstance(given, list) else [given])]
    if len(found) > MAX_LORAS:
        raise wrong(f"at most {MAX_LORAS} LoRAs are expected")
    return found


def read_text(text: str) -> Any:
    if text.lstrip()[:1] not in ("[", "{"):
        return [one.strip() for one in text.split(",")]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise wrong("a list in JSON is expected") from None


def read_lora(one: Any) -> dict[str, Any]:
    if isinstance(one, str):
        own_name, _, own_scale = one.partition(":")
        one = {"name": own_name} | ({"scale": as_number(own_scale)} if own_scale else {})
    if not isinstance(one, Mapping) or not set(one) <= {"name", "scale"}:
        raise wrong('each is expected to be a name, or {"name": ..., "scale": ...}')
    name, scale = one.get("name"), one.get("scale", 1.0)
    if not isinstance(name, str) or not 0 < len(name) <= 128:
        raise wrong("a name of 1 to 128 characters is expected")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not abs(scale) <= MAX_LORA_SCALE:
        raise wrong(f"a scale from {-MAX_LORA_SCALE:g} to {MAX_LORA_SCALE:g} is expected")
    return {"name": name, "scale": float(scale)}


def as_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    return number


def wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("loras", message)


LoraList = Annotated[
    list[dict[str, Any]],
    BeforeValidator(read_loras),
    WithJsonSchema({"type": "array", "items": LORA_SCHEMA, "maxItems": MAX_LORAS}),
]
LoraName = Annotated[str, Field(min_length=1, max_length=128)]
LoraScale = Annotated[float, Field(ge=-MAX_LORA_SCALE, le=MAX_LORA_SCALE)]


def asked_loras(loras: list[dict[str, Any]], lora: str | None, scale: float | None) -> list[dict[str, Any]]:
    """The LoRAs of a request, which names them in a list, or one by itself."""
    if lora is None and scale is not None:
        raise bad("lora_scale", "The request has a lora_scale, but no lora: both or neither are expected.")
    if lora is None:
        return loras
    if loras:
        raise bad("lora", "The request has both lora and loras: one of them is expected.")
    return [{"name": lora, "scale": 1.0 if scale is None else scale}]


def lora_notes(facts: Sequence[Facts], names: Sequence[str]) -> Notes:
    """One sentence on how the LoRAs of a request were applied."""
    told = [one for one in facts if one.loras]
    if not told:
        return []
    latest = max(told, key=lambda one: one.loras.step if one.loras else 0)
    assert latest.loras is not None
    what = f"The LoRA {names[0]!r} was" if len(names) == 1 else f"The LoRAs {', '.join(map(repr, names))} were"
    waited = latest.loras.waited_seconds
    how = f", and the edit waited {waited:.2f} s for {'it' if len(names) == 1 else 'them'}" if waited else ""
    if latest.loras.step == 0:
        return [f"{what} applied from the first of {latest.num_steps} steps{how}."]
    loading = "it was" if len(names) == 1 else "they were"
    from_step = f"from step {latest.loras.step + 1} of {latest.num_steps}"
    return [f"{what} applied {from_step}: until then {loading} loading{how}."]
