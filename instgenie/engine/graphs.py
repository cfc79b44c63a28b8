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

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from instgenie.engine.captures import Captures, FixedColumns
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


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a captured pass reads."""

    columns: FixedColumns
    table: Tensor  # [places, readers], int64, addresses of rows

    def copy(self, packed: PackedBatch, addresses: Tensor) -> None:
        self.columns.copy(packed.columns)
        self.table.copy_(addresses, non_blocking=True)


@dataclass(frozen=True, eq=False)
class Captured:
    """A pass that can be repeated with other inputs."""

    inputs: Inputs
    packed: (
        PackedBatch  # over the inputs; holds what the passes before the capture have made and the captured one reads
    )
    replay: Callable[[Sequence[JobResiduals]], Tensor]


class Graphs(Captures[Captured]):
    def __init__(self, model: Model, max_graphs: int = MAX_GRAPHS, max_readers: int | None = None) -> None:
        super().__init__(model.device, max_graphs)
        self.model = model
        self.max_readers = model.max_captured if max_readers is None else max_readers
        self.staging = Staging(model.device, max_staged_bytes(model.device))

    def takes(self, jobs: Sequence[Job]) -> bool:
        """Return whether it can find all rows that the jobs' present step reads or keeps. Only kernels can on a GPU."""
        adapted = [job for job in jobs if job.loras and not job.loras.merging.is_merged]
        if any(job.loras.patches_pictures for job in adapted if job.loras):
            self.explain("a LoRA patches convolutions")
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
        """Return the captured pass with this batch's signature, captured now if it is seen for the second time. One
        with too many readers never is."""
        if len(packed.readers) > self.max_readers:
            return None
        key = packed.signature, dtypes_of(packed.readers), addresses.shape, bool(packed.residuals)
        return self.find_or_capture(key, lambda: self.capture(packed, addresses))

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

    def capture(self, packed: PackedBatch, addresses: Tensor) -> Captured:
        table = self.tensors.take("table", addresses.to(self.model.device)).tensor
        inputs = Inputs(self.tensors.take_all(packed.names, packed.columns), table)
        inputs.copy(packed, addresses)
        twin = replace(packed.over(inputs.columns.tensors, self.rows_at(table, packed)), residuals=())
        if packed.residuals:
            return Captured(inputs, twin, self.capture_halves(twin))
        replay = self.repeatable(lambda: [self.model.run(twin)])
        return Captured(inputs, twin, lambda _: replay()[0])

    def capture_halves(self, packed: PackedBatch) -> Callable[[Sequence[JobResiduals]], Tensor]:
        """Capture a pass as two graphs. Between them residuals are added to what the first one left, outside of any
        graph: so the first half never waits for them, and one capture serves whichever jobs have ControlNets."""
        if self.device.type != "cuda":
            return lambda residuals: finish_half(self.model.begin(packed), residuals)
        half: list[HalfPass] = []
        begin = self.record(lambda: half.append(self.model.begin(packed)))
        out: list[Tensor] = []
        half = half[-1:]
        end = self.record(lambda: out.append(half[0].end()))

        def replay(residuals: Sequence[JobResiduals]) -> Tensor:
            begin.replay()
            for one in residuals:
                one.add_to(half[0].places)
            end.replay()
            return out[-1].clone()

        return replay


def dtypes_of(readers: Sequence[RowReader]) -> tuple[CacheDtype, ...]:
    """Per reader, the format in which the rows are kept that it reads. Readers that read none have that of another."""
    found = [job.activations.key.cache_dtype if job.activations and places_of(job) else None for job, _ in readers]
    anyone: CacheDtype = next((one for one in found if one), "model")
    return tuple(one or anyone for one in found)


def num_computed(job: Job) -> int:
    return len(job.inside) if places_of(job) else job.num_seen


def finish_half(half: HalfPass, residuals: Sequence[JobResiduals]) -> Tensor:
    for one in residuals:
        one.add_to(half.places)
    return half.end()


def max_staged_bytes(device: torch.device) -> int:
    """A quarter of the device's memory."""
    return torch.cuda.mem_get_info(device)[1] // 4 if device.type == "cuda" else sys.maxsize


def make_graphs(model: Model, enabled: bool = True, max_graphs: int = MAX_GRAPHS) -> Graphs | None:
    """Graphs on devices that have them, unless they are disabled."""
    return Graphs(model, max_graphs) if enabled and model.device.type == "cuda" else None
