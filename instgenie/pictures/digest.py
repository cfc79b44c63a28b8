"""Digests that tell pictures apart by their pixels."""

import hashlib
import weakref
from collections import OrderedDict

from instgenie.types import Pixels

MAX_DIGESTS = 256  # pictures whose digests are remembered


def digest(picture: Pixels) -> str:
    """Hash the size and the pixels of a decoded picture."""
    hashed = hashlib.sha256(str(picture.shape).encode())
    hashed.update(picture.tobytes())
    return hashed.hexdigest()


class Digests:
    """Remembers the digests of recent pictures, so that an array is hashed once. It keeps no picture alive; pictures
    must not be changed."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[weakref.ref[Pixels], str]] = OrderedDict()

    def of(self, picture: Pixels) -> str:
        known = self._known.get(id(picture))
        if known is None or known[0]() is not picture:  # an id may be that of another picture by now
            known = self._known[id(picture)] = weakref.ref(picture), digest(picture)
        self._known.move_to_end(id(picture))
        if len(self._known) > MAX_DIGESTS:
            self._known.popitem(last=False)
        return known[1]
