"""Tensors laid out one after the other in one piece of memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor to come."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Including padding that aligns the next tensor."""
        return -(-self.num_own_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def num_own_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def carve(memory: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Cut memory [..., bytes] into tensors [..., *shape], one per spec."""
    starts = accumulate((spec.num_bytes for spec in specs), initial=0)
    return [
        memory[..., start : start + spec.num_own_bytes].view(spec.dtype).view(*memory.shape[:-1], *spec.shape)
        for start, spec in zip(starts, specs, strict=False)
    ]
