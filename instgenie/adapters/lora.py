"""A LoRA in memory: the low-rank products that it adds to layers. All its tensors lie in one block of memory, which
moves to a device in a single copy."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from instgenie.adapters.files import LoraFile
from instgenie.adapters.fitting import Fitted
from instgenie.errors import LoraError
from instgenie.kernels.low_rank import LowRank

ALIGNMENT = 16  # bytes between the starts of tensors, as kernels prefer it


@dataclass(frozen=True)
class LoraPiece:
    """Where the two tensors of a layer lie in the block."""

    part: str
    layer: str
    down: int  # first number
    down_shape: tuple[int, ...]
    up: int
    up_shape: tuple[int, ...]
    scale: float  # alpha / rank


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

    def to(self, device: torch.device) -> "Lora":
        """A copy on a device; asynchronous from pinned memory."""
        return Lora(self.memory.to(device, non_blocking=True), self.pieces)


def read_lora(file: LoraFile, fitted: Sequence[Fitted], dtype: torch.dtype, pins: bool = False) -> Lora:
    """Read the tensors of a file into main memory, in the dtype of the model. With `pins` it is memory that is copied
    to a GPU without the host's help. Raises a LoraError for a file that cannot be read, and for values that are no
    finite numbers."""
    found: list[tuple[str, str, Tensor, Tensor, float]] = []
    tensors_read: list[tuple[str, Tensor]] = []
    try:
        with safe_open(file.path, framework="pt") as tensors:
            for one in fitted:
                down, up = tensors.get_tensor(one.down), tensors.get_tensor(one.up).flatten(1)
                alpha = float(tensors.get_tensor(one.alpha).flatten()[0]) if one.alpha else None
                tensors_read += [(one.down, down), (one.up, up)]
                found += read_pair(one, down, up, alpha)
            lora = pack_lora(found, dtype, pins)
            if not lora.memory.isfinite().all():  # one look at all of it
                check_finite(tensors_read)
    except (SafetensorError, OSError) as error:
        raise LoraError(f"{file.path.name} is not a whole safetensors file: {error}") from error
    return lora


def check_finite(tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Raise a LoraError that names the first key whose values are not all finite. Large values that only the model's
    dtype cannot hold are none of these."""
    for key, tensor in tensors:
        bad = int((~tensor.float().isfinite()).sum())
        if bad:
            raise LoraError(f"the key {key!r} has {bad:,} of {tensor.numel():,} values that are not finite numbers")


def read_pair(
    one: Fitted, down: Tensor, up: Tensor, alpha: float | None
) -> Iterator[tuple[str, str, Tensor, Tensor, float]]:
    """Yield per layer: part, name, down, up and scale. Layers that one pair patches share `down`."""
    scale = one.settings_scale if alpha is None else alpha / one.rank
    if scale is not None and not math.isfinite(scale):
        raise LoraError(f"the key {one.alpha!r} is {alpha}: a finite number is expected")
    if one.swaps_halves:
        up = torch.cat(up.chunk(2)[::-1])
    for layer, part in zip(one.layers, up.split(one.num_outputs), strict=True):
        yield one.part, layer, down, part, 1.0 if scale is None else scale


def pack_lora(found: Sequence[tuple[str, str, Tensor, Tensor, float]], dtype: torch.dtype, pins: bool = False) -> Lora:
    """Put tensors one behind the other. One that several layers share is there once."""
    step = ALIGNMENT // dtype.itemsize
    places: dict[int, int] = {}
    size = 0
    for tensor in (tensor for _, _, down, up, _ in found for tensor in (down, up)):
        if id(tensor) not in places:
            places[id(tensor)] = size
            size += -(-tensor.numel() // step) * step
    memory = torch.empty(size, dtype=dtype, pin_memory=pins).zero_()
    pieces = []
    for part, layer, down, up, scale in found:
        shape = tuple(down.shape) if down.ndim == 4 and down.shape[2:] != (1, 1) else (len(down), down[0].numel())
        pieces.append(LoraPiece(part, layer, places[id(down)], shape, places[id(up)], tuple(up.shape), scale))
        for tensor in (down, up):
            start = places[id(tensor)]
            memory[start : start + tensor.numel()] = tensor.flatten()
    return Lora(memory, tuple(pieces))
