"""Joins routes, error handlers, OpenAPI document and gate into one ASGI application."""

from collections.abc import Sequence

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from instgenie.server.bodies.schema import add_schema
from instgenie.server.errors import ApiError, add_error_handlers, error_response
from instgenie.server.guard.gate import Gate, KeyCheck
from instgenie.server.routes import controlnets, images, loras, operators, pages, templates
from instgenie.server.service import HttpService

ABOUT = "Mask-guided image editing behind OpenAI's images API. Pixels outside the mask stay bit-identical."


def make_app(service: HttpService, version: str) -> ASGIApp:
    app = FastAPI(title="InstGenIE", version=version, description=ABOUT, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    app.state.service = service
    for router in (images.router, templates.router, loras.router, controlnets.router, operators.router, pages.router):
        app.include_router(router)
    add_error_handlers(app)
    app.add_exception_handler(Exception, on_bug)
    add_schema(app, needs_key=bool(service.config.api_keys))
    return Gate(with_cors(KeyCheck(app, service), service.config.allowed_origins), service)


def with_cors(app: ASGIApp, allowed_origins: Sequence[str]) -> ASGIApp:
    """Let pages of these origins read answers, also the refusals of the key check: CORS wraps it. Preflights carry no
    key and are answered before it."""
    if not allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=allowed_origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )


async def on_bug(request: Request, error: Exception) -> Response:
    return error_response(ApiError(500, "The request failed in the server; its log has the details.", "internal_error"))
