"""Reads request bodies from untrusted clients: bytes are counted as they arrive, and slow senders are cut off. Knows
HTTP; does not know what a field means.

Two limits bound the memory: one per body, and one for all bodies that are being read or processed. Content-Length is
used only to refuse early; the limits count the bytes that arrive.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from instgenie.server.bodies import data_urls
from instgenie.server.errors import ApiError, bad, busy, echo, gone
from instgenie.types import Notes

MAX_FIELDS = 64
MAX_FILES = 20
MAX_TEXT_PART = 256 * 1024
MAY_BE_EMPTY = ("prompt", "negative_prompt")  # an empty text is a value of these; of other fields it is none


@dataclass
class RequestForm:
    """The values of a body by field name, in order. Multipart values are text or bytes; JSON values have any type.

    `notes` collects sentences about how the request was read, from whatever reads it: fields, pictures, masks. They are
    sent with the answer."""

    values: dict[str, list[Any]] = field(default_factory=dict)
    is_json: bool = False
    notes: Notes = field(default_factory=list)

    def add(self, name: str, value: Any) -> None:
        self.values.setdefault(name, []).append(value)


class Intake:
    """The bodies being read or processed, and the limits they share."""

    def __init__(self, max_body: int, max_bodies: int, timeout: float) -> None:
        self.max_body = max_body
        self.max_bodies = max_bodies
        self.timeout = timeout
        self.num_bytes = 0

    @asynccontextmanager
    async def form(self, request: Request) -> AsyncIterator[RequestForm]:
        """Read the body as a form. Its bytes count towards the limit until the block is left."""
        body = Body(self, request)
        try:
            async with asyncio.timeout(self.timeout):
                form = await body.form()
        except TimeoutError:
            raise ApiError(408, f"The body did not arrive within {self.timeout:g} s.", "body_timeout") from None
        except ClientDisconnect:
            raise gone() from None
        else:
            yield form
        finally:
            self.num_bytes -= body.num_bytes


class Body:
    """One body while it is read."""

    def __init__(self, intake: Intake, request: Request) -> None:
        self.intake = intake
        self.request = request
        self.num_bytes = 0

    async def form(self) -> RequestForm:
        declared = self.request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self.intake.max_body:
            self.refuse()
        kind = self.request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "multipart/form-data":
            return await self.multipart()
        if kind == "application/json":
            return await self.json()
        raise ApiError(
            415,
            f"The content type is {echo(kind)}: multipart/form-data or application/json is expected.",
            "unsupported_content_type",
        )

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        async for chunk in self.request.stream():
            self.num_bytes += len(chunk)
            self.intake.num_bytes += len(chunk)
            if self.num_bytes > self.intake.max_body:
                self.refuse()
            if self.intake.num_bytes > self.intake.max_bodies:
                raise busy("The server is reading too many uploads.", 1, "too_many_uploads")
            yield chunk

    def refuse(self) -> NoReturn:
        limit = self.intake.max_body
        raise ApiError(413, f"The body is too large: at most {limit:,} bytes are accepted.", "body_too_large")

    async def multipart(self) -> RequestForm:
        parser = InMemoryParser(
            self.request.headers,
            self.chunks(),
            max_files=MAX_FILES,
            max_fields=MAX_FIELDS,
            max_part_size=self.intake.max_body,
        )
        try:
            parts = await parser.parse()
        except MultiPartException as invalid:
            raise ApiError(400, explain(invalid), "invalid_multipart") from None
        except (UnicodeError, ValueError, IndexError, KeyError):
            raise ApiError(400, "The body is not valid multipart/form-data.", "invalid_multipart") from None
        form = RequestForm()
        for name, part in parts.multi_items():
            if isinstance(part, str):
                check_text(name, part)
            if not is_empty(name, part):
                form.add(name, await part.read() if isinstance(part, UploadFile) else part)
        await parts.close()
        return form

    async def json(self) -> RequestForm:
        chunks = [chunk async for chunk in self.chunks()]
        found = await asyncio.to_thread(parse_json, chunks)
        return RequestForm({name: [value] for name, value in found.items() if value is not None}, is_json=True)


class InMemoryParser(MultiPartParser):
    spool_max_size = sys.maxsize  # bodies are bounded, so files stay in memory and are never written to disk


def check_text(name: str, part: str) -> None:
    """Refuse long text, unless it is a picture."""
    if len(part) > MAX_TEXT_PART and part.lstrip()[:5].lower() != "data:":
        message = f"The text field {echo(name)} is too large: at most {MAX_TEXT_PART:,} bytes are accepted."
        raise ApiError(400, message, "invalid_multipart", name)


def is_empty(name: str, part: UploadFile | str) -> bool:
    """True if a client left the field out, which forms do with an empty text or a file without name and content."""
    if isinstance(part, UploadFile):
        return not part.filename and not part.size
    return not part.strip() and name not in MAY_BE_EMPTY


def explain(invalid: MultiPartException) -> str:
    if "Too many" in invalid.message:
        return f"The body has too many parts: at most {MAX_FILES} files and {MAX_FIELDS} fields are accepted."
    return "The body is not valid multipart/form-data."


def parse_json(chunks: Iterable[bytes]) -> dict[str, Any]:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(constant)

    try:
        found = data_urls.loads(b"".join(chunks), refuse)
    except (ValueError, RecursionError):
        raise ApiError(400, "The body is not valid JSON.", "invalid_json") from None
    if not isinstance(found, dict):
        raise ApiError(400, "The body is not a JSON object.", "invalid_json")
    if len(found) > MAX_FIELDS:
        raise bad("body", f"The body has {len(found):,} fields: at most {MAX_FIELDS} are accepted.", "too_many_fields")
    return found
