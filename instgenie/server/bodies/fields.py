"""The fields a client may send, each declared once: the declaration yields validation, the error message and the
OpenAPI schema. Knows names, ranges and rules between fields; decodes no picture.

To add a field, add one line to the class of requests that take it, and hand its value on in `edit_settings`. Names and
values are OpenAI's; extensions are flat, because OpenAI's clients send them as additional form parts. Unknown names are
refused, so that a misspelt field is never silently ignored.
"""

import re
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from instgenie.cluster.wire import ModelFacts
from instgenie.cluster.wish import Wish
from instgenie.jobs.quality import Quality
from instgenie.jobs.strength import UNPROMPTED, open_strength
from instgenie.pictures.decode import MIN_SIDE
from instgenie.pictures.fitting import Fit
from instgenie.pictures.mask import MaskMode
from instgenie.pictures.photo import Metadata
from instgenie.pictures.picture import MAX_CROP_PADDING, MAX_FEATHER, MAX_GUIDANCE, MAX_PROMPT, MAX_SEED, MAX_STEPS
from instgenie.server.bodies.body import RequestForm
from instgenie.server.bodies.controls import ControlList
from instgenie.server.bodies.loras import LoraList, LoraName, LoraScale, asked_loras
from instgenie.server.bodies.names import hint
from instgenie.server.errors import ApiError, bad, echo
from instgenie.types import CropMode, MaskedContent, Notes, Reuse, Source

MAX_EDITS = 10
MAX_ANSWER_SIDE = 16_383  # of a WebP
MAX_DEADLINE_MS = 3_600_000
MAX_KEY = 255  # characters of an idempotency key
RANDOM_SEED = -1  # what other servers call a seed that is drawn
SIZE = r"^(auto|[1-9][0-9]{0,4}[xX×][1-9][0-9]{0,4})$"
TRUE_GUIDANCE = 2.0  # of a request that gives only a negative prompt, to models that need true guidance for it

QualityName = Literal[
    "auto", "low", "medium", "high", "xhigh", "max", "standard", "hd", "fast", "balanced", "adaptive", "exact"
]
QUALITIES: dict[QualityName, Quality] = {
    "auto": "balanced", "medium": "balanced", "standard": "balanced", "balanced": "balanced",
    "low": "fast", "fast": "fast", "adaptive": "adaptive",
    "high": "exact", "xhigh": "exact", "max": "exact", "hd": "exact", "exact": "exact",
}  # fmt: skip
OPENAI_QUALITIES: dict[Quality, str] = {"fast": "low", "balanced": "medium", "adaptive": "medium", "exact": "high"}

Prompt = Annotated[str, Field(max_length=MAX_PROMPT)]
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]
Guidance = Annotated[float, Field(ge=0, le=MAX_GUIDANCE)]


def lowered(given: Any) -> Any:
    return given.strip().lower() if isinstance(given, str) else given


def format_name(given: Any) -> Any:
    return "jpeg" if lowered(given) == "jpg" else lowered(given)


def plain_size(given: str) -> str:
    if not re.fullmatch(SIZE, lowered(given)):
        raise PydanticCustomError("size", "auto or WIDTHxHEIGHT, such as 1024x768, is expected")
    return str(lowered(given)).replace("×", "x")


AnyCase = BeforeValidator(lowered)


@dataclass(frozen=True)
class PictureField:
    """A field that carries an encoded picture: a file in a form, a data: URL in JSON."""

    name: str
    may_be_list: bool = False  # a list of pictures is accepted too: `name[]` in a form
    other_names: tuple[str, ...] = ()


IMAGE = PictureField("image", may_be_list=True, other_names=("images", "image_url", "url"))
MASK = PictureField("mask")


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    pictures: ClassVar[tuple[PictureField, ...]] = ()

    def settled(self) -> Self:
        """Return the fields after all values that are said in several ways are said in one."""
        return self


