"""Measures of pictures and masks that take milliseconds per megapixel: digests, which tell pictures apart by their
pixels, and masked shares. Each is computed once per array; `measure` computes them ahead, in a thread that may wait."""

import hashlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from instgenie.types import PixelMask, Pixels

Out = TypeVar("Out")


def digest(picture: Pixels) -> str:
    """Hash the size and the pixels of a decoded picture."""
    hashed = hashlib.sha256(str(picture.shape).encode())
    hashed.update(np.ascontiguousarray(picture).data)  # no copy, and other threads go on meanwhile
    return hashed.hexdigest()


def digest_all(pictures: Sequence[Pixels]) -> str:
    """A digest of several pictures in their order; empty if there are none."""
    return hashlib.sha256(" ".join(map(digest, pictures)).encode()).hexdigest() if pictures else ""


def share(mask: PixelMask) -> float:
    """The masked share of the pixels; 1 only if all are masked."""
    return int(np.count_nonzero(mask)) / mask.size


class ArrayMemo(Generic[Out]):
    """Remembers a function's results for arrays that live. It keeps none alive; arrays must not be changed."""

    def __init__(self, compute: Callable[[NDArray[Any]], Out]) -> None:
        self._compute = compute
        self._known: dict[int, tuple[weakref.ref[NDArray[Any]], Out]] = {}

    def of(self, array: NDArray[Any]) -> Out:
        number = id(array)
        known = self._known.get(number)
        if known is None or known[0]() is not array:
            gone = weakref.ref(array, lambda _: self._known.pop(number, None))
            known = self._known[number] = gone, self._compute(array)
        return known[1]

    def __len__(self) -> int:
        return len(self._known)


_digests = ArrayMemo(lambda picture: digest(picture))
_shares = ArrayMemo(lambda mask: share(mask))


def picture_digest(picture: Pixels) -> str:
    return _digests.of(picture)


def masked_share(mask: PixelMask) -> float:
    return _shares.of(mask)


def measure(picture: Pixels, mask: PixelMask | None = None) -> None:
    """Compute what the cluster will ask for."""
    picture_digest(picture)
    if mask is not None:
        masked_share(mask)
