"""Takes pictures out of JSON before it is parsed, and puts them back. Parsing or decoding a text of many megabytes in
one piece would hold up all other threads for as long as that takes."""

import binascii
import json
import secrets
from collections.abc import Callable
from typing import Any

START = b'"data:'
MIN_LIFTED = 2**16  # bytes; shorter texts are parsed where they are
PIECE = 2**20  # characters that are decoded at once; a multiple of 4


def loads(body: bytes, refuse_constant: Callable[[str], Any]) -> Any:
    """Parse JSON whose long data: URLs are plain text, without escapes."""
    mark = secrets.token_hex(16)
    lifted: dict[str, str] = {}
    parts, done, start = list[bytes](), 0, body.find(START)
    while start >= 0:
        end = body.find(b'"', start + 1)
        is_text = body[start - 1 : start] != b"\\" and body.find(b"\\", start, end) < 0
        if end - start > MIN_LIFTED and is_text and (url := as_text(body[start + 1 : end])) is not None:
            name = f"{mark}{len(lifted)}"
            lifted[name] = url
            parts += [body[done:start], f'"{name}"'.encode()]
            done = end + 1
        start = body.find(START, max(end, start) + 1) if end >= 0 else -1
    found = json.loads(b"".join([*parts, body[done:]]), parse_constant=refuse_constant)
    return put_back(found, lifted) if lifted else found


def as_text(url: bytes) -> str | None:
    try:
        return url.decode("ascii")
    except UnicodeDecodeError:
        return None


def put_back(found: Any, lifted: dict[str, str]) -> Any:
    if isinstance(found, str):
        return lifted.get(found, found)
    if isinstance(found, list):
        return [put_back(one, lifted) for one in found]
    if isinstance(found, dict):
        return {lifted.get(name, name): put_back(value, lifted) for name, value in found.items()}
    return found


def decode_base64(text: str, ignored: bytes = b"") -> bytes:
    """Decode strictly but for ignored characters, in pieces; raise a ValueError if the text is not base64."""
    encoded = b"".join(piece.translate(None, ignored) for piece in split(text.encode("ascii")))
    pieces = split(encoded)
    if any(b"=" in piece for piece in pieces[:-1]):
        raise binascii.Error("padding inside the text")
    return b"".join(binascii.a2b_base64(piece, strict_mode=True) for piece in pieces)


def split(encoded: bytes) -> list[bytes]:
    return [encoded[start : start + PIECE] for start in range(0, len(encoded), PIECE)]
