"""Tiers in memory: slots, each a piece of memory that holds one template and is filled span by span. Knows bytes and
keys; subclasses know which memory it is.

A slot is laid out step by step, and place by place within a step, so that the rows of a step are contiguous and move in
one copy. Spans and whole templates are handed out as views, without a copy.
"""

import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from rich.filesize import decimal
from torch import Tensor

from instgenie.cache.buffers import TensorSpec, carve
from instgenie.cache.tier import Spill, Usage, keep_nothing
from instgenie.errors import CacheError
from instgenie.jobs.activations import Key, Span
from instgenie.types import TierName


@dataclass(eq=False)
class Slot:
    """The memory of one template."""

    memory: Tensor  # [bytes]
    specs: Sequence[TensorSpec]  # of one step
    whole: Span  # views of the memory
    filled: set[int] = field(default_factory=set)  # steps


class Block(NamedTuple):
    """A span as it lies in memory."""

    memory: Tensor  # [bytes], step after step
    specs: Sequence[TensorSpec]  # of one step


class MemoryTier:
    """Holds at most `max_bytes`; the least recently used template is evicted first."""

    name: TierName

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_evictions = 0
        self.spill: Spill = keep_nothing
        self._slots: OrderedDict[Key, Slot] = OrderedDict()  # the least recently used first
        self._pins: Counter[Key] = Counter()
        self._lock = threading.RLock()  # guards slots and pins; never held while data moves
        self._reserving = threading.RLock()  # held while templates are spilled to make room

    def missing(self, key: Key, spans: Sequence[range]) -> list[range]:
        with self._lock:
            slot = self._slots.get(key)
            return [steps for steps in spans if not slot or not slot.filled.issuperset(steps)]

    def load(self, key: Key, steps: range) -> Span | None:
        """A view of the span, if it is there."""
        with self._lock:
            if self.missing(key, [steps]):
                return None
            self._slots.move_to_end(key)
            return cut(self._slots[key].whole, steps)

    def block(self, key: Key, steps: range) -> Block | None:
        """The bytes of the span, if it is there. They stay valid, whatever happens to the template. Asking for them
        does not count as a use."""
        with self._lock:
            if self.missing(key, [steps]):
                return None
            slot = self._slots[key]
            per_step = slot.memory.nbytes // key.num_kept
            return Block(slot.memory[steps.start * per_step : steps.stop * per_step], slot.specs)

    def copy_out(self, memory: Tensor) -> Tensor:
        """Copy bytes of a block to fresh main memory."""
        return memory.clone()

    def reserve(self, key: Key, num_bytes: int) -> None:
        """Evict templates until there is room; if that would not be enough, raise a CacheError and evict none."""
        with self._reserving:
            while victim := self._next_victim(key, num_bytes):
                with self.pin(victim):
                    self.spill(victim)
                self._evict(victim)

    def store(self, key: Key, span: Span) -> None:
        with self.pin(key):
            slot = self._slot(key, span)
            self._copy(span, cut(slot.whole, span.steps))
            with self._lock:
                slot.filled.update(span.steps)

    @contextlib.contextmanager
    def pin(self, key: Key) -> Iterator[None]:
        with self._lock:
            self._pins[key] += 1
            if key in self._slots:
                self._slots.move_to_end(key)
        try:
            yield
        finally:
            with self._lock:
                self._pins[key] -= 1
                self._pins += Counter()  # drops zeros

    def drop(self, key: Key) -> bool:
        with self._lock:
            self._slots.pop(key, None)
        return True

    def all(self) -> list[Key]:
        with self._lock:
            return list(self._slots)

    def expire(self, key: Key) -> bool:
        """Remove a template unless it is pinned, and return whether it is gone."""
        with self._lock:
            if self._pins[key]:
                return False
            return self.drop(key)

    def fits(self, key: Key, num_bytes: int) -> bool:
        """Return whether there is room for a whole template of `num_bytes`, or would be after evictions."""
        with self._lock:
            others = sum(self.num_bytes(other) for other in self._slots if other != key and self._pins[other])
            return others + num_bytes <= self.max_bytes

    def num_bytes(self, key: Key) -> int:
        with self._lock:
            return self._slots[key].memory.nbytes if key in self._slots else 0

    def usage(self) -> Usage:
        with self._lock:
            return Usage(len(self._slots), self._used())

    def _allocate(self, num_bytes: int) -> Tensor:
        """New memory [bytes]."""
        raise NotImplementedError

    def _copy(self, source: Span, target: Span) -> None:
        """Copy a span and wait until it is done."""
        for one, other in pairs(source, target):
            other.copy_(one)

    def _slot(self, key: Key, span: Span) -> Slot:
        specs = step_specs(span)
        num_bytes = key.num_kept * sum(spec.num_bytes for spec in specs)
        with self._reserving:
            if key not in self._slots:
                self.reserve(key, num_bytes)
                slot = make_slot(key, specs, self._allocate(num_bytes))
                with self._lock:
                    self._slots[key] = slot
            with self._lock:
                return self._slots.get(key) or self._slot(key, span)  # if it was dropped meanwhile

    def _next_victim(self, key: Key, num_bytes: int) -> Key | None:
        """The next template to evict to make room; raise a CacheError if evicting all that may go is not enough."""
        with self._lock:
            lacking = num_bytes + self._used() - self.num_bytes(key) - self.max_bytes
            if lacking <= 0:
                return None
            others = [other for other in self._slots if other != key and not self._pins[other]]
            if lacking > sum(map(self.num_bytes, others)):
                raise CacheError(
                    f"the {self.name} tier has no room for {decimal(num_bytes)} of activations: it may hold "
                    f"{decimal(self.max_bytes)} and holds {decimal(self._used())}, "
                    f"{decimal(sum(map(self.num_bytes, others)))} of which are not in use"
                )
            return others[0]

    def _evict(self, key: Key) -> None:
        with self._lock:
            if not self._pins[key] and key in self._slots:
                self.drop(key)
                self.num_evictions += 1

    def _used(self) -> int:
        return sum(slot.memory.nbytes for slot in self._slots.values())


def step_specs(span: Span) -> list[TensorSpec]:
    """The tensors of one step of a template, given a span of it: rows per place, then time."""
    rows = [TensorSpec((rows.shape[0], *rows.shape[2:]), rows.dtype) for rows in span.rows]
    return [*rows, TensorSpec(tuple(span.time.shape[1:]), span.time.dtype)]


@torch.inference_mode(False)  # callers in and out of inference mode write to its tensors
def make_slot(key: Key, specs: Sequence[TensorSpec], memory: Tensor) -> Slot:
    *rows, time = carve(memory.view(key.num_kept, -1), specs)
    return Slot(memory, specs, Span(key.slots, tuple(by_step.transpose(0, 1) for by_step in rows), time))


def cut(whole: Span, steps: range) -> Span:
    chosen = slice(steps.start, steps.stop)
    return Span(steps, tuple(rows[:, chosen] for rows in whole.rows), whole.time[chosen])


def pairs(source: Span, target: Span) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of tensors to copy, step by step; in a slot each is contiguous."""
    for step in range(len(source.steps)):
        for one, other in zip(source.rows, target.rows, strict=True):
            yield one[:, step], other[:, step]
        yield source.time[step], target.time[step]