class ImageFields(Fields):
    prompt: Prompt = Field(description="What the masked part should show.")
    model: str | None = Field(
        None, max_length=256, description="The one model there is makes the picture, unless the server is strict."
    )
    n: int = Field(1, ge=1, le=MAX_EDITS, description="Number of pictures to make, with seeds seed, seed + 1, ...")
    size: Annotated[str, AfterValidator(plain_size)] = Field(
        "auto", json_schema_extra={"pattern": SIZE},
        description="WIDTHxHEIGHT of the result. Edits: auto keeps the picture's size; to any other size the picture "
        "is scaled and fitted, see fit. Generations: auto is the model's native size.",
    )  # fmt: skip
    width: int | None = Field(None, ge=1, le=99_999, description="With height: another way to give the size.")
    height: int | None = Field(None, ge=1, le=99_999, description="With width: another way to give the size.")
    quality: Annotated[QualityName, AnyCase] = Field(
        "auto",
        description="fast, balanced or exact, or OpenAI's names for them; adaptive is balanced, but an edit without a "
        "template finds its dense steps as it goes.",
    )
    background: Annotated[Literal["auto", "opaque", "transparent"], AnyCase] = Field(
        "auto", description="Accepted, but not used: what is painted is opaque."
    )
    output_format: Annotated[Literal["png", "jpeg", "webp"], BeforeValidator(format_name)] = Field(
        "png", description="png, and webp at 100, are lossless; jpg is jpeg."
    )
    output_compression: int = Field(100, ge=0, le=100, description="Quality of jpeg and webp.")
    response_format: Annotated[Literal["b64_json", "url"], AnyCase] = Field(
        "b64_json", description="url returns a data: URL. Streams always carry b64_json."
    )
    stream: bool = Field(False, description="Respond with server-sent events.")
    partial_images: int = Field(0, ge=0, le=3, description="Number of intermediate pictures to send; needs stream.")
    stream_progress: bool = Field(
        False, description="Also send instgenie.queued, instgenie.step and instgenie.sending; needs stream."
    )
    user: str | None = Field(None, max_length=1024, description="Accepted, but not used.")
    moderation: Annotated[Literal["auto", "low"], AnyCase] = Field("auto", description="Accepted, but not used.")
    safety_identifier: str | None = Field(None, max_length=1024, description="Accepted, but not used.")
    complexity: Any = Field(None, description="Accepted, but not used.")
    markup: Any = Field(None, description="Accepted, but not used.")
    seed: int | None = Field(
        None, ge=RANDOM_SEED, le=MAX_SEED, description="Same seed, same picture; random if omitted or -1."
    )
    num_inference_steps: Steps | None = Field(None, description="Denoising steps; the model's default if omitted.")
    guidance_scale: Guidance | None = Field(None, description="How closely to follow the prompt.")
    true_cfg_scale: Guidance | None = Field(
        None,
        description="Above 1: guidance away from the negative prompt. If omitted it is 1, or "
        f"{TRUE_GUIDANCE:g} if there is a negative prompt that the model would ignore.",
    )
    negative_prompt: Prompt = Field("", description="What the result should not show.")
    strength: float | None = Field(
        None, gt=0, le=1,
        description="Below 1, the masked part keeps some of its former content. If omitted it is 1, or the model's "
        "own in an edit without a mask or from surroundings.",
    )  # fmt: skip
    store: bool = Field(True, description="False: the picture is not kept to speed up later edits of it.")
    deadline_ms: int | None = Field(
        None, ge=1, le=MAX_DEADLINE_MS,
        description="Milliseconds, from the first byte of the request, within which the edit should be done. "
        "Edits are scheduled by it; on_late says what becomes of one that misses it.",
    )  # fmt: skip
    priority: int = Field(0, ge=-1000, le=1000, description="Among the edits of one API key, lower goes first.")
    on_late: Annotated[Literal["run", "reject", "degrade"], AnyCase] = Field(
        "run",
        description="What becomes of an edit that misses its deadline. run: it is finished all the same; reject: if "
        "that is predicted it is refused at once, before any work, and otherwise given up at its deadline, both with "
        "status 408; degrade: if that is predicted it is made with a lower quality, then with fewer steps.",
    )
    loras: LoraList = Field(
        [], description="LoRAs to paint with, added one to the other. In a form: JSON, or NAME:SCALE,NAME:SCALE."
    )
    controls: ControlList = Field(
        [], description="ControlNets that guide the edit, each with a name, an image (a data: URL, or canny for the "
        "picture's edges), a scale, and the shares of the steps at which it starts and ends. In a form: JSON.",
    )  # fmt: skip
    lora: LoraName | None = Field(None, description="One LoRA, instead of a list of them.")
    lora_scale: LoraScale | None = Field(None, description="Scale of lora; 1 if omitted.")
    idempotency_key: str | None = Field(
        None, min_length=1, max_length=MAX_KEY,
        description="Requests with the same key run once; also the header Idempotency-Key. The edit then runs to its "
        "end, even if the client leaves.",
    )  # fmt: skip

    def settled(self) -> Self:
        seed = None if self.seed == RANDOM_SEED else self.seed
        loras = {"loras": asked_loras(self.loras, self.lora, self.lora_scale), "lora": None, "lora_scale": None}
        return self.model_copy(update={"seed": seed, "size": self._asked_size(), **loras})

    def _asked_size(self) -> str:
        if self.width is None and self.height is None:
            return self.size
        if self.width is None or self.height is None:
            one, other = ("height", "width") if self.width is None else ("width", "height")
            raise bad(one, f"The request has a {one}, but no {other}: both or neither are expected.")
        asked = f"{self.width}x{self.height}"
        if self.size not in ("auto", asked):
            raise bad("size", f"The size is {self.size}, but width and height are {asked}: one of them is expected.")
        return asked

    @property
    def lora_names(self) -> list[str]:
        return [lora["name"] for lora in self.loras]

    def check_together(self) -> None:
        """Check the rules between fields."""
        if self.partial_images and not self.stream:
            raise bad("partial_images", "Partial images need 'stream' to be true.")
        if self.stream_progress and not self.stream:
            raise bad("stream_progress", "Progress events need 'stream' to be true.")
        if self.seed is not None and self.seed + self.n - 1 > MAX_SEED:
            raise bad("seed", f"The seed is {self.seed}: seed + n - 1 may be at most {MAX_SEED}.")

    def guided(self, model: ModelFacts, notes: Notes) -> Self:
        """Return the fields with a guidance that makes use of the negative prompt, unless the client wants none."""
        if not self.negative_prompt:
            return self
        if model.needs_true_guidance and self.true_cfg_scale is None:
            notes.append(f"The negative prompt works through a true_cfg_scale of {TRUE_GUIDANCE:g}: none was given.")
            return self.model_copy(update={"true_cfg_scale": TRUE_GUIDANCE})
        guidance = model.guidance if self.guidance_scale is None else self.guidance_scale
        scales = [self.true_cfg_scale or 0.0] + ([] if model.needs_true_guidance else [guidance])
        if max(scales) <= 1:
            name = "true_cfg_scale" if model.needs_true_guidance else "guidance_scale"
            notes.append(f"The negative prompt has no effect: it needs a {name} above 1.")
        return self

    def seeded(self, seed: int) -> Self:
        """Return the fields with a seed, if the client leaves it open."""
        return self if self.seed is not None else self.model_copy(update={"seed": seed})

    def describe(self, notes: Notes) -> None:
        """Add a note on each value that has not the effect its name promises."""
        if self.background == "transparent":
            notes.append("What is painted is opaque: this model paints no transparent background.")

    def edit_settings(self, seed: int) -> Wish:
        """Return the values that travel to the worker with the edit."""
        return Wish(
            prompt=self.prompt,
            seed=seed,
            negative_prompt=self.negative_prompt,
            steps=self.num_inference_steps,
            guidance=self.guidance_scale,
            true_guidance=1.0 if self.true_cfg_scale is None else self.true_cfg_scale,
            strength=1.0 if self.strength is None else self.strength,
            quality=QUALITIES[self.quality],
        )


