"""Fills modules with the weights of their files: straight to their device, in their final form, many pieces at once.

A tensor that stays on the CPU in the dtype of its file is not read at all: it is the mapped file. Every other one is
brought piece by piece, several threads at a time. A piece of a tensor in e4m3 is some of its rows, which are quantised
on their own, so the device never has more of the unquantised weights than a piece per thread.

For a GPU each thread has two page-locked buffers. The system copies a piece of the file into one while the GPU takes
the other. Reading is cheaper than mapping here: a mapped page is first found missing, then entered, then copied into
page-locked memory all the same.
"""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from instgenie.kernels.quantize import quantize_rows_reference
from instgenie.machine.files import read_into
from instgenie.machine.pages import lock_pages
from instgenie.models.layers.fp8_linear import Fp8Weights
from instgenie.models.loading.skeleton import Rooms, Skeleton, kept_dtype, tensor_named
from instgenie.models.loading.stored import StoredTensor
from instgenie.types import OnBytes

PIECE_BYTES = 16 * 2**20
NUM_BUFFERS = 2  # per thread
MAX_THREADS = 8


@dataclass(frozen=True, eq=False)
class Target:
    """A tensor that is filled piece by piece."""

    source: StoredTensor
    values: Tensor
    scale: Tensor | None = None  # of rows in e4m3; None: the values are plain numbers
    dtype: torch.dtype = torch.float32  # in which rows are quantised

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Numbers of values, from one up to another; whole rows where rows are quantised."""
        unit = 1 if self.scale is None else self.values.shape[1]
        step = max(PIECE_BYTES // self.source.dtype.itemsize // unit, 1) * unit
        for first in range(0, self.source.num_values, step):
            yield first, min(first + step, self.source.num_values)

    def put(self, first: int, piece: Tensor) -> None:
        """Write a piece of the file, a flat tensor, at its place."""
        end, device = first + len(piece), self.values.device
        if self.scale is None:
            place = self.values.view(-1)[first:end]
            is_other = piece.dtype != place.dtype and piece.device != device
            place.copy_(piece.to(device, non_blocking=True) if is_other else piece, non_blocking=True)
            return
        width = self.values.shape[1]
        rows = slice(first // width, end // width)
        kept = quantize_rows_reference(piece.to(device, non_blocking=True).to(self.dtype).view(-1, width))
        self.values[rows] = kept.values.view(self.values.dtype)
        self.scale[rows] = kept.scale[:, 0]


class StagedReader:
    """Reads pieces of files into page-locked buffers, and copies them to a GPU on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)  # of this thread
        self.stream = torch.cuda.Stream(device)
        self.buffers = [lock_pages(PIECE_BYTES) for _ in range(NUM_BUFFERS)]
        self.copied = [torch.cuda.Event() for _ in self.buffers]
        self.files: dict[str, int] = {}
        self.turn = 0

    def bring(self, target: Target, first: int, end: int) -> None:
        source, number = target.source, self.turn
        self.turn = (number + 1) % NUM_BUFFERS
        self.copied[number].synchronize()
        size = source.dtype.itemsize
        memory = self.buffers[number][: (end - first) * size]
        place = memoryview(memory.numpy().data)
        read_into(self.open(str(source.file.path)), [place], source.first + first * size)
        with torch.cuda.stream(self.stream):
            target.put(first, memory.view(source.dtype))
            self.copied[number].record(self.stream)

    def open(self, path: str) -> int:
        if path not in self.files:
            self.files[path] = os.open(path, os.O_RDONLY)
        return self.files[path]

    def close(self) -> None:
        self.stream.synchronize()
        for file in self.files.values():
            os.close(file)


@torch.inference_mode(False)  # threads that write into what is made here are not in this mode
def fill(
    skeletons: Sequence[Skeleton], device: torch.device, dtype: torch.dtype, on_bytes: OnBytes | None = None
) -> None:
    """Give the modules their weights. What no file holds, such as tables, stays as it is and where it is."""
    exchanged: dict[int, Tensor] = {}  # new tensors, by the ids of those that they replace
    places = [(skeleton.module, *named) for skeleton in skeletons for named in skeleton.sources.items()]
    places.sort(key=lambda place: (place[2].file.path, place[2].first))  # a disk reads best in order
    brought = []
    for module, name, source in places:
        if is_mapped(module, name, source, device, dtype):
            exchanged[id(tensor_named(module, name))] = source.mapped()
        else:
            brought.append((module, name, source))
    total, done, rooms = sum(source.num_bytes for _, _, source in brought), 0, Rooms(device)
    for num_bytes in bring_all((make_target(*place, rooms, dtype, exchanged) for place in brought), device):
        done += num_bytes
        if on_bytes:
            on_bytes(done, total)
    for skeleton in skeletons:
        exchange(skeleton.module, exchanged)


def is_mapped(module: nn.Module, name: str, source: StoredTensor, device: torch.device, dtype: torch.dtype) -> bool:
    """True if a tensor is used as it lies in its file."""
    is_same = device.type == "cpu" and source.dtype == kept_dtype(source, dtype)
    return is_same and not isinstance(owner_of(module, name), Fp8Weights)


def make_target(
    module: nn.Module,
    name: str,
    source: StoredTensor,
    rooms: Rooms,
    dtype: torch.dtype,
    exchanged: dict[int, Tensor],
) -> Target:
    """Allocate a tensor on the device."""
    owner, old = owner_of(module, name), tensor_named(module, name)
    if isinstance(owner, Fp8Weights) and old is owner.weight:
        values, scale = rooms.make(old), rooms.make(owner.scale)
        exchanged |= {id(old): values, id(owner.scale): scale}
        return Target(source, values, scale, owner.dtype)
    values = rooms.make(old, kept_dtype(source, dtype))
    exchanged[id(old)] = values
    return Target(source, values)


def bring_all(targets: Iterable[Target], device: torch.device) -> Iterator[int]:
    """Fill the targets. Yields the bytes of each piece that is there. A CPU works on one piece with all its cores."""
    if device.type == "cpu":
        for target in targets:
            values = target.source.mapped().view(-1)
            for first, end in target.pieces():
                target.put(first, values[first:end])
                yield (end - first) * target.source.dtype.itemsize
        return
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    torch.cuda.synchronize(device)  # whatever still reads memory that is given out again
    own, readers = threading.local(), []

    def start() -> None:
        own.reader = StagedReader(device)
        readers.append(own.reader)

    def bring(target: Target, first: int, end: int) -> int:
        own.reader.bring(target, first, end)
        return (end - first) * target.source.dtype.itemsize

    pool = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "weights", start)
    try:
        pieces = [pool.submit(bring, target, *piece) for target in targets for piece in target.pieces()]
        for piece in as_completed(pieces):
            yield piece.result()
    finally:
        pool.shutdown(cancel_futures=True)
        for reader in readers:
            reader.close()


def exchange(module: nn.Module, tensors: Mapping[int, Tensor]) -> None:
    """Put tensors in the places of others, which are named by their ids; what was tied stays tied."""
    made: dict[int, nn.Parameter] = {}  # by the same ids
    for owner in module.modules():
        for name, old in list(owner._parameters.items()):
            if old is not None and id(old) in tensors:
                new = made.setdefault(id(old), nn.Parameter(tensors[id(old)], requires_grad=False))
                owner._parameters[name] = new
        for name, table in list(owner._buffers.items()):
            if table is not None and id(table) in tensors:
                owner._buffers[name] = tensors[id(table)]


def owner_of(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])
