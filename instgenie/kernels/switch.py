"""Decides whether kernels run: one switch, and a check that Triton works on the device. Knows no kernel but the one
that tries it."""

import contextlib
import warnings
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None  # only CUDA builds of torch come with it
triton: Any = import_module("triton") if HAS_TRITON else SimpleNamespace(jit=lambda **options: lambda kernel: kernel)
tl: Any = import_module("triton.language") if HAS_TRITON else SimpleNamespace(constexpr=int)

ENABLED = True  # if False, references run everywhere


def runs_fused(x: Tensor) -> bool:
    """True if kernels run on this tensor: Triton runs on the current device only."""
    return ENABLED and x.is_cuda and x.device.index == torch.cuda.current_device() and compiles(x.device)


@contextlib.contextmanager
def kernels(enabled: bool) -> Iterator[None]:
    """Turn all kernels on or off inside the block."""
    global ENABLED
    before, ENABLED = ENABLED, enabled
    try:
        yield
    finally:
        ENABLED = before


@cache
def compiles(device: torch.device) -> bool:
    """True if Triton works on the device, which takes a C compiler and a supported GPU: tried once per device."""
    if not HAS_TRITON:
        return False
    x = torch.zeros(8, device=device)
    try:
        add_one[(1,)](x, num_values=8)
    except Exception as error:  # of any kind: the references do the work
        warnings.warn(f"Triton does not run on {device}, so steps will be slower: {error}", stacklevel=2)
        return False
    return bool((x == 1).all())


@triton.jit()
def add_one(x, num_values: tl.constexpr):  # type: ignore[no-untyped-def]
    places = x + tl.arange(0, num_values)
    tl.store(places, tl.load(places) + 1)


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def num_warps(width: int) -> int:
    """Warps of a program that holds a row of so many values."""
    return 4 if width <= 2048 else 8 if width <= 8192 else 16
