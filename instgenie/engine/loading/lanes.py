"""Lanes that move rows to a device beside its computing: a stream on a CUDA device, a thread on a CPU. A lane knows
buffers, how to fill them and how to wait for them; not what is loaded when.

Transfers run one after the other in the order in which they are started. A buffer is refilled once the computation that
reads it has released it.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from instgenie.cache.buffers import TensorSpec
from instgenie.jobs.activations import Activations
from instgenie.kernels.copy import can_copy_rows, copy_rows_fused
from instgenie.kernels.packed import PackedRows, unpack_rows, unpacked_shape

RowChoice = Literal["auto", "whole", "needed"]  # copy all rows of a place, only those that are read, or the faster
GATHER_SLOWDOWN = 55 / 51  # time per byte that a kernel reads from page-locked memory, against a plain copy


@dataclass(frozen=True, eq=False)
class Transfer:
    """Rows of one place of a template, on their way to a buffer."""

    place: int
    activations: Activations
    kept: Tensor  # [2 or 1, tokens, width or bytes], the rows where the activations keep them
    needed: Tensor  # [rows], those that are read
    room: Tensor  # [2 or 1, tokens, width or bytes], the target; empty if the rows need not move


class Lane(Protocol):
    def make_room(self, num_bytes: int) -> Tensor:
        """Allocate memory for buffers [bytes]."""

    def settle(self, needed: Iterable[Tensor]) -> None:
        """Let transfers that start from here on come after everything computed so far: buffers may move. Later
        transfers read these lists of needed rows."""

    def form(self, activations: Activations, kept: Tensor) -> TensorSpec:
        """The room that a transfer needs in a buffer."""

    def start(self, buffer: int, transfers: Sequence[Transfer]) -> None: ...

    def wait(self, buffer: int) -> None:
        """Let the computation go on once the buffer is filled."""

    def release(self, buffer: int) -> None:
        """Declare that everything that reads the buffer has been started."""

    def take(self, transfer: Transfer) -> Tensor | PackedRows:
        """The transferred rows as the model reads them."""


class StreamLane:
    """A stream beside the one that computes. The host never waits for the device: events order the two streams."""

    def __init__(self, device: torch.device, rows: RowChoice = "auto") -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.rows = rows
        self.stream = torch.cuda.Stream(self.device)
        self._filled: dict[int, torch.cuda.Event] = {}
        self._released: dict[int, torch.cuda.Event] = {}

    @torch.inference_mode(False)
    def make_room(self, num_bytes: int) -> Tensor:
        room = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        room.record_stream(self.stream)  # not reused before both streams are done with it
        return room

    def settle(self, needed: Iterable[Tensor]) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        for index in needed:
            index.record_stream(self.stream)  # a job may be gone before a transfer that was started for it

    def form(self, activations: Activations, kept: Tensor) -> TensorSpec:
        shape = (0,) if kept.device == self.device else tuple(kept.shape)
        return TensorSpec(shape, kept.dtype)

    def start(self, buffer: int, transfers: Sequence[Transfer]) -> None:
        if released := self._released.get(buffer):
            self.stream.wait_event(released)
        with torch.cuda.stream(self.stream):
            self.fill(transfers)
        self._filled.setdefault(buffer, torch.cuda.Event()).record(self.stream)

    def fill(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            if transfer.room.numel():
                self.copy(transfer)

    def copy(self, transfer: Transfer) -> None:
        if self.copies_needed(transfer):
            copy_rows_fused(transfer.kept, transfer.needed, transfer.room)
        else:
            transfer.room.copy_(transfer.kept, non_blocking=True)

    def copies_needed(self, transfer: Transfer) -> bool:
        if self.rows == "whole" or not can_copy_rows(transfer.kept, transfer.room):
            return False
        share = len(transfer.needed) / transfer.kept.shape[1]
        return self.rows == "needed" or share * GATHER_SLOWDOWN < 1

    def wait(self, buffer: int) -> None:
        torch.cuda.current_stream(self.device).wait_event(self._filled[buffer])

    def release(self, buffer: int) -> None:
        event = self._released.setdefault(buffer, torch.cuda.Event())
        event.record(torch.cuda.current_stream(self.device))

    def take(self, transfer: Transfer) -> Tensor | PackedRows:
        return transfer.activations.source(transfer.room if transfer.room.numel() else transfer.kept)


class ThreadLane:
    """A thread that unpacks rows into buffers."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "lane")
        self._filled: dict[int, Future[None]] = {}

    @torch.inference_mode(False)
    def make_room(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def settle(self, needed: Iterable[Tensor]) -> None:
        """Do nothing: on a CPU everything computed so far is done, and the one thread keeps transfers in order."""

    def form(self, activations: Activations, kept: Tensor) -> TensorSpec:
        if not activations.packs(kept):
            return TensorSpec(tuple(kept.shape), kept.dtype)
        return TensorSpec(unpacked_shape(kept, activations.key.cache_dtype), activations.dtype)

    def start(self, buffer: int, transfers: Sequence[Transfer]) -> None:
        self._filled[buffer] = self._thread.submit(self.fill, transfers)

    @torch.inference_mode()
    def fill(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            if transfer.activations.packs(transfer.kept):
                unpack_rows(transfer.kept, transfer.room, transfer.activations.key.cache_dtype)
            else:
                transfer.room.copy_(transfer.kept)

    def wait(self, buffer: int) -> None:
        self._filled[buffer].result()

    def release(self, buffer: int) -> None:
        """Do nothing: what reads the buffer on a CPU is done by now."""

    def take(self, transfer: Transfer) -> Tensor:
        return transfer.room


def make_lane(device: torch.device, rows: RowChoice = "auto") -> Lane:
    return StreamLane(device, rows) if device.type == "cuda" else ThreadLane()
