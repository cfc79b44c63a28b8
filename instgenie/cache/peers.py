"""The peer tier: templates in the memory of other workers, on this machine or another. It is read from, and never
written to: a worker keeps what it registers, or copies, in its own memory. The cluster tells which peers hold a
template; `sharing` is their side.

A span is copied piece by piece, and every piece is checked. A peer that dies, stalls or sends damaged bytes is left
alone for a while, longer with each failure in a row; the next peer, or the tier below, is asked instead.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TypeVar

import msgspec
import torch
import zmq
from rich.filesize import decimal
from torch import Tensor

from instgenie.cache.format import DamagedError
from instgenie.cache.pieces import (
    LAYOUT,
    PIECE_BYTES,
    FindLayout,
    FindSpans,
    PeerAnswer,
    PeerMessage,
    ReadPiece,
    SpanLayout,
    SpanPiece,
    SpansFound,
    checksum,
    decode_answer,
    encode_message,
    ends_of,
    num_pieces,
    read_layout,
    span_of,
)
from instgenie.jobs.activations import Key, Span
from instgenie.machine.backoff import SLOWEST, Backoff, GoneError
from instgenie.machine.curve import secure_client
from instgenie.machine.pages import empty_pages
from instgenie.types import TierName

PATIENCE = 5.0  # seconds without an answer after which a peer counts as gone
WINDOW = 8  # pieces that are asked for and have not arrived
MAX_KEYS = 4096  # templates whose peers are remembered
MAX_PEERS = 1024  # whose failures are remembered
FAILURES = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

Answer = TypeVar("Answer")


class PeerTier:
    """All methods are thread-safe. No template of more than `max_bytes` is accepted. `secret` is that of the peers."""

    name: TierName = "peer"

    def __init__(self, max_bytes: int, secret: str = "", patience: float = PATIENCE) -> None:
        self.max_bytes = max_bytes
        self.secret = secret
        self.patience = patience
        self._context = zmq.Context()
        self._peers: OrderedDict[Key, tuple[str, ...]] = OrderedDict()  # addresses, the latest told last
        self._failures: OrderedDict[str, Backoff] = OrderedDict()  # by address
        self._lock = threading.Lock()  # guards the two above

    def learn(self, key: Key, addresses: Sequence[str]) -> None:
        """Note which peers hold a template now."""
        with self._lock:
            self._peers.pop(key, None)
            if addresses:
                self._peers[key] = tuple(addresses)
            while len(self._peers) > MAX_KEYS:
                self._peers.popitem(last=False)

    def forget(self, key: Key) -> None:
        self.learn(key, ())

    def missing(self, key: Key, spans: Sequence[range]) -> list[range]:
        """The spans that no peer has that can be asked."""
        missing = list(spans)
        for address in self._reachable(key) if spans else ():
            found = self._ask(address, lambda line: line.find(key))
            missing = [steps for steps in missing if steps not in (found or ())]
            if not missing:
                break
        return missing

    def load(self, key: Key, steps: range) -> Span | None:
        """The span from the first peer that has it undamaged."""
        for address in self._reachable(key):
            if span := self._ask(address, lambda line: line.load(key, steps, self.max_bytes)):
                return span
        return None

    def close(self) -> None:
        self._context.term()

    def _reachable(self, key: Key) -> list[str]:
        with self._lock:
            addresses = self._peers.get(key, ())
            return [one for one in addresses if one not in self._failures or not self._failures[one].is_silent]

    def _ask(self, address: str, work: Callable[["PeerLine"], Answer]) -> Answer | None:
        """The answer of a peer; None if it gives none."""
        try:
            with closing(PeerLine(self._context, address, self.secret, self.patience)) as line:
                answer = work(line)
        except (GoneError, DamagedError, msgspec.DecodeError, zmq.ZMQError) as error:
            self._leave_alone(address, error)
            return None
        with self._lock:
            self._failures.pop(address, None)
        return answer

    def _leave_alone(self, address: str, error: Exception) -> None:
        with self._lock:
            backoff = self._failures.setdefault(address, Backoff(f"the peer at {address}", self.patience))
            while len(self._failures) > MAX_PEERS:
                self._failures.popitem(last=False)
        backoff.failed(error)


class PeerLine:
    """A connection to one peer, for one question. A lost connection is noticed at once, a stalled one in time."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, secret: str, patience: float) -> None:
        self.patience = patience
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        secure_client(self._socket, secret)
        self._monitor = self._socket.get_monitor_socket(FAILURES)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(address)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def find(self, key: Key) -> list[range]:
        """The spans that the peer has in memory."""
        self._send(FindSpans(LAYOUT, key.text))
        answer, _ = self._receive()
        return [range(*ends) for ends in answer.spans] if isinstance(answer, SpansFound) else []

    def load(self, key: Key, steps: range, max_bytes: int) -> Span | None:
        """Copy a span; None if the peer does not have it, or has it no longer."""
        self._send(FindLayout(LAYOUT, key.text, ends_of(steps)))
        layout, _ = self._receive()
        if not isinstance(layout, SpanLayout):
            return None
        specs = read_layout(layout, key, steps, max_bytes)
        memory = empty_pages(layout.num_bytes)
        return span_of(memory, specs, steps) if self._fill(memory, key, steps) else None

    def _fill(self, memory: Tensor, key: Key, steps: range) -> bool:
        """Copy all bytes of a span, and return False if it is gone meanwhile. A few pieces are on their way at any
        time."""
        limit = time.monotonic() + self.patience + memory.nbytes / SLOWEST
        for index in range(num_pieces(memory.nbytes) + WINDOW):
            if index >= WINDOW:
                answer, data = self._receive()
                if not isinstance(answer, SpanPiece):
                    return False
                put_piece(memory, (index - WINDOW) * PIECE_BYTES, answer, data)
            if (offset := index * PIECE_BYTES) < memory.nbytes:
                self._send(ReadPiece(LAYOUT, key.text, ends_of(steps), offset, PIECE_BYTES))
            if time.monotonic() > limit:
                raise GoneError(f"it sends less than {decimal(int(SLOWEST))} in a second")
        return True

    def _send(self, request: PeerMessage) -> None:
        self._socket.send(encode_message(request))

    def _receive(self) -> tuple[PeerAnswer, Tensor | None]:
        ready = dict(self._poller.poll(round(1000 * self.patience)))
        if self._socket in ready:
            head, *data = self._socket.recv_multipart(copy=False)
            return decode_answer(head.buffer), torch.frombuffer(data[0].buffer, dtype=torch.uint8) if data else None
        raise GoneError("the connection is lost" if ready else f"it does not answer within {self.patience:g} seconds")


def put_piece(memory: Tensor, offset: int, piece: SpanPiece, data: Tensor | None) -> None:
    """Copy the bytes of a piece to their place, or raise a DamagedError."""
    target = memory[offset : offset + PIECE_BYTES]
    if data is None or (piece.offset, data.nbytes) != (offset, target.nbytes):
        raise DamagedError(f"bytes {offset} to {offset + target.nbytes} are not the ones that it sent")
    target.copy_(data)
    if checksum(target) != piece.checksum:
        raise DamagedError(f"the checksum of bytes {offset} to {offset + target.nbytes} is wrong")
