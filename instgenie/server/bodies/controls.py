"""ControlNets in requests and answers: how a request names them, where their images come from, and what an answer says
about them."""

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from instgenie.cluster.orders import Facts
from instgenie.pictures.control import MADE_HERE, NEEDS
from instgenie.pictures.picture import MAX_CONTROL_SCALE, MAX_CONTROLS
from instgenie.server.bodies.loras import NAME_SCHEMA, read_text
from instgenie.types import ControlUse, Notes

KEYS = {"name", "image", "scale", "start", "end", "mode"}
SHARE_SCHEMA = {"type": "number", "minimum": 0, "maximum": 1}
CONTROL_SCHEMA = {
    "type": "object",
    "properties": {
        "name": NAME_SCHEMA,
        "image": {"type": "string"},
        "scale": {"type": "number", "minimum": -MAX_CONTROL_SCALE, "maximum": MAX_CONTROL_SCALE},
        "start": SHARE_SCHEMA,
        "end": SHARE_SCHEMA,
        "mode": {"type": "integer", "minimum": 0},
    },
    "required": ["name"],
    "additionalProperties": False,
}


def read_control_list(given: Any) -> list[dict[str, Any]]:
    """A list of objects; in a form as JSON."""
    if isinstance(given, str):
        given = read_text(given)
    found = [read_control(one) for one in (given if isinstance(given, list) else [given])]
    if len(found) > MAX_CONTROLS:
        raise wrong(f"at most {MAX_CONTROLS} ControlNets are expected")
    return found


def read_control(one: Any) -> dict[str, Any]:
    if not isinstance(one, Mapping) or "name" not in one or not set(one) <= KEYS:
        raise wrong('each is expected to be {"name": ..., "image": ..., "scale": ..., "start": ..., "end": ...}')
    name, image, mode = one["name"], one.get("image"), one.get("mode")
    if not isinstance(name, str) or not 0 < len(name) <= 128:
        raise wrong("a name of 1 to 128 characters is expected")
    if image is not None and not isinstance(image, str):
        raise wrong(f"an image is expected to be a data: URL, or {MADE_HERE}")
    if mode is not None and (isinstance(mode, bool) or not isinstance(mode, int) or mode < 0):
        raise wrong("a mode is expected to be a number of at least 0")
    scale = number(one, "scale", 1.0, -MAX_CONTROL_SCALE, MAX_CONTROL_SCALE)
    start, end = number(one, "start", 0.0, 0.0, 1.0), number(one, "end", 1.0, 0.0, 1.0)
    if start >= end:
        raise wrong(f"a start before the end is expected, not {start:g} and {end:g}")
    return {"name": name, "image": image, "scale": scale, "start": start, "end": end, "mode": mode}


def number(one: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = one.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise wrong(f"a {name} from {low:g} to {high:g} is expected")
    return float(value)


def wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("controls", message)


ControlList = Annotated[
    list[dict[str, Any]],
    BeforeValidator(read_control_list),
    WithJsonSchema({"type": "array", "items": CONTROL_SCHEMA, "maxItems": MAX_CONTROLS}),
]


def is_word(image: str) -> bool:
    """True if an image is named by how it is made."""
    return image == MADE_HERE or image in NEEDS


def with_files(controls: Sequence[Mapping[str, Any]], files: Sequence[bytes]) -> list[dict[str, Any]]:
    """The controls with images that a form sent as files, in the order of those that have none."""
    left = iter(files)
    return [{**one, "image": as_data_url(next(left)) if one["image"] is None else one["image"]} for one in controls]


def as_data_url(file: bytes) -> str:
    return f"data:image/any;base64,{base64.b64encode(file).decode()}"


def uses_of(controls: Sequence[Mapping[str, Any]]) -> list[ControlUse]:
    return [ControlUse(**{key: value for key, value in one.items() if key != "image"}) for one in controls]


def control_notes(facts: Sequence[Facts], controls: Sequence[Mapping[str, Any]]) -> Notes:
    """One sentence per ControlNet on how it guided the edit."""
    if not facts or not facts[0].num_steps:
        return []
    notes = [describe_control(one, facts[0].num_steps) for one in controls]
    if repeated := sum(one.num_control_retries for one in facts):
        steps = "A step was" if repeated == 1 else f"{repeated} steps were"
        notes.append(f"{steps} repeated, because the process that computes ControlNets had died.")
    return notes


def describe_control(one: Mapping[str, Any], num_steps: int) -> str:
    first, last = guided_steps(one["start"], one["end"], num_steps)
    what = f"The ControlNet {one['name']!r}"
    if first > last:
        return f"{what} guided none of the {num_steps} steps: none lies between its start and its end."
    image = "the edges of the picture, made here," if one["image"] == MADE_HERE else "the image that was sent,"
    steps = f"all {num_steps} steps" if last - first + 1 == num_steps else f"steps {first} to {last} of {num_steps}"
    return f"{what} guided {steps} with {image} at a scale of {one['scale']:g}."


def guided_steps(start: float, end: float, num_steps: int) -> tuple[int, int]:
    """The first and the last step that a ControlNet guides, counted from 1; the last one is less if it guides none."""
    guided = [step for step in range(num_steps) if step / num_steps >= start and (step + 1) / num_steps <= end]
    return (guided[0] + 1, guided[-1] + 1) if guided else (1, 0)
