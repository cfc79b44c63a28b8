"""The connection of a worker to a process that helps with its steps: one of ControlNets, or its companion. A thread of
its own sends and receives, so that the steps neither wait for a message nor miss one. Knows messages;
`workers.controls` and `workers.far_branches` know jobs."""

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from instgenie.cluster.wire import Frame, Message, encode
from instgenie.machine.curve import cluster_secret, secure_client

MS_BETWEEN_LOOKS = 500

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Reply:
    """What becomes of a question: an answer, a refusal, or nothing because the process has died."""

    come: Event = field(default_factory=Event)
    message: Message | None = None  # None: the process has died
    frames: Sequence[Frame] = ()

    def settle(self, message: Message | None, frames: Sequence[Frame] = ()) -> None:
        self.message, self.frames = message, frames
        self.come.set()


@dataclass(frozen=True, eq=False)
class Outgoing:
    message: Message
    frames: Callable[[], Sequence[Frame]]  # called by the thread
    after: "torch.cuda.Event | None" = None  # the frames are complete after it


Read = Callable[[Frame], tuple[str | int | None, Message]]


class ControlLink:
    def __init__(
        self,
        address: str,
        on_news: Callable[[], None],
        on_lost: Callable[["ControlLink"], None],
        read: Read,
        name: str,
    ) -> None:
        """`on_news` is called after each answer, `on_lost` when the process has died, both by the thread. `read` finds
        the key of the question that a message answers."""
        self.address, self.on_news, self.on_lost, self.read, self.name = address, on_news, on_lost, read, name
        self.replies: dict[str | int, Reply] = {}  # by job or by ticket
        self.num_losses = 0
        self._outgoing: deque[Outgoing] = deque()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._is_closed = False
        self._thread = Thread(target=self._run, name="controls", daemon=True)
        self._thread.start()

    def ask(
        self,
        key: str | int,
        message: Message,
        frames: Callable[[], Sequence[Frame]],
        after: "torch.cuda.Event | None" = None,
    ) -> Reply:
        """Send a question; the reply to it has the key."""
        reply = self.replies[key] = Reply()
        self.tell(message, frames, after)
        return reply

    def tell(
        self,
        message: Message,
        frames: Callable[[], Sequence[Frame]] = lambda: (),
        after: "torch.cuda.Event | None" = None,
    ) -> None:
        self._outgoing.append(Outgoing(message, frames, after))
        with suppress(BlockingIOError):  # it is already woken
            os.write(self._wake, b"!")

    def close(self) -> None:
        self._is_closed = True
        with suppress(BlockingIOError):
            os.write(self._wake, b"!")
        self._thread.join(timeout=2)

    # in the thread

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket: Any = context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            socket.setsockopt(option, 0)
        secure_client(socket, cluster_secret())
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(self.address)
        poller = zmq.Poller()
        for one in (socket, monitor, self._woken):
            poller.register(one, zmq.POLLIN)
        while not self._is_closed:
            ready = dict(poller.poll(MS_BETWEEN_LOOKS))
            if socket in ready:  # what came before a death counts
                self._receive(socket)
            if monitor in ready:
                recv_monitor_message(monitor)
                self._lose()
            if self._woken in ready:
                os.read(self._woken, 4096)
            while self._outgoing:
                self._send(socket, self._outgoing.popleft())
        socket.disable_monitor()
        monitor.close(linger=0)  # the context waits for every socket
        socket.close(linger=200)
        context.term()

    def _send(self, socket: "zmq.Socket[bytes]", one: Outgoing) -> None:
        if one.after is not None:
            one.after.synchronize()
        socket.send_multipart([encode(one.message), *one.frames()], copy=False)

    def _receive(self, socket: Any) -> None:
        head, *frames = socket.recv_multipart(copy=False)
        key, message = self.read(head.buffer)
        if key is None:
            return
        if reply := self.replies.pop(key, None):  # else nobody waits for it any more
            reply.settle(message, [frame.buffer for frame in frames])
        self.on_news()

    def _lose(self) -> None:
        """Settle everything that was asked: the process that would have answered is gone."""
        self.num_losses += 1
        log.warning("the %s is gone", self.name, extra={"address": self.address})
        lost, self.replies = self.replies, {}
        self.on_lost(self)
        for reply in lost.values():
            reply.settle(None)
        self.on_news()
