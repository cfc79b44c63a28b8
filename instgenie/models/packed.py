"""Packed batches: what one pass through a network reads, and what capturing that pass needs. Knows no family.

A family packs the jobs of a pass into a dataclass whose fields declare their roles: columns are tensors whose values
change from pass to pass, static fields are plain values that a captured pass is bound to. One walker finds all columns,
through nested dataclasses, tuples and dicts. Passes of one signature differ in nothing but the values of their
columns and in the rows they read, so they share a captured graph.

A field without a role, a static field that holds tensors and a column of a type that cannot be walked are TypeErrors.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from operator import attrgetter
from types import UnionType
from typing import Annotated, Any, NamedTuple, Self, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from instgenie.adapters.applied import BatchLoras, batch_loras
from instgenie.jobs.controls import Promise
from instgenie.jobs.job import Job
from instgenie.jobs.rows import BatchRows, RowReader
from instgenie.kernels.roles import Column, LeftOut, Role

T = TypeVar("T")


class JobResiduals(NamedTuple):
    """Residuals that a pass adds to the branches of one job."""

    branches: slice
    promise: Promise

    def add_to(self, places: Sequence[Tensor]) -> None:
        """Add them to tensors [branches, ...] in place; waits for them."""
        residuals = list(self.promise.result())
        assert len(places) == len(residuals), (len(places), len(residuals))
        torch._foreach_add_([place[self.branches] for place in places], residuals)  # a few launches for all places


@dataclass(frozen=True, eq=False)
class PackedBatch(ABC):
    """One step of the jobs of a pass, as the network reads it."""

    jobs: LeftOut[tuple[Job, ...]]
    rows: LeftOut[BatchRows]  # of the jobs' activations
    loras: Column[BatchLoras | None]  # None: no job has any
    residuals: LeftOut[tuple[JobResiduals, ...]]  # of the jobs that ControlNets guide

    @property
    def signature(self) -> Hashable:
        return self._walked.signature

    @property
    def columns(self) -> Sequence[Tensor]:
        """All tensors that the pass reads, except rows of activations."""
        return self._walked.columns

    @property
    def names(self) -> list[str]:
        """A name per column, such as `layouts.0.rotary`; batches of one signature have the same names."""
        return name_columns(self)

    def over(self, columns: Sequence[Tensor], rows: BatchRows) -> Self:
        """The same pass over other columns and rows; it holds no jobs."""
        return replace(with_columns(self, columns), jobs=(), rows=rows)

    def reading(self, rows: BatchRows) -> Self:
        return replace(self, rows=rows)

    @property
    @abstractmethod
    def readers(self) -> Sequence[RowReader]:
        """Jobs and branches, one for each source of `rows`."""

    @abstractmethod
    def deal(self, predicted: Tensor) -> list[list[Tensor]]:
        """Split the network's output: per job and branch, a prediction [tokens, channels] for all tokens or for the
        computed ones."""

    @cached_property
    def _walked(self) -> "Walked":
        return walk(self)


def loras_of(jobs: Sequence[Job]) -> BatchLoras | None:
    """The LoRAs of the jobs of a pass, one branch after the other."""
    if not any(job.loras for job in jobs):
        return None
    return batch_loras([job.loras for job in jobs for _ in job.branches])


def residuals_of(jobs: Sequence[Job]) -> tuple[JobResiduals, ...]:
    firsts = accumulate((len(job.branches) for job in jobs), initial=0)
    return tuple(
        JobResiduals(slice(first, first + len(job.branches)), job.residuals)
        for job, first in zip(jobs, firsts, strict=False)
        if job.residuals
    )


class Walked(NamedTuple):
    columns: list[Tensor]
    signature: Hashable


def walk(packed: object) -> Walked:
    """Find all columns, in a fixed order, and everything else that tells this pass from others."""
    columns: list[Tensor] = []
    signature: list[Hashable] = []
    collect(packed, columns, signature)
    return Walked(columns, tuple(signature))


def collect(value: Any, columns: list[Tensor], signature: list[Hashable]) -> None:
    if isinstance(value, Tensor):
        columns.append(value)
        signature.append(value.shape)
    elif value is None:
        signature.append(None)
    elif isinstance(value, tuple):
        signature.append(len(value))
        for item in value:
            collect(item, columns, signature)
    elif isinstance(value, dict):
        signature.append(tuple(value))
        for item in value.values():
            collect(item, columns, signature)
    else:
        known = fields_of(value.__class__)
        signature.append(known.read_statics(value))
        for item in known.read_columns(value):
            collect(item, columns, signature)


def name_columns(packed: object) -> list[str]:
    names: list[str] = []

    def note(name: str, column: Tensor) -> Tensor:
        names.append(name)
        return column

    rebuild(packed, "", note)
    return names


def with_columns(packed: T, columns: Sequence[Tensor]) -> T:
    """The same dataclass over other tensors, which come in the order of `walk`."""
    others = iter(columns)
    rebuilt: T = rebuild(packed, "", lambda _name, _column: next(others))
    assert next(others, None) is None, "more columns than the batch has"
    return rebuilt


def rebuild(value: Any, path: str, exchange: Callable[[str, Tensor], Tensor]) -> Any:
    """Exchange every column, in the order of `collect`. Integer keys of dicts name their values, other keys do so by
    their number: passes with other keys then share columns of one shape."""
    if isinstance(value, Tensor):
        return exchange(path, value)
    if value is None:
        return None
    if isinstance(value, tuple):
        return tuple(rebuild(item, join(path, number), exchange) for number, item in enumerate(value))
    if isinstance(value, dict):
        return {
            key: rebuild(item, join(path, key if isinstance(key, int) else number), exchange)
            for number, (key, item) in enumerate(value.items())
        }
    names = fields_of(value.__class__).columns
    return replace(value, **{name: rebuild(getattr(value, name), join(path, name), exchange) for name in names})


def join(path: str, name: str | int) -> str:
    return f"{path}.{name}" if path else str(name)


@dataclass(frozen=True)
class KnownFields:
    """What the walker knows of a dataclass."""

    columns: tuple[str, ...]
    read_columns: Callable[[object], tuple[Any, ...]]
    read_statics: Callable[[object], tuple[Hashable, ...]]


@cache
def fields_of(kind: type[object]) -> KnownFields:
    """Check the roles of a dataclass's fields. One that declares no roles at all consists of columns."""
    if not is_dataclass(kind):
        raise TypeError(f"{kind.__name__} cannot be a column: neither a tensor, a tuple, a dict nor a dataclass")
    hints = get_type_hints(kind, include_extras=True)
    roles = {field.name: role_of(hints[field.name]) for field in fields(kind)}
    if not any(roles.values()):
        roles = dict.fromkeys(roles, Role.COLUMN)
    for name, role in roles.items():
        hint = get_args(hints[name])[0] if get_origin(hints[name]) is Annotated else hints[name]
        if role is None:
            raise TypeError(f"{kind.__name__}.{name} declares no role: Column, Static or LeftOut is expected")
        if role is Role.COLUMN and not can_walk(hint):
            raise TypeError(f"{kind.__name__}.{name} cannot be a column: {hint} is not made of tensors")
        if role is Role.STATIC and mentions_tensor(hint):
            raise TypeError(f"{kind.__name__}.{name} cannot be static: {hint} holds tensors")
    columns = tuple(name for name, role in roles.items() if role is Role.COLUMN)
    statics = tuple(name for name, role in roles.items() if role is Role.STATIC)
    return KnownFields(columns, reader_of(columns), reader_of(statics))


def role_of(hint: Any) -> Role | None:
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((mark for mark in marks if isinstance(mark, Role)), None)


def can_walk(hint: Any) -> bool:
    """True if values of this type are made of tensors; raises a TypeError where a nested dataclass is not."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return all(map(can_walk, arguments))
    if origin is tuple:
        return all(can_walk(argument) for argument in arguments if argument is not Ellipsis)
    if isinstance(origin, type) and issubclass(origin, dict):
        return can_walk(arguments[1])
    if is_dataclass(hint) and isinstance(hint, type):
        return bool(fields_of(hint).columns)
    return hint is type(None) or (isinstance(hint, type) and issubclass(hint, Tensor))


def mentions_tensor(hint: Any) -> bool:
    if isinstance(hint, type) and get_origin(hint) is None:
        return issubclass(hint, Tensor) or (is_dataclass(hint) and bool(fields_of(hint).columns))
    return any(map(mentions_tensor, get_args(hint)))


def reader_of(names: Sequence[str]) -> Callable[[object], tuple[Any, ...]]:
    """Reads several attributes at once; `attrgetter` makes no tuple of a single one."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)
