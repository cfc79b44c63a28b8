"""Answer bodies, each declared once as a model that both builds the answer and describes it in OpenAPI. Knows the
shapes OpenAI's clients expect; does not talk to the cluster."""

import binascii
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from instgenie.cluster.orders import Facts, Finished
from instgenie.server.bodies.controls import control_notes
from instgenie.server.bodies.fields import OPENAI_QUALITIES, QUALITIES, ImageFields
from instgenie.server.bodies.guidance import guidance_notes
from instgenie.server.bodies.loras import lora_notes
from instgenie.server.errors import ApiError
from instgenie.types import Box, Notes, ReuseFound, TierName

PIECE = 3 * 2**18  # bytes that are encoded at once; a multiple of 3, so that only the last piece is padded
EventPrefix = Literal["image_edit", "image_generation"]


class AnswerBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Seconds(AnswerBody):
    queue: float
    prepare: float
    denoise: float
    finish: float


class LoraSummary(AnswerBody):
    """How the LoRAs of an edit were applied."""

    from_step: int  # counted from 0
    tier: str  # where the slowest of them was found
    waited_seconds: float


class CropBox(AnswerBody):
    """The part of the picture that was edited, in its pixels."""

    x: int
    y: int
    width: int
    height: int


class EditSummary(AnswerBody):
    """Facts about one edit, without its picture."""

    seed: int
    masked_share: float
    num_tokens: int
    num_masked_tokens: int
    num_computed_tokens: int
    cache_tier: TierName | None
    reuse: ReuseFound
    reuse_reason: str | None  # why no template was used
    crop: CropBox | None  # None: the model saw the whole picture
    worker: int
    num_attempts: int
    seconds: Seconds
    predicted_dense_seconds: float  # predicted denoising time if every token were computed
    predicted_ms: int  # from acceptance to the picture, as predicted when the edit was accepted
    in_time: bool | None  # whether the edit met its deadline; None: it had none
    num_preemptions: int  # times that the edit left a batch for another
    loras: LoraSummary | None  # None: the edit has none


class PictureAnswer(EditSummary):
    """One picture, in the field that `response_format` names; the other field is left out."""

    index: int
    b64_json: str | None = None
    url: str | None = None  # a data: URL


class TokenDetails(AnswerBody):
    image_tokens: int
    text_tokens: int


class TokenUsage(AnswerBody):
    input_tokens: int
    input_tokens_details: TokenDetails
    output_tokens: int
    output_tokens_details: TokenDetails
    total_tokens: int