class EditFields(ImageFields):
    pictures: ClassVar[tuple[PictureField, ...]] = (IMAGE, MASK)
    reads_alpha: ClassVar[bool] = True  # transparent pixels of the picture are the mask if there is no other

    template: str | None = Field(None, max_length=128, description="Id of a template to edit instead of an image.")
    mask_mode: Annotated[MaskMode, AnyCase] = Field(
        "auto",
        description="alpha: transparent pixels are edited (alpha below 128); luma: white pixels are edited; "
        "auto: alpha, or luma if the mask is opaque and black and white.",
    )
    reuse: Reuse = Field(
        "auto",
        description="Activations that the edit reads: auto those of the registered picture or, without any, those that "
        "its own dense steps leave behind; own always the latter; template registers the picture first if need be, and "
        "fails if that is impossible; off computes every token.",
    )
    masked_content: Annotated[MaskedContent, AnyCase] = Field(
        "original", description="What the masked part starts from, under noise: original, or surroundings to remove it."
    )
    fit: Fit = Field(
        "contain",
        description="How a picture of another shape fits 'size'. contain: all of it, with painted borders; "
        "cover: its middle, cropped.",
    )
    metadata: Metadata = Field("safe", description="EXIF of the result: safe = all but the place (GPS); all; none.")
    feather: int = Field(0, ge=0, le=MAX_FEATHER, description="Width in pixels of a soft edge inside the mask.")
    crop: Annotated[CropMode, AnyCase] = Field(
        "auto",
        description="The part of a photograph that the model sees. auto: a crop around the mask if that gives the "
        "masked part more detail, unless the picture's template is registered; masked: a crop; off: all of it.",
    )
    crop_padding: int | None = Field(
        None, ge=0, le=MAX_CROP_PADDING,
        description="Pixels of the picture that a crop shows around the mask at least; if omitted, a quarter of the "
        "mask's size.",
    )  # fmt: skip
    input_fidelity: Annotated[Literal["low", "high"], AnyCase] = Field(
        "high", description="Accepted, but not used: pixels outside the mask never change."
    )

    def why_no_crop(self, has_template: bool) -> str:
        """Why a crop that would be worth it is not edited, as a clause; empty if it is. A template of the whole picture
        stays in use unless the client asks for a crop."""
        if self.crop == "masked":
            return ""
        if self.template is not None:
            return "the request names a template"
        if self.reuse == "template":
            return "the request asks for reuse=template"
        return "the picture is registered as a template" if has_template and self.reuse in ("auto", "template") else ""

    def describe_answer(self, source: Source | None, notes: Notes) -> None:
        """Add a note on what the format of the answer cannot keep of the picture's file."""
        if source and source.has_alpha and self.output_format == "jpeg":
            notes.append("A JPEG has no transparency: transparent parts of the picture are white.")

    def edit_settings(self, seed: int) -> Wish:
        wish = super().edit_settings(seed)
        return replace(wish, masked_content=self.masked_content, feather=self.feather, reuse=self.reuse)

    def for_whole_picture(self, model: ModelFacts, notes: Notes) -> Self:
        """Return the fields of an edit without a mask: unless a strength is given, its result shows the picture."""
        if self.strength is not None:
            return self
        if model.sees_picture:
            notes.append("There is no mask, so the whole picture was edited: a mask keeps what is outside.")
            return self
        fields = self.with_strength(model, 1 if self.prompt.strip() else UNPROMPTED)
        about = f"There is no mask, so the whole picture was edited with a strength of {fields.strength:g}: "
        notes.append(f"{about}a higher 'strength' changes more of it, and a mask keeps what is outside.")
        return fields

    def with_strength(self, model: ModelFacts, share: float) -> Self:
        """Return the fields with a share of the model's own strength, unless a strength is given."""
        if self.strength is not None:
            return self
        strength, steps = open_strength(share * model.whole_strength, self.num_inference_steps or model.steps)
        return self.model_copy(update={"strength": strength, "num_inference_steps": steps})


