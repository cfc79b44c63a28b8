"""The web pages: their files, the facts they start with, and the live events of the engine page. Everything else they
do through the API, like any client. The files are public, since they hold nothing private; facts and events need the
key."""

import asyncio
import hashlib
import json
import mimetypes
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from instgenie.pictures.examples import EXAMPLES, THUMBNAIL
from instgenie.server.bodies.limits import field_limits
from instgenie.server.errors import JsonResponse, not_found
from instgenie.server.routes.suggestions import suggested_examples, suggested_prompts
from instgenie.server.service import HttpService, service_of, tenant_of

STATIC = Path(__file__).parent.parent / "static"
SECONDS_BETWEEN_SNAPSHOTS = 0.5
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
MEDIA_TYPES = {".js": "text/javascript", ".svg": "image/svg+xml", ".gz": "application/gzip"}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class StaticFile:
    content: bytes
    media_type: str
    tag: str


def read_file(path: Path) -> StaticFile:
    content = path.read_bytes()
    media_type = MEDIA_TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return StaticFile(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:16]}"')


def read_files() -> Iterator[tuple[str, StaticFile]]:
    for path in sorted(STATIC.rglob("*.*")):
        yield path.relative_to(STATIC).as_posix(), read_file(path)
    for example in suggested_examples():
        for name in (example["picture"], example["mask"], example["name"] + THUMBNAIL):
            yield f"examples/{name}", read_file(EXAMPLES / name)


FILES = dict(read_files())  # no path is ever built from a request: only these names are served


def send_file(request: Request, name: str) -> Response:
    """Send the file, or 304 if the browser already has it."""
    file = FILES.get(name)
    if file is None:
        raise not_found("file", name, "file_not_found")
    headers = {
        "etag": file.tag,
        "cache-control": "no-cache",
        "content-security-policy": CONTENT_POLICY,
        "referrer-policy": "no-referrer",
    }
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


@router.get("/")
async def edit_page(request: Request) -> Response:
    return send_file(request, "edit.html")


@router.get("/engine")
async def engine_page(request: Request) -> Response:
    return send_file(request, "engine.html")


@router.get("/static/{name:path}")
async def static_file(request: Request, name: str) -> Response:
    return send_file(request, name)


@router.get("/page/facts")
async def page_facts(request: Request) -> Response:
    service = service_of(request)
    model, config = service.cluster.model_facts, service.config
    tenant = tenant_of(request)
    service.warming.start(tenant)
    suggestions = suggested_prompts(service.cluster.config.model)
    return JsonResponse(
        {
            "model": config.served_model_names[0],
            "is_ready": service.ready,
            "fields": field_limits(config, model),
            "max_pixels": config.max_pixels,
            "max_body_bytes": config.max_body_bytes,
            "reuse": service.cluster.config.reuse,
            "examples": suggested_examples(),
            "colours": suggestions.colours,
            "prompts": suggestions.prompts,
            "words": sorted(words) if (words := service.vocabulary.words) else None,
            "warmed": service.warming.progress(tenant),
        }
    )


@router.get("/engine/events")
async def engine_events(request: Request) -> Response:
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(snapshots(service_of(request)), media_type="text/event-stream", headers=headers)


async def snapshots(service: HttpService) -> AsyncIterator[bytes]:
    """Yield snapshots until the client disconnects or the server shuts down."""
    since = 0.0
    while not service.draining:
        snapshot = service.pulse.snapshot(since)
        since = snapshot["now"]
        yield f"data: {json.dumps(snapshot)}\n\n".encode()
        await asyncio.sleep(SECONDS_BETWEEN_SNAPSHOTS)
