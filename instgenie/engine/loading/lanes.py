"""The ways of rows to a device, beside what computes there: a stream on a CUDA device, a thread on a CPU. A lane knows
buffers, how to fill them and how to wait; not what is loaded when.

Loads run one after the other in the order in which they are started. A buffer is filled anew once whoever computes has
released it.
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
from instgenie.kernels.packed import unpack_rows, unpacked_shape

Rows = Literal["auto", "whole", "needed"]  # what is copied: all rows of a place, those that are read, or what is faster
GATHER_SLOWDOWN = 55 / 51  # of a byte that a kernel reads from page-locked memory, against one that is copied with all


@dataclass(frozen=True, eq=False)
class Load:
    """One thing that is read of one template."""

    place: int
    activations: Activations
    kept: Tensor  # [2 or 1, tokens, width or bytes], where it lies
    needed: Tensor  # [rows], those that are read
    room: Tensor  # [2 or 1, tokens, width or bytes], for it to come to; of no bytes where it need not come


class Lane(Protocol):
    def make_room(self, num_bytes: int) -> Tensor:
        """Memory [bytes] for buffers."""

    def settle(self, needed: Iterable[Tensor]) -> None:
        """What is started from here on comes after all that was computed so far: buffers may lie otherwise, and these
        rows are what loads will ask for."""

    def form(self, activations: Activations, kept: Tensor) -> TensorSpec:
        """Of what a load needs in a buffer."""

    def start(self, buffer: int, loads: Sequence[Load]) -> None: ...

    def wait(self, buffer: int) -> None:
        """Whoever computes goes on once the buffer is filled."""

    def release(self, buffer: int) -> None:
        """What was computed so far was the last to read the buffer."""

    def take(self, load: Load) -> Tensor:
        """What was loaded, as the model reads it."""


class StreamLane:
    """A stream beside the one that computes. Nothing here waits for the device: events order the two."""

    def __init__(self, device: torch.device, rows: Rows = "auto") -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.rows = rows
        self.stream = torch.cuda.Stream(self.device)
        self._filled: dict[int, torch.cuda.Event] = {}
        self._released: dict[int, torch.cuda.Event] = {}

    @torch.inference_mode(False)
    def make_room(self, num_bytes: int) -> Tensor:
        room = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        room.record_stream(self.stream)  # it is nobody else's before both streams are done with it
        return room

    def settle(self, needed: Iterable[Tensor]) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        for index in needed:
            index.record_stream(self.stream)  # a job may be gone before a load that was started for it

    def form(self, activations: Activations, kept: Tensor) -> TensorSpec:
        shape = (0,) if kept.device == self.device else tuple(kept.shape)
        return TensorSpec(shape, kept.dtype)

    def start(self, buffer: int, loads: Sequence[Load]) -> None:
        if released := self._released.get(buffer):
            self.stream.wait_event(released)
        with torch.cuda.stream(self.stream):
            self.fill(loads)
        self._filled.setdefault(buffer, torch.cuda.Event()).record(self.stream)

    def fill(self, loads: Sequence[Load]) -> None:
        for load in loads:
            if load.room.numel():
                self.copy(load)

    def copy(self, load: Load) -> None:
        if self.copies_needed(load):
            copy_rows_fused(load.kept, load.needed, load.room)
        else:
            load.room.copy_(load.kept, non_blocking=True)

    def copies_needed(self, load: Load) -> bool:
        if self.rows == "whole" or not can_copy_rows(load.kept, load.room):
            return False
        share = len(load.needed) / load.kept.shape[1]
        return self.rows == "needed" or share * GATHER_SLOWDOWN < 1

    def wait(self, buffer: int) -> None:
        torch.cuda.current_stream(self.device).wait_event(self._filled[buffer])

    def release(self, buffer: int) -> None:
        event = self._released.setdefault(buffer, torch.cuda.Event())
        event.record(torch.cuda.current_stream(self.device))

    def take(self, load: Load) -> Tensor:
        return load.activations.readable(load.room if load.room.numel() else load.kept)


class ThreadLane:
    """A thread that unpacks; rows that need no unpacking share their memory with whoever computes."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "lane")
        self._filled: dict[int, Future[None]] = {}

    @torch.inference_mode(False)
    def make_room(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def settle(self, needed: Iterable[Tensor]) -> None:
        """What was computed so far is done; what was started goes first, for there is one thread."""

    def form(self, activations: Activations, kept: Tensor) -> TensorSpec:
        return TensorSpec(unpacked_shape(kept), activations.dtype)

    def start(self, buffer: int, loads: Sequence[Load]) -> None:
        self._filled[buffer] = self._thread.submit(self.fill, loads)

    @torch.inference_mode()
    def fill(self, loads: Sequence[Load]) -> None:
        for load in loads:
            unpack_rows(load.kept, load.room)

    def wait(self, buffer: int) -> None:
        self._filled[buffer].result()

    def release(self, buffer: int) -> None:
        """Whoever computes is done with it when it says so."""

    def take(self, load: Load) -> Tensor:
        return load.room


def make_lane(device: torch.device, rows: Rows = "auto") -> Lane:
    return StreamLane(device, rows) if device.type == "cuda" else ThreadLane()
