"""The OpenAPI document: what it says about request and answer bodies, made from their declarations in `fields` and
`answers`. Routes read their bodies themselves, with limits, so the framework cannot derive this part."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from instgenie.server.bodies.answers import (
    EditPending,
    Error,
    HealthState,
    ImagesAnswer,
    TemplateAnswer,
    TemplateLeaving,
    TemplateRemoved,
    TemplatesAnswer,
)
from instgenie.server.bodies.fields import (
    EditFields,
    Fields,
    GenerationFields,
    LoraFields,
    TemplateFields,
    VariationFields,
)
from instgenie.server.bodies.forms import DATA_URL_PREFIX
from instgenie.server.bodies.models import (
    ControlNetsAnswer,
    LoraAnswer,
    LoraRemoved,
    LorasAnswer,
    ModelAnswer,
    ModelsAnswer,
)
from instgenie.server.bodies.status import StatusAnswer

ERRORS = {
    400: "The request is not valid.",
    401: "The API key is missing or unknown.",
    403: "The host is not a name of this server, or the web page may not call it.",
    404: "The named model, LoRA, template or edit does not exist.",
    408: "The body arrived too slowly, or the deadline has passed.",
    413: "The body is too large.",
    415: "The content type is not accepted.",
    422: "The idempotency key belongs to another request.",
    429: "The queue is full; see Retry-After.",
    500: "The edit failed.",
    503: "The server is loading, shutting down or out of memory.",
}
HEADERS = {
    "x-request-id": {"description": "The id sent with the request, or a new one.", "schema": {"type": "string"}},
}
RETRY_AFTER = {"retry-after": {"description": "Seconds to wait before a retry.", "schema": {"type": "string"}}}
UPLOAD_ERRORS = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503)
IMAGE_ERRORS = (*UPLOAD_ERRORS, 422)
FILE = {"type": "string", "format": "binary"}
DATA_URL: dict[str, Any] = {"type": "string", "pattern": f"^{DATA_URL_PREFIX}[A-Za-z0-9+/]+={{0,2}}$"}
PICTURE: list[dict[str, Any]] = [
    DATA_URL,
    {"type": "object", "properties": {"image_url": DATA_URL}, "required": ["image_url"], "additionalProperties": False},
]
SERVER_SENT_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}


def answers(answer: type[BaseModel], *errors: int, status: int = 200, streams: bool = False) -> dict[int, Any]:
    found: dict[int, Any] = {status: {"model": answer, "description": "Success."}}
    if streams:
        found[status]["content"] = {"text/event-stream": {"schema": SERVER_SENT_EVENT}}
    found |= {error: {"model": Error, "description": ERRORS[error]} for error in errors}
    for number, response in found.items():
        response["headers"] = HEADERS | (RETRY_AFTER if number in (429, 503) else {})
    return found


def body(kind: type[Fields]) -> dict[str, Any]:
    content = {
        "application/json": {"schema": json_schema(kind)},
        "multipart/form-data": {"schema": form_schema(kind)},
    }
    return {"requestBody": {"required": True, "content": content}}


def json_schema(kind: type[Fields]) -> dict[str, Any]:
    """In JSON an optional field may also be null."""
    schema = kind.model_json_schema()
    required = schema.get("required", [])
    for picture in kind.pictures:
        list_of_one = [{"type": "array", "items": {"anyOf": PICTURE}, "maxItems": 1}] if picture.may_be_list else []
        for name in (picture.name, *picture.other_names):
            schema["properties"][name] = {"anyOf": [*PICTURE, *list_of_one]}
    schema["properties"] = {
        name: shape if name in required else nullable(shape) for name, shape in schema["properties"].items()
    }
    return schema


def nullable(shape: dict[str, Any]) -> dict[str, Any]:
    labels = {name: shape[name] for name in ("title", "description", "default") if name in shape}
    kinds = shape["anyOf"] if "anyOf" in shape else [{k: v for k, v in shape.items() if k not in labels}]
    return labels | {"anyOf": [kind for kind in kinds if kind != {"type": "null"}] + [{"type": "null"}]}


def form_schema(kind: type[Fields]) -> dict[str, Any]:
    """In a form an optional field is absent, never null, and a list is text."""
    schema = kind.model_json_schema()
    for name, shape in schema["properties"].items():
        if shape.get("type") == "array":
            schema["properties"][name] = {"type": "string"} | {"description": shape.get("description", "")}
        if "anyOf" in shape:
            [only] = [one for one in shape.pop("anyOf") if one != {"type": "null"}]
            schema["properties"][name] = only | {k: v for k, v in shape.items() if k != "default"}
    for picture in kind.pictures:
        schema["properties"][picture.name] = FILE
        if picture.may_be_list:
            schema["properties"][f"{picture.name}[]"] = {"type": "array", "items": FILE, "maxItems": 1}
        schema["properties"] |= dict.fromkeys(picture.other_names, DATA_URL)
    return schema


# keyword arguments of the routes
EDIT: dict[str, Any] = {
    "responses": answers(ImagesAnswer, *IMAGE_ERRORS, streams=True),
    "openapi_extra": body(EditFields),
}
VARIATION: dict[str, Any] = {
    "responses": answers(ImagesAnswer, *IMAGE_ERRORS, streams=True),
    "openapi_extra": body(VariationFields),
}
GENERATION: dict[str, Any] = {
    "responses": answers(ImagesAnswer, *IMAGE_ERRORS, streams=True),
    "openapi_extra": body(GenerationFields),
}
TEMPLATE: dict[str, Any] = {
    "responses": answers(TemplateAnswer, *UPLOAD_ERRORS, status=201),
    "openapi_extra": body(TemplateFields),
}
EARLIER: dict[str, Any] = {
    "responses": answers(ImagesAnswer, 401, 403, 404)
    | {202: {"model": EditPending, "description": "Not done yet.", "headers": HEADERS}}
}
MODELS: dict[str, Any] = {"responses": answers(ModelsAnswer, 401, 403)}
MODEL: dict[str, Any] = {"responses": answers(ModelAnswer, 401, 403, 404)}
TEMPLATES: dict[str, Any] = {"responses": answers(TemplatesAnswer, 401, 403)}
ONE_TEMPLATE: dict[str, Any] = {"responses": answers(TemplateAnswer, 401, 403, 404)}
REMOVED_TEMPLATE: dict[str, Any] = {
    "responses": answers(TemplateRemoved, 401, 403, 404)
    | {202: {"model": TemplateLeaving, "description": "Not used any more, but not yet deleted.", "headers": HEADERS}}
}
LORA: dict[str, Any] = {
    "responses": answers(LoraAnswer, *UPLOAD_ERRORS, status=201),
    "openapi_extra": body(LoraFields),
}
CONTROLNETS: dict[str, Any] = {"responses": answers(ControlNetsAnswer, 401, 403)}
LORAS: dict[str, Any] = {"responses": answers(LorasAnswer, 401, 403)}
ONE_LORA: dict[str, Any] = {"responses": answers(LoraAnswer, 400, 401, 403, 404)}
REMOVED_LORA: dict[str, Any] = {"responses": answers(LoraRemoved, 400, 401, 403, 404)}
HEALTH: dict[str, Any] = {
    "responses": {
        200: {"model": HealthState, "description": "Yes."},
        403: {"model": Error, "description": ERRORS[403]},
        503: {"model": HealthState, "description": "No."},
    },
    "openapi_extra": {"security": []},
}
STATUS: dict[str, Any] = {"responses": answers(StatusAnswer, 401, 403)}
METRICS: dict[str, Any] = {
    "responses": {
        200: {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}},
        401: {"model": Error, "description": ERRORS[401]},
        403: {"model": Error, "description": ERRORS[403]},
    }
}


def add_schema(app: FastAPI, needs_key: bool) -> None:
    """Build the document once. Invalid parameters are answered with 400, so the framework's own 422 is removed."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    for operations in document["paths"].values():
        for operation in operations.values():
            if operation["responses"].get("422", {}).get("description") != ERRORS[422]:
                operation["responses"].pop("422", None)
    for unused in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(unused, None)
    if needs_key:
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "azure": {"type": "apiKey", "in": "header", "name": "api-key"},
        }
        document["security"] = [{"bearer": []}, {"azure": []}]
    app.openapi_schema = document
