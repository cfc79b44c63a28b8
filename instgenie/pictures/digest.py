"""Digests that tell pictures apart by their pixels."""

import hashlib
import weakref

from instgenie.types import Pixels


def digest(picture: Pixels) -> str:
    """Hash the size and the pixels of a decoded picture."""
    hashed = hashlib.sha256(str(picture.shape).encode())
    hashed.update(picture.tobytes())
    return hashed.hexdigest()


class Digests:
    """Remembers the digests of live pictures, so that an array is hashed once. It keeps no picture alive; pictures must
    not be changed."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Pixels], str]] = {}

    def of(self, picture: Pixels) -> str:
        number = id(picture)
        known = self._known.get(number)
        if known is None or known[0]() is not picture:
            gone = weakref.ref(picture, lambda _: self._known.pop(number, None))
            known = self._known[number] = gone, digest(picture)
        return known[1]

    def __len__(self) -> int:
        return len(self._known)
