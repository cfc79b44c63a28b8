"""Orders to a process from whoever started it, apart from the messages of fronts: which fronts it serves, and when it
ends. They arrive as lines of JSON on its standard input. The end of the input means that the starter has died, and ends
the process. A child of `LocalLauncher` has no such channel: it has one front, which tells it everything.

    node actor -> process    Attach(front, endpoint, name)   serve one more front, under this name
                             Detach(front)                   drop the jobs of a front, and its connection
                             End()                           write what is worth keeping, then exit

A process is started with its first front in its configuration (`front`, `endpoint`, `name`) and with `has_control` set.
To attach a front that is attached already means that this front has lost track of the process: its jobs are dropped,
and it is served anew under the new name.
"""

from typing import TypeAlias

import msgspec
from msgspec import Struct


class Attach(Struct, frozen=True, tag=True):
    """Connect to a front, and serve it as well."""

    front: str  # its id, unique to this start of the front
    endpoint: str
    name: str  # of the process at this front: the identity of its socket


class Detach(Struct, frozen=True, tag=True):
    """Drop the jobs of a front, and the connection to it."""

    front: str


class End(Struct, frozen=True, tag=True):
    """Write what is worth keeping, then exit."""


ControlOrder: TypeAlias = Attach | Detach | End


def encode_order(order: ControlOrder) -> bytes:
    """One line."""
    return msgspec.json.encode(order) + b"\n"


def decode_order(line: bytes) -> ControlOrder:
    order: ControlOrder = msgspec.json.decode(line, type=ControlOrder)
    return order
