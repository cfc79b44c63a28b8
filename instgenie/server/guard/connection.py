"""Ends connections of clients that are slow, stuck or silent. Knows the pace of sockets, not what they carry."""

import asyncio
import time
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT = 20.0  # seconds for a request's head to arrive, and for the rest of a body that is already answered
STALL_TIMEOUT = 60.0  # seconds in which a client reads no byte of an answer


class Connection(H11Protocol):
    """uvicorn's protocol with timeouts. Without them it waits forever for a head that never arrives, for a body that
    trickles in after its answer, and for a client that does not read."""

    def __init__(self, *args: Any, head_timeout: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timeout = HEAD_TIMEOUT if head_timeout is None else head_timeout
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._first_byte: float | None = None  # when the head that is arriving began to arrive

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        if self._first_byte is None and self.conn.their_state is h11.IDLE:
            self._first_byte = time.monotonic()
        super().data_received(data)
        if self._first_byte is not None and self.conn.their_state not in (h11.IDLE, h11.ERROR):
            cast(dict[str, Any], self.scope)["start"], self._first_byte = self._first_byte, None
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._stall_timer):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_answered_early:
            self._watch_head()

    @property
    def _is_answered_early(self) -> bool:
        """True while the body of an already answered request is still arriving."""
        has_answered = self.cycle is not None and self.cycle.response_complete
        return has_answered and self.conn.their_state is h11.SEND_BODY

    def _watch_head(self) -> None:
        waits = self.conn.their_state is h11.IDLE or self._is_answered_early
        if waits and self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout, self.transport.abort)
        elif not waits and self._head_timer:
            self._head_timer.cancel()
            self._head_timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_stall(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer:
            self._stall_timer.cancel()

    def _watch_stall(self, num_left: int) -> None:
        def check() -> None:
            if self.transport.get_write_buffer_size() >= num_left:
                self.transport.abort()
            else:
                self._watch_stall(self.transport.get_write_buffer_size())

        self._stall_timer = self.loop.call_later(STALL_TIMEOUT, check)
