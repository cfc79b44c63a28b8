"""The fields a client may send, each declared once: the declaration yields validation, the error message and the
OpenAPI schema. Knows names, ranges and rules between fields; decodes no picture.

To add a field, add one line to the class of requests that take it, and hand its value on in `edit_settings`. Names and
values are OpenAI's; extensions are flat, because OpenAI's clients send them as additional form parts. Unknown names are
refused, so that a misspelt field is never silently ignored.
"""

import re
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from instgenie.cluster.wish import Wish
from instgenie.jobs.quality import Quality
from instgenie.pictures.decode import MIN_SIDE
from instgenie.pictures.fitting import Fit
from instgenie.pictures.mask import MaskMode
from instgenie.pictures.photo import Metadata
from instgenie.pictures.picture import MAX_FEATHER, MAX_GUIDANCE, MAX_PROMPT, MAX_SEED, MAX_STEPS
from instgenie.server.bodies.body import RequestForm
from instgenie.server.errors import ApiError, bad, echo
from instgenie.server.options import nearest
from instgenie.types import Notes, Reuse, Source

MAX_EDITS = 10
MAX_ANSWER_SIDE = 16_383  # of a WebP
MAX_DEADLINE_MS = 3_600_000

QualityName = Literal["auto", "low", "medium", "high", "xhigh", "max", "standard", "hd", "fast", "balanced", "exact"]
QUALITIES: dict[QualityName, Quality] = {
    "auto": "balanced", "medium": "balanced", "standard": "balanced", "balanced": "balanced",
    "low": "fast", "fast": "fast",
    "high": "exact", "xhigh": "exact", "max": "exact", "hd": "exact", "exact": "exact",
}  # fmt: skip
OPENAI_QUALITIES = {"fast": "low", "balanced": "medium", "exact": "high"}

Prompt = Annotated[str, Field(max_length=MAX_PROMPT)]
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]
Guidance = Annotated[float, Field(ge=0, le=MAX_GUIDANCE)]


@dataclass(frozen=True)
class PictureField:
    """A field that carries an encoded picture: a file in a form, a data: URL in JSON."""

    name: str
    may_be_list: bool = False  # a list of one picture is accepted too: `name[]` in a form


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    pictures: ClassVar[tuple[PictureField, ...]] = ()


class ImageFields(Fields):
    prompt: Prompt = Field(description="What the masked part should show.")
    model: str | None = Field(None, max_length=256, description="A name this server serves; may be omitted.")
    n: int = Field(1, ge=1, le=MAX_EDITS, description="Number of pictures to make, with seeds seed, seed + 1, ...")
    size: str = Field(
        "auto", pattern=r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$",
        description="WIDTHxHEIGHT of the result. Edits: auto keeps the picture's size; to any other size the picture "
        "is scaled and fitted, see fit. Generations: auto is the model's native size.",
    )  # fmt: skip
    quality: QualityName = Field("auto", description="fast, balanced or exact, or OpenAI's names for them.")
    background: Literal["auto", "opaque", "transparent"] = Field("auto", description="Results are always opaque.")
    output_format: Literal["png", "jpeg", "webp"] = Field("png", description="png, and webp at 100, are lossless.")
    output_compression: int = Field(100, ge=0, le=100, description="Quality of jpeg and webp.")
    response_format: Literal["b64_json", "url"] = Field("b64_json", description="Both return b64_json.")
    stream: bool = Field(False, description="Respond with server-sent events.")
    partial_images: int = Field(0, ge=0, le=3, description="Number of intermediate pictures to send; needs stream.")
    stream_progress: bool = Field(False, description="Also send instgenie.queued and instgenie.step; needs stream.")
    user: str | None = Field(None, max_length=1024, description="Accepted, but not used.")
    moderation: Literal["auto", "low"] = Field("auto", description="Accepted, but not used.")
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description="Same seed, same picture; random if omitted.")
    num_inference_steps: Steps | None = Field(None, description="Denoising steps; the model's default if omitted.")
    guidance_scale: Guidance | None = Field(None, description="How closely to follow the prompt.")
    true_cfg_scale: Guidance = Field(1.0, description="Above 1: guidance away from the negative prompt.")
    negative_prompt: Prompt = Field("", description="What the result should not show.")
    strength: float = Field(1.0, gt=0, le=1, description="Below 1, the masked part keeps some of its former content.")
    store: bool = Field(True, description="False: the picture is not kept to speed up later edits of it.")
    deadline_ms: int | None = Field(
        None, ge=1, le=MAX_DEADLINE_MS, description="An edit that takes longer is cancelled, with status 408."
    )

    def check_together(self, embeds_guidance: bool) -> None:
        """Check the rules between fields. `embeds_guidance` is true of models that take guidance as an input."""
        if self.partial_images and not self.stream:
            raise bad("partial_images", "Partial images need 'stream' to be true.")
        if self.stream_progress and not self.stream:
            raise bad("stream_progress", "Progress events need 'stream' to be true.")
        if self.seed is not None and self.seed + self.n - 1 > MAX_SEED:
            raise bad("seed", f"The seed is {self.seed}: seed + n - 1 may be at most {MAX_SEED}.")
        if self.negative_prompt and self.true_cfg_scale <= 1 and embeds_guidance:
            raise bad("negative_prompt", "With this model a negative prompt needs a 'true_cfg_scale' above 1.")

    def describe(self, notes: Notes) -> None:
        """Add a note on each value that has not the effect its name promises."""
        if self.background == "transparent":
            notes.append("The background is opaque: this server makes no transparent pictures.")

    def edit_settings(self, seed: int) -> Wish:
        """Return the values that travel to the worker with the edit."""
        return Wish(
            prompt=self.prompt,
            seed=seed,
            negative_prompt=self.negative_prompt,
            steps=self.num_inference_steps,
            guidance=self.guidance_scale,
            true_guidance=self.true_cfg_scale,
            strength=self.strength,
            quality=QUALITIES[self.quality],
        )


