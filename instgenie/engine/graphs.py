"""Passes captured as CUDA graphs: one launch instead of thousands. Knows packed batches; knows no family.

A pass is captured over columns of its own, at addresses that never change. To take a step, the columns of the jobs at
hand are copied into them, the graph runs, and its predictions are read. Rows of activations are not copied: a table
holds their addresses, and the graph reads them there. Rows that are not on the device are brought a step ahead; those
of an edit's first step come beside that step, which waits for them at a few points of the graph. Passes of one
signature share a graph. Lists of masked tokens are padded so that many masks have one signature; for a UNet, whose
tokens cost less than its launches, almost all masks do.

A signature runs uncaptured the first time, and is captured the second time. When there are too many captured passes,
the least recently used is dropped. On a device without graphs the same passes run over the same columns, launch by
launch.
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

from instgenie.engine.loading.gates import Passage
from instgenie.engine.loading.route import is_far, places_of
from instgenie.engine.loading.staging import Staging
from instgenie.jobs.job import Job
from instgenie.jobs.rows import RowReader, TableRows
from instgenie.kernels.switch import runs_fused
from instgenie.models.model import HalfPass, Model
from instgenie.models.packed import JobResiduals, PackedBatch
from instgenie.types import CacheDtype

MAX_GRAPHS = 128
MAX_SEEN = 1024
NUM_WARM_UPS = 2  # before the first capture; later captures have run uncaptured before

log = logging.getLogger(__name__)


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
    """Fixed tensors by name and shape. Captured passes share them: only one pass runs at a time."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, torch.Size, torch.dtype], FixedTensor] = {}

    def take(self, name: str, like: Tensor) -> FixedTensor:
        key = name, like.shape, like.dtype
        if key not in self._tensors:
            self._tensors[key] = FixedTensor(torch.empty_like(like))
        return self._tensors[key]


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a captured pass reads."""

    tensors: tuple[FixedTensor, ...]  # one per column
    table: Tensor  # [places, readers], int64, addresses of rows

    def copy(self, packed: PackedBatch, addresses: Tensor) -> None:
        for fixed, column in zip(self.tensors, packed.columns, strict=True):
            fixed.copy(column)
        self.table.copy_(addresses, non_blocking=True)


@dataclass(frozen=True, eq=False)
class Captured:
    """A pass that can be repeated with other inputs."""

    inputs: Inputs
    packed: (
        PackedBatch  # over the inputs; holds what the passes before the capture have made and the captured one reads
    )
    replay: Callable[[Sequence[JobResiduals]], Tensor]


class Graphs:
    def __init__(self, model: Model, max_graphs: int = MAX_GRAPHS, max_readers: int | None = None) -> None:
        self.model = model
        self.max_graphs = max_graphs
        self.max_readers = model.max_captured if max_readers is None else max_readers
        self.tensors = FixedTensors()
        self.captured: OrderedDict[Hashable, Captured] = OrderedDict()
        self.seen: OrderedDict[Hashable, None] = OrderedDict()
        self.refused: set[Hashable] = set()
        self.reasons: set[str] = set()
        self.staging = Staging(model.device, max_staged_bytes(model.device))
        self.pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None

    def takes(self, jobs: Sequence[Job]) -> bool:
        """Return whether it can find all rows that the jobs' present step reads or keeps. Only kernels can on a GPU."""
        adapted = [job for job in jobs if job.loras and not job.loras.merging.is_merged]
        if any(job.loras.patches_pictures for job in adapted if job.loras):
            self.explain("a LoRA patches convolutions")
            return False
        if any(job.blocks for job in jobs):
            self.explain("blocks choose their tokens")
            return False
        reading = [job for job in jobs if places_of(job)]
        touching = [*reading, *adapted, *(job for job in jobs if job.keeps_activations)]
        if touching and self.model.device.type == "cuda" and not runs_fused(touching[0].masked):
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
        """Predict as `Model.predict` does."""
        far = [job for job in jobs if is_far(job)]
        self.staging.bring(far)
        predicted: dict[Job, list[Tensor]] = {}
        for one in self.model.passes(jobs):
            together = sorted(one, key=num_computed)  # the same masks are the same pass in any order of arrival
            packed = self.model.pack(together, pads=True)
            predicted |= zip(together, packed.deal(self.run(packed)), strict=True)
        self.staging.look_ahead(far)
        return [predicted[job] for job in jobs]

    def run(self, packed: PackedBatch) -> Tensor:
        """Make one pass, captured or not."""
        addresses = self.find_rows(packed.readers)
        captured = self.find(packed, addresses)
        if captured is None:
            table = addresses.to(self.model.device, non_blocking=True)
            uncaptured = packed.reading(self.rows_at(table, packed))
            self.staging.mark()
            return self.model.run(uncaptured)
        captured.inputs.copy(packed, addresses)
        self.staging.mark()
        return captured.replay(packed.residuals)

    def find(self, packed: PackedBatch, addresses: Tensor) -> Captured | None:
        """Return the captured pass with this batch's signature, captured now if it is seen for the second time."""
        key = packed.signature, dtypes_of(packed.readers), addresses.shape, bool(packed.residuals)
        found = self.captured.get(key)
        if found is None:
            if len(packed.readers) > self.max_readers or key in self.refused or not self.is_known(key):
                return None
            try:
                found = self.captured[key] = self.capture(packed, addresses)
            except RuntimeError as error:  # out of memory, or a call that cannot be captured
                self.explain(str(error).splitlines()[0])
                self.refused.add(key)
                return None
        self.captured.move_to_end(key)
        while len(self.captured) > self.max_graphs:
            self.captured.popitem(last=False)
        return found

    def find_rows(self, readers: Sequence[RowReader]) -> Tensor:
        """Addresses of the rows that a pass reads or keeps [places, readers], in main memory; 0 for other readers."""
        found = [
            self.find_addresses(job, branch) if places_of(job) or job.keeps_activations else []
            for job, branch in readers
        ]
        num_places = max(map(len, found))
        table = torch.tensor([addresses or [0] * num_places for addresses in found], dtype=torch.int64).T.contiguous()
        return table.pin_memory() if self.model.device.type == "cuda" else table

    def rows_at(self, table: Tensor, packed: PackedBatch) -> TableRows:
        """Rows at the addresses of a table, which a pass reads when they are there."""
        read = [job.activations for job, _ in packed.readers if job.activations]
        ranks = next((one.ranks for one in read if len(one.rows) == len(table)), ()) or range(len(table))
        passage = Passage(self.staging.gates, ranks)
        return TableRows(table, dtypes_of(packed.readers), passage.reach)

    def find_addresses(self, job: Job, branch: int) -> list[int]:
        assert job.activations is not None
        if is_far(job):
            return self.staging.addresses(job, branch)
        return job.activations.addresses(job.step, branch)

    def is_known(self, key: Hashable) -> bool:
        """Return whether a signature was seen before, and remember it."""
        is_known = key in self.seen
        self.seen[key] = None
        if len(self.seen) > MAX_SEEN:
            self.seen.popitem(last=False)
        return is_known

    def explain(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.add(reason)
            log.warning("a pass is not captured, and slower: %s", reason)

    def capture(self, packed: PackedBatch, addresses: Tensor) -> Captured:
        table = self.tensors.take("table", addresses.to(self.model.device)).tensor
        inputs = Inputs(tuple(map(self.tensors.take, packed.names, packed.columns)), table)
        inputs.copy(packed, addresses)
        twin = packed.over([fixed.tensor for fixed in inputs.tensors], self.rows_at(table, packed))
        num_warm_ups = 0 if self.captured else NUM_WARM_UPS
        if packed.residuals:
            halves = capture_halves(self.model, replace(twin, residuals=()), self.pool, num_warm_ups)
            return Captured(inputs, twin, halves)
        replay = capture(lambda: self.model.run(twin), self.model.device, self.pool, num_warm_ups)
        return Captured(inputs, twin, lambda _: replay())


def dtypes_of(readers: Sequence[RowReader]) -> tuple[CacheDtype, ...]:
    """Per reader, the format in which the rows are kept that it reads. Readers that read none have that of another."""
    found = [job.activations.key.cache_dtype if job.activations and places_of(job) else None for job, _ in readers]
    anyone: CacheDtype = next((one for one in found if one), "model")
    return tuple(one or anyone for one in found)


def num_computed(job: Job) -> int:
    return len(job.inside) if places_of(job) else job.num_seen


def capture_halves(
    model: Model, packed: PackedBatch, pool: Any, num_warm_ups: int
) -> Callable[[Sequence[JobResiduals]], Tensor]:
    """Capture a pass as two graphs. Between them residuals are added to what the first one left, outside of any graph:
    so the first half never waits for them, and one capture serves whichever jobs have ControlNets."""
    if model.device.type != "cuda":
        return lambda residuals: finish_half(model.begin(packed), residuals)
    half: list[HalfPass] = []
    begin = record(lambda: half.append(model.begin(packed)), model.device, pool, num_warm_ups)
    out: list[Tensor] = []
    half = half[-1:]
    end = record(lambda: out.append(half[0].end()), model.device, pool, num_warm_ups)

    def replay(residuals: Sequence[JobResiduals]) -> Tensor:
        begin.replay()
        for one in residuals:
            one.add_to(half[0].places)
        end.replay()
        return out[-1].clone()

    return replay


def finish_half(half: HalfPass, residuals: Sequence[JobResiduals]) -> Tensor:
    for one in residuals:
        one.add_to(half.places)
    return half.end()


def capture(run: Callable[[], Tensor], device: torch.device, pool: Any, num_warm_ups: int) -> Callable[[], Tensor]:
    """Return a function that repeats the launches of `run` and returns their result."""
    if device.type != "cuda":
        return run
    out: list[Tensor] = []
    graph = record(lambda: out.append(run()), device, pool, num_warm_ups)
    del out[:-1]

    def replay() -> Tensor:
        graph.replay()
        return out[0].clone()  # graphs share memory: the next may overwrite it

    return replay


def record(run: Callable[[], object], device: torch.device, pool: Any, num_warm_ups: int) -> torch.cuda.CUDAGraph:
    """Capture the launches of `run`, after some runs without."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(num_warm_ups):  # libraries allocate what they need before anything is captured
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        run()
    return graph


def max_staged_bytes(device: torch.device) -> int:
    """A quarter of the device's memory."""
    return torch.cuda.mem_get_info(device)[1] // 4 if device.type == "cuda" else sys.maxsize


def make_graphs(model: Model, enabled: bool = True, max_graphs: int = MAX_GRAPHS) -> Graphs | None:
    """Graphs on devices that have them, unless they are disabled."""
    return Graphs(model, max_graphs) if enabled and model.device.type == "cuda" else None