class VariationFields(EditFields):
    pictures = (IMAGE,)
    reads_alpha = False

    prompt: Prompt = Field("", description="What the variations should show; may be omitted.")


class GenerationFields(ImageFields):
    style: Annotated[Literal["vivid", "natural"], AnyCase] = Field("natural", description="Accepted, but not used.")

    def edit_settings(self, seed: int) -> Wish:
        return replace(super().edit_settings(seed), from_nothing=True)


class LoraFields(Fields):
    name: str | None = Field(None, max_length=128, description="The name that edits use.")
    path: str | None = Field(None, max_length=1024, description="A file or a folder of the server's folder of LoRAs.")
    lora_name: str | None = Field(None, max_length=128, description="Another way to say name.")
    lora_path: str | None = Field(None, max_length=1024, description="Another way to say path.")


class TemplateFields(Fields):
    pictures = (IMAGE,)

    num_inference_steps: Steps | None = Field(
        None, description="Number of steps of the edits to come; the model's default if omitted."
    )
    guidance_scale: Guidance | None = Field(
        None, description="Guidance of the edits to come; the model's default if omitted."
    )


FieldsT = TypeVar("FieldsT", bound=Fields)


def parse_fields(kind: type[FieldsT], form: RequestForm) -> FieldsT:
    """Validate the form's scalar fields. Form parts are converted from text; JSON values need the right type."""
    known = [*kind.model_fields, *(picture.name for picture in kind.pictures)]
    for name, values in form.values.items():
        if name not in kind.model_fields:
            raise bad(name, f"Unknown field {echo(name)}{hint(name, known)}", "unknown_parameter")
        if len(values) > 1:
            raise bad(name, f"The field {name!r} was sent {len(values)} times: once is expected.")
        if isinstance(values[0], bytes):
            raise bad(name, f"The field {name!r} was sent as a file: text is expected.")
    given = {name: values[0] for name, values in form.values.items()}
    try:
        fields = kind.model_validate(given, strict=form.is_json)
    except ValidationError as invalid:
        raise explain(invalid) from None
    return fields.settled()


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
