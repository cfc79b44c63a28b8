"""Functions over fixed tensors, captured as CUDA graphs when they are asked for the second time. Knows no batch and no
network.

A captured function reads its inputs at addresses that never change, and so do the launches of its graph. Whoever calls
it copies inputs there first. Functions are told apart by keys: everything that changes their launches is part of one.
On a device without graphs a captured function runs over the same tensors, launch by launch.
"""

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

MAX_SEEN = 1024
NUM_WARM_UPS = 2  # before the first capture; later captures have run uncaptured before

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(eq=False)
class FixedTensor:
    """A tensor at an address that never changes, and a reference to the tensor last copied into it."""

    tensor: Tensor
    source: weakref.ref[Tensor] | None = None

    def copy(self, source: Tensor) -> None:
        """Copy a tensor that is never written to, unless it was the last to be copied."""
        if self.source is None or self.source() is not source:
            self.tensor.copy_(source, non_blocking=True)
            self.source = weakref.ref(source)


class FixedTensors:
    """Fixed tensors by name and shape. Captured functions share them: only one runs at a time."""

    def __init__(self) -> None:
        self._tensors: weakref.WeakValueDictionary[tuple[str, torch.Size, torch.dtype], FixedTensor]
        self._tensors = weakref.WeakValueDictionary()  # they go with the last captured function that reads them

    def take(self, name: str, like: Tensor) -> FixedTensor:
        key = name, like.shape, like.dtype
        found = self._tensors.get(key)
        if found is None:
            found = self._tensors[key] = FixedTensor(torch.empty_like(like))
        return found

    def take_all(self, names: Sequence[str], columns: Sequence[Tensor]) -> "FixedColumns":
        return FixedColumns(tuple(map(self.take, names, columns)))


@dataclass(frozen=True, eq=False)
class FixedColumns:
    fixed: tuple[FixedTensor, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [one.tensor for one in self.fixed]

    def copy(self, columns: Sequence[Tensor]) -> None:
        for one, column in zip(self.fixed, columns, strict=True):
            one.copy(column)


class Captures(Generic[T]):
    """Captured functions by key, of which one runs at a time: they share fixed tensors and memory. The first time a key
    is asked for, nothing is captured. When there are too many, the least recently used is dropped."""

    def __init__(self, device: torch.device, max_graphs: int) -> None:
        self.device, self.max_graphs = device, max_graphs
        self.tensors = FixedTensors()
        self.captured: OrderedDict[Hashable, T] = OrderedDict()
        self.seen: OrderedDict[Hashable, None] = OrderedDict()
        self.refused: set[Hashable] = set()
        self.reasons: set[str] = set()
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def find_or_capture(self, key: Hashable, make: Callable[[], T]) -> T | None:
        """Return what was captured for a key, captured now if the key is seen for the second time; None: run it as it
        is. A key whose capture has failed is never tried again."""
        found = self.captured.get(key)
        if found is None:
            if key in self.refused or not self.is_known(key):
                return None
            try:
                found = self.captured[key] = make()
            except RuntimeError as error:  # out of memory, or a call that cannot be captured
                self.explain(str(error).splitlines()[0])
                self.refused.add(key)
                return None
        self.captured.move_to_end(key)
        while len(self.captured) > self.max_graphs:
            self.captured.popitem(last=False)
        return found

    def is_known(self, key: Hashable) -> bool:
        """Return whether a key was seen before, and remember it."""
        is_known = key in self.seen
        self.seen[key] = None
        if len(self.seen) > MAX_SEEN:
            self.seen.popitem(last=False)
        return is_known

    def explain(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.add(reason)
            log.warning("a pass is not captured, and slower: %s", reason)

    def repeatable(self, run: Callable[[], Sequence[Tensor]]) -> Callable[[], Sequence[Tensor]]:
        """Return a function that repeats the launches of `run`. Its results belong to the caller: those of the graph
        itself are written over by the next replay."""
        if self.device.type != "cuda":
            return run
        out: list[Sequence[Tensor]] = []
        graph = self.record(lambda: out.append(run()))
        del out[:-1]

        def replay() -> list[Tensor]:
            graph.replay()
            return [tensor.clone() for tensor in out[0]]

        return replay

    def record(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Capture the launches of `run`; before the first capture it runs a few times without.

        A graph that is replayed on a stream of its own is captured on that stream, too. Libraries keep memory to work
        in per stream on which they were called, also for the calls that a graph repeats: two graphs that were captured
        on one stream may not run beside each other. The default stream cannot be captured; graphs that are replayed
        there run one after the other, and share the stream that torch keeps for captures."""
        current = torch.cuda.current_stream(self.device)
        own = None if current == torch.cuda.default_stream(self.device) else current
        side = own or torch.cuda.Stream(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(0 if self.captured else NUM_WARM_UPS):  # libraries allocate what they need
                run()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"  # other threads go on to load
        with torch.cuda.stream(current), torch.cuda.graph(graph, self.pool, own, mode):  # also after a failed capture
            run()
        return graph
