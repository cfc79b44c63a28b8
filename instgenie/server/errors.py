"""Errors as clients of OpenAI's API expect them: `{"error": {"message", "type", "param", "code"}}`. Knows statuses, but
no routes. The texts are ours: no library's message, memory address or file path reaches a client."""

import json
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from instgenie.cluster.orders import Failed
from instgenie.errors import (
    ControlError,
    ControlNotFoundError,
    InstGenieError,
    LoraError,
    LoraNotFoundError,
    LoraStoreError,
    MaskError,
    PictureError,
)

MAX_ECHO = 100
NO_RETRY = {"x-should-retry": "false"}
SECONDS_TO_RECOVER = 30  # the longest pause before a dead process is started again


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class JsonResponse(Response):
    """JSON in ASCII, so that a lone surrogate from a client can be echoed."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def bad(param: str, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code, param)


def busy(message: str, seconds: float, code: str) -> ApiError:
    """Return an error that clears by itself: the client should wait and retry."""
    return ApiError(429, message, code, headers=retry_after(seconds))


def closed(message: str, seconds: float, code: str) -> ApiError:
    return ApiError(503, message, code, headers=retry_after(seconds))


def not_found(what: str, name: str, code: str, param: str | None = None) -> ApiError:
    return ApiError(404, f"The {what} {echo(name)} does not exist.", code, param)


def gone() -> ApiError:
    """Return the error for the log; the client never receives it."""
    return ApiError(499, "The client closed the connection.", "client_closed_request")


def late(milliseconds: int) -> ApiError:
    return ApiError(408, f"The deadline of {milliseconds} ms has passed.", "deadline_exceeded", "deadline_ms", NO_RETRY)


def hopeless(predicted: float, left: float, deadline: float) -> ApiError:
    message = (
        f"The edit is predicted to take {1000 * predicted:.0f} ms, but {1000 * max(left, 0):.0f} ms of its deadline of "
        f"{1000 * deadline:.0f} ms are left."
    )
    return ApiError(408, message, "deadline_unreachable", "deadline_ms", NO_RETRY)


def retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, min(120, round(seconds))))}


def from_user_error(error: InstGenieError) -> ApiError:
    """Show the message of a typed error: it is ours and meant for users."""
    param = "mask" if isinstance(error, MaskError) else "image" if isinstance(error, PictureError) else None
    message = str(error)
    return ApiError(400, message[:1].upper() + message[1:] + ".", "invalid_value", param)


def from_control_error(error: ControlError) -> ApiError:
    message = f"{str(error)[:1].upper()}{str(error)[1:]}."
    if isinstance(error, ControlNotFoundError):
        return ApiError(404, message, "controlnet_not_found", "controls")
    return ApiError(400, message, "invalid_control", "controls")


def from_lora_error(error: LoraError, param: str = "loras") -> ApiError:
    message = str(error)
    message = message[:1].upper() + message[1:] + "."
    if isinstance(error, LoraNotFoundError):
        return ApiError(404, message, "lora_not_found", param)
    if isinstance(error, LoraStoreError):
        return closed(message, SECONDS_TO_RECOVER, "lora_unavailable")
    return ApiError(400, message, "invalid_lora", param)


def from_failure(failed: Failed) -> ApiError:
    match failed.kind:
        case "bad_input":
            return ApiError(400, failed.message, "invalid_value", failed.param)
        case "no_reuse":
            advice = "Send reuse=auto to have the edit computed in full."
            message = f"The edit cannot use its template: {failed.message}. {advice}"
            return ApiError(503, message, "no_reuse", "reuse", NO_RETRY)
        case "out_of_memory":
            return ApiError(503, "The edit does not fit in the worker's memory.", "out_of_memory", headers=NO_RETRY)
        case "crashed":
            return ApiError(500, "The worker that ran the edit crashed.", "worker_crashed")
        case "unavailable":
            return closed("No worker can run the edit.", SECONDS_TO_RECOVER, "unavailable")
        case "lora_unavailable":
            return from_lora_error(LoraStoreError(failed.message))
        case "shutting_down":
            return closed("The server shut down before the edit was done.", SECONDS_TO_RECOVER, "shutting_down")
        case "internal":
            return ApiError(500, "The edit failed inside the worker.", "internal_error")


def echo(given: object) -> str:
    """Quote what a client sent, shortened to one line."""
    shown = repr(given)
    return shown if len(shown) <= MAX_ECHO else shown[: MAX_ECHO - 3] + "..."


def error_response(error: ApiError) -> JsonResponse:
    return JsonResponse(error.body, error.status, error.headers)


def allowed_methods(request: Request) -> list[str]:
    """Return the methods of all routes of this path; the framework knows only the first route's."""
    paths = request.app.openapi()["paths"]
    found = [name for name in paths if re.fullmatch(re.sub(r"\{\w+\}", ".+", name), request.url.path)]
    return sorted({method.upper() for name in found for method in paths[name]}) or ["GET"]


def add_error_handlers(app: FastAPI) -> None:
    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        route = f"{request.method} {echo(request.url.path)}"
        message = {404: f"There is no route {route}.", 405: f"The method of {route} is not allowed."}
        text = message.get(error.status_code, "The request cannot be handled.")
        code = {404: "route_not_found", 405: "method_not_allowed"}.get(error.status_code)
        headers = {"allow": ", ".join(allowed_methods(request))} if error.status_code == 405 else None
        return error_response(ApiError(error.status_code, text, code, headers=headers))

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        place = [str(part) for part in error.errors()[0]["loc"]]
        return error_response(bad(place[-1], f"The value of {place[-1]!r} is not valid."))

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
