"""Passes captured as CUDA graphs: one launch instead of thousands. Knows passes and their columns; knows no family.

A pass is captured over columns of its own, at addresses that never change. To take a step, the columns of the jobs at
hand are copied into them, the graph runs, and its predictions are read. Rows of activations are not copied: a table
says where they lie, and the graph reads them there. Those that are not on the device are brought a step ahead. Passes
that differ in nothing but the values of columns and rows share a graph; lists of masked tokens are padded, so that many
masks do, and those of a UNet, whose tokens cost less than its launches, so that almost all do.

What is seen for the first time runs as it is, the second time it is captured. Of captured passes the longest unused is
forgotten. On a device without graphs the same passes run over the same columns, launch by launch.
"""

import logging
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from instgenie.engine.loading.route import is_far, needs_loading, places_of
from instgenie.engine.loading.staging import Staging
from instgenie.jobs.job import Job, TableRows
from instgenie.kernels.switch import runs_fused
from instgenie.models.model import Model

MAX_GRAPHS = 128
MAX_SEEN = 1024
NUM_WARM_UPS = 2  # before the first capture; what is captured later has run as it is before

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Captured:
    """A pass over columns of its own."""

    table: Tensor  # [places, readers], int64
    replay: Callable[[], Tensor]


class Columns:
    """Tensors at addresses that never change. Passes of one shape share them: only one of them runs at a time."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}
        self._copied: dict[str, tuple[Tensor, weakref.ref[Tensor]]] = {}

    def take(self, name: str, like: Tensor) -> Tensor:
        key = name, like.shape, like.dtype
        if key not in self._tensors:
            self._tensors[key] = torch.empty_like(like)
        return self._tensors[key]

    def copy(self, name: str, source: Tensor) -> None:
        """What was the last to be copied there, and is never written to, is there already."""
        target = self.take(name, source)
        last = self._copied.get(name)
        if last is None or last[0] is not target or last[1]() is not source:
            target.copy_(source, non_blocking=True)
            self._copied[name] = target, weakref.ref(source)


class Graphs:
    def __init__(self, model: Model, max_graphs: int = MAX_GRAPHS, max_readers: int | None = None) -> None:
        self.model = model
        self.max_graphs = max_graphs
        self.max_readers = model.max_captured if max_readers is None else max_readers
        self.columns = Columns()
        self.captured: OrderedDict[Hashable, Captured] = OrderedDict()
        self.seen: OrderedDict[Hashable, None] = OrderedDict()
        self.refused: set[Hashable] = set()
        self.reasons: set[str] = set()
        self.staging = Staging(model.device, max_staged_bytes(model.device))
        self.pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None

    def takes(self, jobs: Sequence[Job]) -> bool:
        """Whether it can find all rows that the jobs' present step reads."""
        reading = [job for job in jobs if places_of(job)]
        if reading and self.model.device.type == "cuda" and not runs_fused(reading[0].masked):
            return False
        if len({job.activations.kind for job in reading if job.activations}) > 1:
            self.explain("activations are of two kinds")
            return False
        if not self.staging.has_room([job for job in reading if is_far(job)]):
            self.explain("the device has no room for two steps of the activations")
            return False
        return True

    @torch.inference_mode()
    def predict(self, jobs: Sequence[Job]) -> list[list[Tensor]]:
        """As the model's own."""
        far = [job for job in jobs if is_far(job)]
        self.staging.bring(far)
        predicted: dict[Job, list[Tensor]] = {}
        for one in self.model.passes(jobs):
            together = sorted(one, key=num_flowing)  # whoever came first, the same masks are the same pass
            packed = self.model.pack(together, pads=True)
            predicted |= zip(together, packed.deal(self.run(packed)), strict=True)
        self.staging.look_ahead(far)
        return [predicted[job] for job in jobs]

    def run(self, packed: Any) -> Tensor:
        """One pass: captured, or as it is."""
        table = self.find_rows(packed.readers)
        captured = self.find(packed, table)
        if captured is None:
            as_it_is = replace(packed, rows=TableRows(table.to(self.model.device, non_blocking=True)))
            self.staging.mark()
            return self.model.run(as_it_is)
        self.copy(packed, table, captured.table)
        self.staging.mark()
        return captured.replay()

    def find(self, packed: Any, table: Tensor) -> Captured | None:
        """The captured pass that looks like this one, if there is any by now."""
        key = packed.signature
        if key not in self.captured:
            if len(packed.readers) > self.max_readers or key in self.refused or not self.is_known(key):
                return None
            try:
                self.captured[key] = self.capture(packed, table)
            except RuntimeError as error:  # memory, or a call that cannot be captured: what runs as it is goes on
                self.explain(str(error).splitlines()[0])
                self.refused.add(key)
                return None
        self.captured.move_to_end(key)
        while len(self.captured) > self.max_graphs:
            self.captured.popitem(last=False)
        return self.captured[key]

    def find_rows(self, readers: Sequence[tuple[Job, int]]) -> Tensor:
        """Where the rows lie that a pass reads [places, readers], in main memory; 0 for who reads none."""
        found = [self.find_addresses(job, branch) if places_of(job) else [] for job, branch in readers]
        num_places = max(map(len, found))
        table = torch.tensor([addresses or [0] * num_places for addresses in found], dtype=torch.int64).T.contiguous()
        return table.pin_memory() if self.model.device.type == "cuda" else table

    def find_addresses(self, job: Job, branch: int) -> list[int]:
        assert job.activations is not None
        if needs_loading(job):
            return self.staging.addresses(job, branch)
        return job.activations.addresses(job.step, branch)

    def is_known(self, key: Hashable) -> bool:
        """Whether it was seen before; from now on it was."""
        is_known = key in self.seen
        self.seen[key] = None
        if len(self.seen) > MAX_SEEN:
            self.seen.popitem(last=False)
        return is_known

    def explain(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.add(reason)
            log.warning("a pass is not captured, and slower: %s", reason)

    def copy(self, packed: Any, addresses: Tensor, table: Tensor) -> None:
        for name, column in packed.columns.items():
            self.columns.copy(name, column)
        table.copy_(addresses, non_blocking=True)

    def capture(self, packed: Any, addresses: Tensor) -> Captured:
        table = self.columns.take("table", addresses.to(self.model.device))
        columns = {name: self.columns.take(name, column) for name, column in packed.columns.items()}
        self.copy(packed, addresses, table)
        twin = packed.over(columns, TableRows(table))
        num_warm_ups = 0 if self.captured else NUM_WARM_UPS
        return Captured(table, capture(lambda: self.model.run(twin), self.model.device, self.pool, num_warm_ups))


def num_flowing(job: Job) -> int:
    return len(job.inside) if places_of(job) else len(job.masked)


def capture(run: Callable[[], Tensor], device: torch.device, pool: Any, num_warm_ups: int) -> Callable[[], Tensor]:
    """What runs the same launches again, and hands over what they leave behind."""
    if device.type != "cuda":
        return run
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(num_warm_ups):  # libraries make room for themselves before anything is captured
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        out = run()

    def replay() -> Tensor:
        graph.replay()
        return out.clone()  # graphs share memory: the next may write over it

    return replay


def max_staged_bytes(device: torch.device) -> int:
    """A quarter of the device's memory."""
    return torch.cuda.mem_get_info(device)[1] // 4 if device.type == "cuda" else sys.maxsize


def make_graphs(model: Model, enabled: bool = True, max_graphs: int = MAX_GRAPHS) -> Graphs | None:
    """Where there are any."""
    return Graphs(model, max_graphs) if enabled and model.device.type == "cuda" else None
