"""The fields a client may send and what each may hold. Knows names and ranges; decodes no picture.

Names and values are OpenAI's; extensions are flat, for clients send them as further form parts. Unknown names are
refused, so that a misspelt one is not silently without effect.
"""

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from instgenie.jobs import quality
from instgenie.pictures.decode import MIN_SIDE
from instgenie.pictures.picture import MAX_FEATHER, MAX_GUIDANCE, MAX_PROMPT, MAX_SEED, MAX_STEPS
from instgenie.server.bodies.body import Form
from instgenie.server.errors import ApiError, bad, echo
from instgenie.server.options import nearest

MAX_EDITS = 10
MAX_ANSWER_SIDE = 4096
MAX_DEADLINE_MS = 3_600_000

Quality = Literal["auto", "low", "medium", "high", "xhigh", "max", "standard", "hd", "fast", "balanced", "exact"]
OURS: dict[str, quality.Quality] = {
    "auto": "balanced", "medium": "balanced", "standard": "balanced", "balanced": "balanced",
    "low": "fast", "fast": "fast",
    "high": "exact", "xhigh": "exact", "max": "exact", "hd": "exact", "exact": "exact",
}  # fmt: skip
OPENAI = {"fast": "low", "balanced": "medium", "exact": "high"}

Prompt = Annotated[str, Field(max_length=MAX_PROMPT)]
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]
Guidance = Annotated[float, Field(ge=0, le=MAX_GUIDANCE)]


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ImageFields(Fields):
    prompt: Prompt = Field(description="What the masked part becomes.")
    model: str | None = Field(None, max_length=256, description="A name this server serves; may be left out.")
    n: int = Field(1, ge=1, le=MAX_EDITS, description="Pictures to make, with seeds seed, seed + 1, ...")
    size: str = Field(
        "auto", pattern=r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$",
        description="WIDTHxHEIGHT of the answer. Edits: auto is the picture's own; otherwise picture and mask are "
        "stretched to this size before the edit. Generations: auto is the model's own.",
    )  # fmt: skip
    quality: Quality = Field("auto", description="fast, balanced or exact, or OpenAI's names for them.")
    background: Literal["auto", "opaque"] = Field("auto", description="Answers are opaque.")
    output_format: Literal["png", "jpeg", "webp"] = Field("png", description="png, and webp at 100, are exact.")
    output_compression: int = Field(100, ge=0, le=100, description="Quality of jpeg and webp.")
    response_format: Literal["b64_json", "url"] = Field("b64_json", description="Both are answered with b64_json.")
    stream: bool = Field(False, description="Answer with server-sent events.")
    partial_images: int = Field(0, ge=0, le=3, description="Pictures to show on the way; needs stream.")
    stream_progress: bool = Field(False, description="Events instgenie.queued and instgenie.step too; needs stream.")
    user: str | None = Field(None, max_length=1024, description="Accepted, not used.")
    moderation: Literal["auto", "low"] = Field("auto", description="Accepted, not used.")
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description="Same seed, same picture; drawn where left out.")
    num_inference_steps: Steps | None = Field(None, description="Denoising steps; the model's own where left out.")
    guidance_scale: Guidance | None = Field(None, description="How strongly the prompt is followed.")
    true_cfg_scale: Guidance = Field(1.0, description="Above 1: guidance away from the negative prompt.")
    negative_prompt: Prompt = Field("", description="What guidance leads away from.")
    strength: float = Field(1.0, gt=0, le=1, description="Below 1 keeps traces of what was there.")
    deadline_ms: int | None = Field(
        None, ge=1, le=MAX_DEADLINE_MS, description="The edit is given up, with status 408, if it takes longer."
    )


class EditFields(ImageFields):
    template: str | None = Field(None, max_length=128, description="Id of a template, in place of an image.")
    mask_mode: Literal["alpha", "luma"] = Field("alpha", description="alpha: 0 is edited; luma: white is edited.")
    feather: int = Field(0, ge=0, le=MAX_FEATHER, description="Width in pixels of a soft edge inside the mask.")
    input_fidelity: Literal["low", "high"] = Field(
        "high", description="Accepted, not used: what is outside the mask stays as it is."
    )


class GenerationFields(ImageFields):
    style: Literal["vivid", "natural"] = Field("natural", description="Accepted, not used.")


class TemplateFields(Fields):
    num_inference_steps: Steps | None = Field(None, description="Of the edits to come; the model's own if left out.")
    guidance_scale: Guidance | None = Field(None, description="Of the edits to come; the model's own if left out.")


FieldsT = TypeVar("FieldsT", bound=Fields)


def parse_fields(kind: type[FieldsT], form: Form) -> FieldsT:
    """Reads the form's scalars. Form parts are text; JSON values have to be of the right type."""
    for name, values in form.values.items():
        if name not in kind.model_fields:
            raise bad(name, f"Unknown field {echo(name)}{nearest(name, kind.model_fields)}", "unknown_parameter")
        if len(values) > 1:
            raise bad(name, f"The field {name!r} came {len(values)} times: once is expected.")
        if isinstance(values[0], bytes):
            raise bad(name, f"The field {name!r} came as a file: text is expected.")
    given = {name: values[0] for name, values in form.values.items()}
    try:
        return kind.model_validate(given, strict=form.is_json)
    except ValidationError as invalid:
        raise explain(invalid) from None


def explain(invalid: ValidationError) -> ApiError:
    """The first thing that is wrong, in one sentence."""
    [first, *_] = invalid.errors(include_url=False, include_context=True)
    name = str(first["loc"][0])
    if first["type"] == "missing":
        return bad(name, f"The field {name!r} is missing.", "missing_required_parameter")
    message = str(first["msg"])
    return bad(name, f"The field {name!r} is {describe(first['input'])}: {message[:1].lower()}{message[1:]}.")


def describe(value: Any) -> str:
    return f"text of {len(value):,} characters" if isinstance(value, str) and len(value) > 64 else echo(value)


def answer_size(size: str, max_pixels: int) -> tuple[int, int] | None:
    """(height, width), or None for auto."""
    if size == "auto":
        return None
    width, height = (int(side) for side in re.findall(r"\d+", size))
    if min(width, height) < MIN_SIDE or max(width, height) > MAX_ANSWER_SIDE or width * height > max_pixels:
        raise bad(
            "size",
            f"The size is {size}: sides from {MIN_SIDE} to {MAX_ANSWER_SIDE} "
            f"and at most {max_pixels:,} pixels in all are expected.",
        )
    return height, width
