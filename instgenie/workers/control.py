"""The control channel of a process: orders of the actor that started it, read from standard input."""

import os
import sys

from instgenie.cluster.control import ControlOrder, decode_order


class ControlChannel:
    """Register `fd` for reading; whenever it is readable, take the orders."""

    def __init__(self) -> None:
        self.fd = sys.stdin.fileno()
        os.set_blocking(self.fd, False)
        self._rest = b""

    def take(self) -> list[ControlOrder]:
        """The orders that have arrived whole. Ends the process at the end of the input: its starter has died."""
        try:
            arrived = os.read(self.fd, 65536)
        except BlockingIOError:
            return []
        if not arrived:
            os._exit(1)
        *lines, self._rest = (self._rest + arrived).split(b"\n")
        return [decode_order(line) for line in lines]