class EditFields(ImageFields):
    pictures = (PictureField("image", may_be_list=True), PictureField("mask"))

    template: str | None = Field(None, max_length=128, description="Id of a template to edit instead of an image.")
    mask_mode: MaskMode = Field(
        "auto",
        description="alpha: transparent pixels are edited (alpha below 128); luma: white pixels are edited; "
        "auto: alpha, or luma if the mask is opaque and black and white.",
    )
    reuse: Reuse = Field(
        "auto",
        description="Activations of the picture: auto uses them if they are there; off computes every token; template "
        "registers them first if need be, and fails if that is impossible.",
    )
    fit: Fit = Field(
        "contain",
        description="How a picture of another shape fits 'size'. contain: all of it, with painted borders; "
        "cover: its middle, cropped.",
    )
    metadata: Metadata = Field("safe", description="EXIF of the result: safe = all but the place (GPS); all; none.")
    feather: int = Field(0, ge=0, le=MAX_FEATHER, description="Width in pixels of a soft edge inside the mask.")
    input_fidelity: Literal["low", "high"] = Field(
        "high", description="Accepted, but not used: pixels outside the mask never change."
    )

    def describe_answer(self, source: Source | None, notes: Notes) -> None:
        """Add a note on what the format of the answer cannot keep of the picture's file."""
        if source and source.has_alpha and self.output_format == "jpeg":
            notes.append("A JPEG has no transparency: transparent parts of the picture are white.")

    def edit_settings(self, seed: int) -> Wish:
        return replace(super().edit_settings(seed), feather=self.feather, reuse=self.reuse)


class GenerationFields(ImageFields):
    style: Literal["vivid", "natural"] = Field("natural", description="Accepted, but not used.")


class TemplateFields(Fields):
    pictures = (PictureField("image", may_be_list=True),)

    num_inference_steps: Steps | None = Field(
        None, description="Number of steps of the edits to come; the model's default if omitted."
    )
    guidance_scale: Guidance | None = Field(
        None, description="Guidance of the edits to come; the model's default if omitted."
    )


FieldsT = TypeVar("FieldsT", bound=Fields)


def parse_fields(kind: type[FieldsT], form: RequestForm) -> FieldsT:
    """Validate the form's scalar fields. Form parts are converted from text; JSON values need the right type."""
    for name, values in form.values.items():
        if name not in kind.model_fields:
            raise bad(name, f"Unknown field {echo(name)}{nearest(name, kind.model_fields)}", "unknown_parameter")
        if len(values) > 1:
            raise bad(name, f"The field {name!r} was sent {len(values)} times: once is expected.")
        if isinstance(values[0], bytes):
            raise bad(name, f"The field {name!r} was sent as a file: text is expected.")
    given = {name: values[0] for name, values in form.values.items()}
    try:
        return kind.model_validate(given, strict=form.is_json)
    except ValidationError as invalid:
        raise explain(invalid) from None


def explain(invalid: ValidationError) -> ApiError:
    """Describe the first error in one sentence."""
    [first, *_] = invalid.errors(include_url=False, include_context=True)
    name = str(first["loc"][0])
    if first["type"] == "missing":
        return bad(name, f"The field {name!r} is missing.", "missing_required_parameter")
    message = str(first["msg"])
    return bad(name, f"The field {name!r} is {shorten(first['input'])}: {message[:1].lower()}{message[1:]}.")


def shorten(value: Any) -> str:
    return f"text of {len(value):,} characters" if isinstance(value, str) and len(value) > 64 else echo(value)


def answer_size(size: str, max_pixels: int) -> tuple[int, int] | None:
    """Return (height, width), or None for auto."""
    if size == "auto":
        return None
    width, height = (int(side) for side in re.findall(r"\d+", size))
    if min(width, height) < MIN_SIDE or max(width, height) > MAX_ANSWER_SIDE or width * height > max_pixels:
        raise bad(
            "size",
            f"The size is {size}: sides from {MIN_SIDE} to {MAX_ANSWER_SIDE} "
            f"and at most {max_pixels:,} pixels in total (the server's option --max-megapixels) are expected.",
        )
    return height, width
