"""Tensors that lie behind each other in one piece of memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes


@dataclass(frozen=True)
class Form:
    """Of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """With what it takes to align the next."""
        return -(-self.num_own_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def num_own_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def carve(memory: Tensor, forms: Sequence[Form]) -> list[Tensor]:
    """Tensors of these forms out of memory [..., bytes]: [..., *shape]."""
    starts = accumulate((form.num_bytes for form in forms), initial=0)
    return [
        memory[..., start : start + form.num_own_bytes].view(form.dtype).view(*memory.shape[:-1], *form.shape)
        for start, form in zip(starts, forms, strict=False)
    ]
