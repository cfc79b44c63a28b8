"""The connection of a process to its cluster. Knows messages and the socket; each role knows what to do with them.

Signs of life come from the loop of the process, not from a thread beside it, so a loop that hangs falls silent.
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import zmq

from instgenie.cluster.config import ProcessConfig
from instgenie.cluster.wire import AnyMessage, Beat, Frame, Message, decode, encode
from instgenie.machine.curve import cluster_secret, secure_client

MS_BETWEEN_BEATS = 500


class Line:
    """A process's connection to the cluster."""

    def __init__(self, config: ProcessConfig) -> None:
        self._context = zmq.Context()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._poller = zmq.Poller()
        self._poller.register(self._woken, zmq.POLLIN)
        self._beat_at = 0.0
        self._connect(config)

    def _connect(self, config: ProcessConfig) -> None:
        self._socket = open_socket(self._context, config.endpoint, config.name)
        self._poller.register(self._socket, zmq.POLLIN)

    def send(self, message: Message, frames: Sequence[Frame] = ()) -> None:
        self._socket.send_multipart([encode(message), *frames], copy=False)

    def receive(self, wait: bool) -> tuple[AnyMessage, list[Frame]] | None:
        """Return the next message, if there is one. Waiting ends after one beat, or when the line is woken."""
        self._beat()
        ready = dict(self._poller.poll(MS_BETWEEN_BEATS if wait else 0))
        if self._woken in ready:
            os.read(self._woken, 4096)
        if self._socket not in ready:
            return None
        head, *frames = self._socket.recv_multipart(copy=False)
        return decode(head.buffer), [frame.buffer for frame in frames]

    def watch(self, socket: "zmq.Socket[Any]") -> None:
        """End waits for a message also when another socket has one."""
        self._poller.register(socket, zmq.POLLIN)

    def keep_alive(self) -> None:
        """Give a sign of life, if one is due, while something else than messages is waited for."""
        self._beat()

    def wake(self) -> None:
        """End the wait for a message; any thread may call this."""
        with suppress(BlockingIOError):  # it is already woken
            os.write(self._wake, b"!")

    def _beat(self) -> None:
        now = time.monotonic()
        if 1000 * (now - self._beat_at) < MS_BETWEEN_BEATS:
            return
        self._beat_at = now
        self.send(Beat())

    def close(self) -> None:
        self._socket.close(linger=1000)
        self._context.term()


def open_socket(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, name: str) -> "zmq.Socket[bytes]":
    """Connect to a front, which knows this process by the name."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, name.encode())
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    secure_client(socket, cluster_secret())
    socket.connect(endpoint)
    return socket
