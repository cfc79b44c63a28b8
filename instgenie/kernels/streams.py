"""Two pieces of work that do not depend on each other, at the same time: one may be bound by memory, the other by
arithmetic."""

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

First = TypeVar("First")
Second = TypeVar("Second")


def beside(first: Callable[[], First], second: Callable[[], Second], x: Tensor) -> tuple[First, Second]:
    """Run both and return their results. While a graph is captured on the device of x, the first is captured on a
    stream of its own; launches that are not captured are not worth the events that order the streams.

    No tensor that the first reads may be freed before both have run: the functions hold what they read. What the first
    allocates is reused on its own stream alone, after that has waited for all earlier work.
    """
    if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return first(), second()
    main, side = torch.cuda.current_stream(x.device), side_stream(x.device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        one = first()
    other = second()
    main.wait_stream(side)
    return one, other


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
