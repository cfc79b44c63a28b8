"""A LoRA in memory: the low-rank products that it adds to layers. All its tensors lie in one block of memory, which
moves to a device as a whole."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from instgenie.adapters.header import ITEM_BYTES
from instgenie.adapters.plan import FileSpan, LoraPiece, LoraPlan
from instgenie.errors import LoraError
from instgenie.kernels.low_rank import LowRank
from instgenie.machine.files import read_into
from instgenie.machine.pages import empty_pages
from instgenie.machine.stored_dtypes import STORED_DTYPES


@dataclass(frozen=True, eq=False)
class Lora:
    memory: Tensor  # [numbers]
    pieces: tuple[LoraPiece, ...]

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes

    @cached_property
    def layers(self) -> dict[tuple[str, str], LowRank]:
        """By part and name of the layer; all are views of the block."""
        return {(piece.part, piece.layer): self.view(piece) for piece in self.pieces}

    def view(self, piece: LoraPiece) -> LowRank:
        down, up = (
            self.memory[start : start + math.prod(shape)].view(shape)
            for start, shape in ((piece.down, piece.down_shape), (piece.up, piece.up_shape))
        )
        return LowRank(down, up, piece.scale)

    def to(self, target: torch.device | torch.dtype) -> "Lora":
        return replace(self, memory=self.memory.to(target))


def read_lora(file: int, plan: LoraPlan, each: Callable[..., Iterable[None]] = map) -> Lora:
    """Read an open file into main memory, in its own dtype; in float32 if it has several. `each` is the map of a pool
    of threads, if several are to read. Raises an OSError for a file that cannot be read."""
    block = empty_pages(plan.num_bytes)
    list(each(lambda spans: read_spans(file, block, spans), plan.stretches))
    alphas = {key: read_number(file, about.dtype, about.first) for key, about in plan.alphas.items()}
    for key, alpha in alphas.items():
        if not math.isfinite(alpha):
            raise LoraError(f"the key {key!r} is {alpha}: a finite number is expected")
    parts = [block[group.first : group.end].view(STORED_DTYPES[group.dtype]) for group in plan.groups]
    memory = parts[0] if len(parts) == 1 else torch.cat([block[:0].float(), *(part.float() for part in parts)])
    return Lora(memory, scaled(plan, alphas) if alphas else plan.pieces)


def scaled(plan: LoraPlan, alphas: Mapping[str, float]) -> tuple[LoraPiece, ...]:
    """The pieces with the alphas of the file."""
    return tuple(
        replace(piece, scale=piece.scale * alphas[key]) if key else piece
        for piece, key in zip(plan.pieces, plan.alpha_keys, strict=True)
    )


def read_spans(file: int, block: Tensor, spans: Sequence[FileSpan]) -> None:
    """Read a stretch of the file into the places of its spans."""
    memory = memoryview(block.numpy().data)
    places = [memory[span.place : span.place + span.num_bytes] for span in spans]
    read_into(file, places, spans[0].first)


def read_number(file: int, dtype: str, first: int) -> float:
    read = bytearray(ITEM_BYTES[dtype])
    read_into(file, [memoryview(read)], first)
    return float(torch.frombuffer(read, dtype=STORED_DTYPES[dtype])[0])


def check_finite(path: Path) -> None:
    """Raise a LoraError that names the first key whose values are not all finite. Large values that only the model's
    dtype cannot hold are none of these."""
    try:
        with safe_open(path, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118, it is no mapping
                values = tensors.get_tensor(key).float()
                if bad := int((~values.isfinite()).sum()):
                    raise LoraError(
                        f"the key {key!r} has {bad:,} of {values.numel():,} values that are not finite numbers"
                    )
    except SafetensorError as error:
        raise LoraError(f"{path.name} is not a whole safetensors file: {error}") from error
