"""A relay in front of a running server. A test cuts it, and what the server's clients see is the death of the server:
open connections are reset and new ones refused, until it listens again on the same port."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close at once, without sending the rest


class Relay:
    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (str(parts.hostname), int(parts.port or 80))
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()  # a connection is either among the sockets that a cut closes, or refused
        self.port = 0  # chosen by the first listen
        self.listen()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def listen(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        self._sockets.append(listener)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def cut(self) -> None:
        """Close all connections at once: while they are reset one by one, none passes on what comes later."""
        with self._lock:
            cut, self._sockets = self._sockets, []
        for one in cut:
            reset(one)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # it was cut
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(self._server)
                self._join(client, server, listener)

    def _join(self, client: socket.socket, server: socket.socket, listener: socket.socket) -> None:
        with self._lock:
            if listener not in self._sockets:  # it was cut since
                reset(client)
                reset(server)
                return
            self._sockets += [client, server]
        for ends in ((client, server), (server, client)):
            threading.Thread(target=self._copy, args=ends, daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if self._is_cut(source):
                    return
                target.sendall(data)
        if not self._is_cut(source):
            with suppress(OSError):
                target.shutdown(socket.SHUT_WR)

    def _is_cut(self, one: socket.socket) -> bool:
        with self._lock:
            return one not in self._sockets


def reset(one: socket.socket) -> None:
    with suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        one.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
    one.close()


@contextmanager
def relayed(url: str) -> Iterator[Relay]:
    relay = Relay(url)
    try:
        yield relay
    finally:
        relay.cut()
