"""Sends large bodies in pieces: between them the event loop serves others, and a slow client is waited for."""

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PIECE = 2**18  # bytes


class LargeResponse(Response):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send_pieces(send, self.body)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_pieces(send: Send, body: bytes | memoryview) -> None:
    """Send a part of a body; more may follow."""
    view = memoryview(body)
    for start in range(0, len(view), PIECE):
        await send({"type": "http.response.body", "body": bytes(view[start : start + PIECE]), "more_body": True})
