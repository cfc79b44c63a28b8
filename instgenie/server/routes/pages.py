"""The web pages: their files, what they need to know at the start, and the engine live. Everything else they do through
the API, like any client. Files are open to all, for they say nothing; facts and events ask for the key."""

import asyncio
import hashlib
import json
import mimetypes
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from instgenie.server.bodies.fields import MAX_EDITS
from instgenie.server.errors import JsonResponse, not_found
from instgenie.server.routes.suggestions import EXAMPLES, known_examples, known_prompts
from instgenie.server.service import Service, service_of

STATIC = Path(__file__).parent.parent / "static"
SECONDS_BETWEEN_SNAPSHOTS = 0.5
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
TYPES = {".js": "text/javascript", ".svg": "image/svg+xml"}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class File:
    content: bytes
    media_type: str
    tag: str


def read_file(path: Path) -> File:
    content = path.read_bytes()
    media_type = TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return File(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:16]}"')


def read_files() -> Iterator[tuple[str, File]]:
    for path in sorted(STATIC.iterdir()):
        yield path.name, read_file(path)
    for path in sorted(EXAMPLES.glob("*.png")):
        yield f"examples/{path.name}", read_file(path)


FILES = dict(read_files())  # the only names there are: no path is ever made from a request


def send_file(request: Request, name: str) -> Response:
    """Unchanged files are not sent twice."""
    file = FILES.get(name)
    if file is None:
        raise not_found("file", name, "file_not_found")
    headers = {
        "etag": file.tag,
        "cache-control": "no-cache",
        "content-security-policy": POLICY,
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
    known = known_prompts(service.cluster.config.model)
    return JsonResponse(
        {
            "model": config.served_model_names[0],
            "is_ready": service.ready,
            "steps": model.steps if model else None,
            "guidance": model.guidance if model else None,
            "max_edits": MAX_EDITS,
            "max_pixels": config.max_pixels,
            "max_body_bytes": config.max_body_bytes,
            "reuse": service.cluster.config.reuse,
            "examples": known_examples(),
            "colours": known.colours,
            "prompts": known.prompts,
        }
    )


@router.get("/engine/events")
async def engine_events(request: Request) -> Response:
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(snapshots(service_of(request)), media_type="text/event-stream", headers=headers)


async def snapshots(service: Service) -> AsyncIterator[bytes]:
    """Until the client is gone or the server is going."""
    since = 0.0
    while not service.draining:
        snapshot = service.pulse.snapshot(since)
        since = snapshot["now"]
        yield f"data: {json.dumps(snapshot)}\n\n".encode()
        await asyncio.sleep(SECONDS_BETWEEN_SNAPSHOTS)