class ErrorFacts(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorFacts


class IndexedError(Error):
    index: int


class ImagesAnswer(AnswerBody):
    created: int
    data: list[PictureAnswer]  # those that were made
    errors: list[IndexedError]  # one for each picture that was not; if none was made, the answer is an error
    size: str
    quality: Literal["low", "medium", "high"]
    background: Literal["opaque"]
    output_format: Literal["png", "jpeg", "webp"]
    usage: TokenUsage
    notes: list[str]  # plain sentences: how the request was read, where that may surprise


class TemplateAnswer(AnswerBody):
    id: str
    object: Literal["template"]
    state: Literal["queued", "registering", "ready", "failed"]
    num_steps: int
    num_registered_steps: int
    size: str
    tier_bytes: dict[str, int]
    message: str
    notes: list[str]  # plain sentences on how the picture was read; only in the answer to its registration


class TemplatesAnswer(AnswerBody):
    object: Literal["list"]
    data: list[TemplateAnswer]


class TemplateRemoved(AnswerBody):
    id: str
    object: Literal["template"]
    deleted: bool


class TemplateLeaving(AnswerBody):
    """A template that is not used any more, but not yet deleted from every tier."""

    id: str
    object: Literal["template"]
    deleted: Literal[False]
    message: str


class EditPending(AnswerBody):
    """An edit that is not done yet."""

    id: str
    object: Literal["edit"]
    state: Literal["running"]
    message: str


class HealthState(AnswerBody):
    status: Literal["ok", "loading", "draining", "broken"]
    message: str | None = None  # what is broken


def images_answer(
    results: Mapping[int, Finished], errors: Mapping[int, ApiError], fields: ImageFields, notes: Notes
) -> bytes:
    """Encode the answer from the results and errors by index; there is at least one result."""
    facts = [one.facts for one in results.values()]
    slots = PictureSlots()
    answer = ImagesAnswer(
        created=int(time.time()),
        data=[picture_answer(index, results[index], fields, slots) for index in sorted(results)],
        errors=[IndexedError(index=index, **errors[index].body) for index in sorted(errors)],
        **picture_format(size_of(facts[0]), fields),
        usage=token_usage(facts, fields.prompt),
        notes=[*notes, *adapter_notes(facts, fields)],
    )
    return slots.fill(json.dumps(answer.model_dump(exclude_unset=True)))


def adapter_notes(facts: Sequence[Facts], fields: ImageFields) -> Notes:
    """What LoRAs, ControlNets and companions of workers did."""
    loras, controls = lora_notes(facts, fields.lora_names), control_notes(facts, fields.controls)
    return [*loras, *controls, *guidance_notes(facts)]


def picture_answer(index: int, result: Finished, fields: ImageFields, slots: "PictureSlots") -> PictureAnswer:
    text = slots.slot(result.picture)
    picture: dict[str, Any] = {"b64_json": text}
    if fields.response_format == "url":
        picture = {"url": f"data:image/{fields.output_format};base64,{text}"}
    return PictureAnswer(index=index, **picture, **edit_summary(result.facts))


def picture_format(size: str, fields: ImageFields) -> dict[str, Any]:
    return {
        "size": size,
        "quality": OPENAI_QUALITIES[QUALITIES[fields.quality]],
        "background": "opaque",
        "output_format": fields.output_format,
    }


def size_of(facts: Facts) -> str:
    return f"{facts.width}x{facts.height}"


def edit_summary(facts: Facts) -> dict[str, Any]:
    return EditSummary(
        seed=facts.seed,
        masked_share=round(facts.num_masked_tokens / facts.num_tokens, 4),
        num_tokens=facts.num_tokens,
        num_masked_tokens=facts.num_masked_tokens,
        num_computed_tokens=facts.num_computed_tokens,
        cache_tier=facts.cache_tier,
        reuse=facts.reuse,
        reuse_reason=reuse_reason(facts),
        crop=crop_box(facts.crop) if facts.crop else None,
        worker=facts.worker,
        num_attempts=facts.num_attempts,
        seconds=Seconds(
            queue=round(facts.queue_seconds, 4),
            prepare=round(facts.prepare_seconds, 4),
            denoise=round(facts.denoise_seconds, 4),
            finish=round(facts.finish_seconds, 4),
        ),
        predicted_dense_seconds=round(facts.dense_seconds, 4),
        predicted_ms=round(1000 * facts.predicted_seconds),
        in_time=facts.in_time,
        num_preemptions=facts.num_preemptions,
        loras=lora_summary(facts),
    ).model_dump()


def lora_summary(facts: Facts) -> LoraSummary | None:
    if facts.loras is None:
        return None
    waited = round(facts.loras.waited_seconds, 4)
    return LoraSummary(from_step=facts.loras.step, tier=facts.loras.tier, waited_seconds=waited)


def reuse_reason(facts: Facts) -> str | None:
    """One sentence: why no template was used, and what was done instead."""
    if not facts.why_dense:
        return None
    done = ", so the edit read what its own dense steps left behind" if facts.reuse == "own" else ""
    return sentence(facts.why_dense + done)


def crop_box(box: Box) -> CropBox:
    height, width = box.size
    return CropBox(x=box.cols.start, y=box.rows.start, width=width, height=height)


def sentence(clause: str) -> str:
    return f"{clause[:1].upper()}{clause[1:]}."


def token_usage(facts: Sequence[Facts], prompt: str) -> TokenUsage:
    """Count the picture's tokens and the prompt's words as input, the masked tokens of all results as output."""
    num_image, num_text = facts[0].num_tokens, len(prompt.split())
    num_out = sum(one.num_masked_tokens for one in facts)
    return TokenUsage(
        input_tokens=num_image + num_text,
        input_tokens_details=TokenDetails(image_tokens=num_image, text_tokens=num_text),
        output_tokens=num_out,
        output_tokens_details=TokenDetails(image_tokens=num_out, text_tokens=0),
        total_tokens=num_image + num_text + num_out,
    )


def partial_event(
    prefix: EventPrefix, index: int, partial_index: int, picture: bytes, size: str, fields: ImageFields
) -> bytes:
    pictures = PictureSlots()
    return pictures.event(
        f"{prefix}.partial_image",
        {
            "b64_json": pictures.slot(picture),
            "partial_image_index": partial_index,
            "created_at": int(time.time()),
            **picture_format(size, fields),
            "index": index,
        },
    )


def completed_event(prefix: EventPrefix, index: int, finished: Finished, fields: ImageFields, notes: Notes) -> bytes:
    pictures = PictureSlots()
    return pictures.event(
        f"{prefix}.completed",
        {
            "b64_json": pictures.slot(finished.picture),
            "created_at": int(time.time()),
            "index": index,
            **picture_format(size_of(finished.facts), fields),
            **edit_summary(finished.facts),
            "usage": token_usage([finished.facts], fields.prompt).model_dump(),
            "notes": [*notes, *adapter_notes([finished.facts], fields)],
        },
    )


def sending_event(index: int, num_bytes: int) -> bytes:
    """Announce the bytes of a picture's event, so that a client with a slow link can say how much of it has come."""
    return event("instgenie.sending", {"index": index, "num_bytes": num_bytes})


def event(kind: str, body: dict[str, Any]) -> bytes:
    return event_text(kind, body).encode()


def event_text(kind: str, body: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind} | body)}\n\n"


def error_event(index: int, error: ApiError) -> bytes:
    return f"data: {json.dumps(error.body | {'index': index})}\n\n".encode()


class PictureSlots:
    """Places for pictures in JSON, which are filled after it is written. Writing a picture of many megabytes as part of
    a string would hold up all other threads, and so would encoding it in one piece."""

    def __init__(self) -> None:
        self._pictures: list[bytes] = []
        self._mark = secrets.token_hex(16)

    def slot(self, picture: bytes) -> str:
        """Return what stands for a picture until the slots are filled, in the order in which they were made."""
        self._pictures.append(picture)
        return self._mark

    def fill(self, text: str) -> bytes:
        first, *rest = text.encode().split(self._mark.encode())
        parts = [first]
        for picture, after in zip(self._pictures, rest, strict=True):
            parts += [*encoded(picture), after]
        return b"".join(parts)

    def event(self, kind: str, body: dict[str, Any]) -> bytes:
        return self.fill(event_text(kind, body))


def encoded(picture: bytes) -> list[bytes]:
    """Encode a picture as base64, in pieces."""
    view = memoryview(picture)
    pieces = range(0, len(view), PIECE)
    return [binascii.b2a_base64(view[start : start + PIECE], newline=False) for start in pieces]
