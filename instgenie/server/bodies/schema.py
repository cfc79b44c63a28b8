"""What the OpenAPI document says about bodies and answers. Routes read their bodies themselves, with limits; this keeps
the document as true as if the framework did."""

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict

from instgenie.server.bodies.fields import EditFields, Fields, GenerationFields, TemplateFields


class ErrorFacts(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorFacts


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Seconds(Closed):
    queue: float
    prepare: float
    denoise: float
    finish: float


class PictureAnswer(Closed):
    b64_json: str
    seed: int
    masked_share: float
    num_tokens: int
    num_masked_tokens: int
    num_computed_tokens: int
    cache_tier: Literal["gpu", "host", "disk", "remote"] | None
    worker: int
    num_attempts: int
    seconds: Seconds
    predicted_dense_seconds: float  # of the denoising, had every token been computed


class TokenDetails(Closed):
    image_tokens: int
    text_tokens: int


class Usage(Closed):
    input_tokens: int
    input_tokens_details: TokenDetails
    output_tokens: int
    output_tokens_details: TokenDetails
    total_tokens: int


class ImagesAnswer(Closed):
    created: int
    data: list[PictureAnswer]
    size: str
    quality: Literal["low", "medium", "high"]
    background: Literal["opaque"]
    output_format: Literal["png", "jpeg", "webp"]
    usage: Usage


class ModelAnswer(Closed):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelsAnswer(Closed):
    object: Literal["list"]
    data: list[ModelAnswer]


class TemplateAnswer(Closed):
    id: str
    object: Literal["template"]
    state: Literal["queued", "registering", "ready", "failed"]
    num_steps: int
    num_registered_steps: int
    size: str
    tier_bytes: dict[str, int]
    message: str


class TemplatesAnswer(Closed):
    object: Literal["list"]
    data: list[TemplateAnswer]


class TemplateRemoved(Closed):
    id: str
    object: Literal["template"]
    deleted: bool


class State(Closed):
    status: Literal["ok", "loading", "draining", "broken"]


ERRORS = {
    400: "The request is not valid.",
    401: "The API key is missing or not known.",
    404: "There is no such thing.",
    408: "The body came too slowly, or the deadline has passed.",
    413: "The body is too large.",
    415: "The content type is not accepted.",
    429: "The queue is full; see Retry-After.",
    500: "The edit failed.",
    503: "Loading, shutting down or out of memory.",
}
HEADERS = {"x-request-id": {"description": "The request's own, or one that was drawn.", "schema": {"type": "string"}}}
RETRY_AFTER = {"retry-after": {"description": "Seconds, where trying again helps.", "schema": {"type": "string"}}}
UPLOAD_ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 503)
BINARY = {"type": "string", "format": "binary"}
SERVER_SENT_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
DATA_URL = {"type": "string", "pattern": "^data:image/[a-z0-9.+-]{1,32};base64,[A-Za-z0-9+/]+={0,2}$"}


def answers(answer: type[BaseModel], *errors: int, status: int = 200, streams: bool = False) -> dict[int, Any]:
    found: dict[int, Any] = {status: {"model": answer, "description": "Done."}}
    if streams:
        found[status]["content"] = {"text/event-stream": {"schema": SERVER_SENT_EVENT}}
    found |= {error: {"model": Error, "description": ERRORS[error]} for error in errors}
    for number, response in found.items():
        response["headers"] = HEADERS | (RETRY_AFTER if number in (429, 503) else {})
    return found


def body(fields: type[Fields], pictures: dict[str, bool], multipart: bool = True) -> dict[str, Any]:
    """Pictures: those the body may carry, by name, and whether JSON accepts a list of one."""
    content = {"application/json": {"schema": json_schema(fields, pictures)}}
    if multipart:
        content["multipart/form-data"] = {"schema": form_schema(fields, pictures)}
    return {"requestBody": {"required": True, "content": content}}


def json_schema(fields: type[Fields], pictures: dict[str, bool]) -> dict[str, Any]:
    """What is optional may be null."""
    schema = fields.model_json_schema()
    required = schema.get("required", [])
    for name, is_list in pictures.items():
        one_of = [DATA_URL, {"type": "array", "items": DATA_URL, "maxItems": 1}] if is_list else [DATA_URL]
        schema["properties"][name] = {"anyOf": one_of}
    schema["properties"] = {
        name: shape if name in required else nullable(shape) for name, shape in schema["properties"].items()
    }
    return schema


def nullable(shape: dict[str, Any]) -> dict[str, Any]:
    about = {name: shape[name] for name in ("title", "description", "default") if name in shape}
    kinds = shape["anyOf"] if "anyOf" in shape else [{k: v for k, v in shape.items() if k not in about}]
    return about | {"anyOf": [kind for kind in kinds if kind != {"type": "null"}] + [{"type": "null"}]}


def form_schema(fields: type[Fields], pictures: dict[str, bool]) -> dict[str, Any]:
    schema = fields.model_json_schema()
    for name, shape in schema["properties"].items():
        if "anyOf" in shape:  # a part is there or not: there is no null
            [kind] = [kind for kind in shape.pop("anyOf") if kind != {"type": "null"}]
            schema["properties"][name] = kind | {k: v for k, v in shape.items() if k != "default"}
    for name, is_list in pictures.items():
        schema["properties"][name] = BINARY
        if is_list:
            schema["properties"][f"{name}[]"] = {"type": "array", "items": BINARY, "maxItems": 1}
    return schema


EDIT: dict[str, Any] = {
    "responses": answers(ImagesAnswer, *UPLOAD_ERRORS, streams=True),
    "openapi_extra": body(EditFields, {"image": True, "mask": False}),
}
GENERATION: dict[str, Any] = {
    "responses": answers(ImagesAnswer, *UPLOAD_ERRORS, streams=True),
    "openapi_extra": body(GenerationFields, {}),
}
TEMPLATE: dict[str, Any] = {
    "responses": answers(TemplateAnswer, *UPLOAD_ERRORS, status=201),
    "openapi_extra": body(TemplateFields, {"image": True}),
}
MODELS: dict[str, Any] = {"responses": answers(ModelsAnswer, 401)}
MODEL: dict[str, Any] = {"responses": answers(ModelAnswer, 401, 404)}
TEMPLATES: dict[str, Any] = {"responses": answers(TemplatesAnswer, 401)}
ONE_TEMPLATE: dict[str, Any] = {"responses": answers(TemplateAnswer, 401, 404)}
REMOVED_TEMPLATE: dict[str, Any] = {"responses": answers(TemplateRemoved, 401, 404)}
HEALTH: dict[str, Any] = {
    "responses": {200: {"model": State, "description": "Yes."}, 503: {"model": State, "description": "No."}},
    "openapi_extra": {"security": []},
}
METRICS: dict[str, Any] = {
    "responses": {
        200: {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}},
        401: {"model": Error, "description": ERRORS[401]},
    }
}


def add_schema(app: FastAPI, needs_key: bool) -> None:
    """The document is made once. Bodies that fail validation are 400 here, so the framework's 422 goes."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for unused in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(unused, None)
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    app.openapi_schema = document
