"""Serves the templates in memory to peers: other processes of the cluster that lack them. A thread with a socket of its
own answers them, beside the step loop, which never waits for it.

A piece is copied before it is sent, so that a slow peer keeps no evicted template in memory. Each peer asks for a few
pieces at a time; what waits to be sent to one peer, and the bytes sent in a second to all, are limited.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from functools import lru_cache

import msgspec
import zmq
from torch import Tensor

from instgenie.cache.memory import MemoryTier
from instgenie.cache.pieces import (
    LAYOUT,
    MAX_REQUEST_BYTES,
    PIECE_BYTES,
    FindLayout,
    FindSpans,
    PeerAnswer,
    PeerRequest,
    ReadPiece,
    SpanGone,
    SpanPiece,
    SpansFound,
    checksum,
    decode_request,
    describe_layout,
    encode_message,
    ends_of,
)
from instgenie.jobs.activations import parse_key
from instgenie.machine.curve import Doorkeeper, secure_server

MAX_WAITING = 64  # pieces for one peer that are not yet sent; a peer that asks for more gets none
MAX_LEAD = 0.05  # seconds for which bytes may be sent faster than the limit
MS_BETWEEN_LOOKS = 200  # for the end

logger = logging.getLogger(__name__)


class PeerServer:
    """Binds the address at once; its port may be a wildcard. `secret`: only peers that know it are served."""

    def __init__(
        self, address: str, tiers: Sequence[MemoryTier], bytes_per_second: float = 1e9, secret: str = ""
    ) -> None:
        self.tiers = tiers
        self.num_bytes_sent = 0
        self._throttle = Throttle(bytes_per_second)
        self._key = lru_cache(64)(parse_key)
        self._context = zmq.Context()
        self._keeper = Doorkeeper(self._context, secret)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, MAX_WAITING)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        secure_server(self._socket, secret)
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self._release()
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Serve nobody any more. A second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        self._release()

    def _release(self) -> None:
        self._keeper.close()
        self._socket.close()
        self._context.term()

    # in the thread

    def _serve(self) -> None:
        while not self._closing.is_set():
            if self._socket.poll(MS_BETWEEN_LOOKS):
                peer, *frames = self._socket.recv_multipart()
                try:
                    answer, data = self.answer(decode_request(frames[0] if frames else b""))
                    self._throttle.wait(data.nbytes if data is not None else 0)
                    self._send(peer, answer, data)
                except (msgspec.DecodeError, ValueError):
                    logger.warning("a peer asked for something that is not known")
                except Exception:
                    logger.exception("a peer was not answered")

    def answer(self, request: PeerRequest) -> tuple[PeerAnswer, Tensor | None]:
        """The answer to a peer, and the bytes that go with it."""
        if request.layout != LAYOUT:
            return SpanGone(), None
        key = self._key(request.key)
        match request:
            case FindSpans():
                held = [steps for steps in key.spans if any(not tier.missing(key, [steps]) for tier in self.tiers)]
                return SpansFound(tuple(map(ends_of, held))), None
            case FindLayout() | ReadPiece():
                for tier in self.tiers:
                    if block := tier.block(key, range(*request.steps)):
                        if isinstance(request, FindLayout):
                            return describe_layout(block.specs, block.memory.nbytes), None
                        num_bytes = min(max(request.num_bytes, 0), PIECE_BYTES)
                        chosen = block.memory[max(request.offset, 0) :][:num_bytes]
                        data = tier.copy_out(chosen)
                        return SpanPiece(request.offset, checksum(data)), data
                return SpanGone(), None

    def _send(self, peer: bytes, answer: PeerAnswer, data: Tensor | None) -> None:
        frames = [peer, encode_message(answer), *([data.numpy().data] if data is not None else ())]
        with contextlib.suppress(zmq.Again):  # too much waits for this peer, which gives up
            self.num_bytes_sent += data.nbytes if data is not None else 0
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)


class Throttle:
    """Limits the bytes sent in a second."""

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self._free_at = 0.0  # when all that was sent is sent at the limit

    def wait(self, num_bytes: int) -> None:
        """Wait until `num_bytes` more may be sent."""
        now = time.monotonic()
        if (ahead := self._free_at - now) > MAX_LEAD:
            time.sleep(ahead)
        self._free_at = max(self._free_at, now) + num_bytes / self.bytes_per_second
