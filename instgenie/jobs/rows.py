"""Rows of activations as jobs read them during a step, or leave them behind. Knows jobs and their activations;
knows no model.

A place counts what a pass reads of activations, in the order of the pass. A reader is a job with the number of one of
its branches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from instgenie.jobs.job import Job
from instgenie.kernels.addresses import Addresses, RowSources
from instgenie.kernels.packed import PackedRows
from instgenie.kernels.store import store_rows
from instgenie.types import CacheDtype

RowReader: TypeAlias = tuple[Job, int]  # a job and the number of its branch


class StepRows(Protocol):
    """The rows that jobs read in one step."""

    def read(self, job: Job, place: int, branch: int) -> Tensor | PackedRows:
        """Return the rows kept at a place for the job's present step [2 or 1, tokens, width], on the job's device and
        valid until the next place is read. Rows of tokens that are computed anyway may be left uninitialised."""


class OwnRows:
    """Rows straight from each job's activations, copied when they are read, if at all."""

    def read(self, job: Job, place: int, branch: int) -> Tensor | PackedRows:
        cache = job.activations
        assert cache is not None
        return cache.source(cache.kept(job.step, place, branch).to(job.device, non_blocking=True))


OWN_ROWS = OwnRows()


class BatchRows(Protocol):
    """The rows that the readers of one packed batch read. Readers that compute every token may leave theirs behind."""

    def at(self, place: int, wanted: Sequence[bool]) -> RowSources:
        """Return one source per reader; for readers that do not want theirs, None or any."""

    def keep(self, place: int, reader: int, parts: Sequence[Tensor]) -> None:
        """Keep the rows of a reader at a place, K and V or Y [tokens, width], for its later steps."""


@dataclass(frozen=True, eq=False)
class JobRows:
    """Rows that are read job by job."""

    readers: tuple[RowReader, ...]
    step_rows: StepRows

    def at(self, place: int, wanted: Sequence[bool]) -> RowSources:
        return [
            self.step_rows.read(job, place, branch) if wants else None
            for (job, branch), wants in zip(self.readers, wanted, strict=True)
        ]

    def keep(self, place: int, reader: int, parts: Sequence[Tensor]) -> None:
        job, branch = self.readers[reader]
        assert job.activations is not None
        store_rows(parts, job.activations.kept(job.step, place, branch))


@dataclass(frozen=True, eq=False)
class TableRows:
    """Rows at the addresses that a table holds when they are read or written."""

    table: Tensor  # [places, readers], int64
    dtypes: tuple[CacheDtype, ...] = ()  # per reader, in which its rows are kept; none: the model's
    reach: Callable[[int], None] = lambda _: None  # called before a place is read: waits until its rows are there

    def at(self, place: int, wanted: Sequence[bool]) -> RowSources:
        self.reach(place)
        return Addresses(self.table[place], self.dtypes)

    def keep(self, place: int, reader: int, parts: Sequence[Tensor]) -> None:
        store_rows(parts, Addresses(self.table[place])[reader])
