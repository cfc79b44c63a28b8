"""What a template leaves behind for its edits: the rows of every block at every step. Knows tensors; knows no model."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from instgenie.kernels.packed import unpack_rows, unpacked_shape
from instgenie.types import NUM_PARTS, CacheDtype, Kind

__all__ = ["NUM_PARTS", "Activations", "CacheDtype", "Key", "Kind"]

ALIGNMENT = 16  # bytes, of rows that kernels find by their address
NUM_STEPS_AT_ONCE = 4  # steps that a registration takes in one pass, and that are kept and moved together


@dataclass(frozen=True)
class Key:
    """Everything the activations of a template depend on. A key that differs in anything is a miss."""

    picture: str  # digest of the decoded picture
    model: str  # digest of its weights and of whatever else makes it what it is; not its name
    size: tuple[int, int]  # (height, width) the model works at
    num_steps: int
    levels: tuple[float, ...]  # of noise, at all steps
    guidance: float  # 0 where it does not enter the network
    kind: Kind
    dtype: str  # that the model computes in
    cache_dtype: CacheDtype = "model"  # that rows are kept in
    prompt: str = ""  # what the registration saw
    isolated: bool = False  # whether its image tokens saw no text
    tenant: str = ""  # whose template it is; nobody else's edits find it

    @property
    def text(self) -> str:
        """One text for each key, the same in every process."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def name(self) -> str:
        """One for each key, short and fit for a file."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def spans(self) -> list[range]:
        """The pieces in which its activations are kept and moved."""
        return split_steps(self.num_steps, NUM_STEPS_AT_ONCE)

    @property
    def steps(self) -> range:
        return range(self.num_steps)


def parse_key(text: str) -> Key:
    """The key that has this text; a ValueError if there is none."""
    try:
        fields = json.loads(text)
        key = Key(**fields | {name: tuple(fields[name]) for name in ("size", "levels")})
    except (TypeError, KeyError) as error:
        raise ValueError(f"not a key: {error}") from None
    if key.text != text:
        raise ValueError("not a key as we write it")
    return key


@dataclass(frozen=True, eq=False)
class Span:
    """What consecutive steps leave behind; the fields are those of activations. All steps together are a span too."""

    steps: range
    rows: tuple[Tensor, ...]  # each [branches, steps of the span, 2 or 1, tokens, width]
    time: Tensor  # [steps of the span, width]

    @property
    def num_bytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows) + self.time.nbytes


class Reader(Protocol):
    """Whoever rows are read from: activations themselves, or who loads them ahead of their use."""

    def at(self, step: int, place: int, branch: int, device: torch.device) -> Tensor:
        """What is kept of a place of the pass at a step [2 or 1, tokens, width], on the device that asks, until the
        next place is read. Rows of tokens that are computed anyway need not be there."""


@dataclass(frozen=True, eq=False)
class Activations:
    """Registered once, read by many edits, written by none.

    `kv`: K and V of all image tokens, after norm and rotary embedding, ready for attention.
    `y`: the image rows that go into a block, which are the Y of the block before; into the first, the embedded image.
    A unit is a run of blocks in which a token that was dropped stays dropped: all of a Flux, one transformer of a UNet.
    Behind the blocks of a unit a UNet keeps what left it, for the convolutions read every token. A Flux keeps no such
    thing: velocities are asked of masked tokens alone.
    """

    key: Key
    run_lengths: tuple[int, ...]  # number of blocks in each
    num_tokens: int  # of the picture; deeper levels of a UNet have fewer
    rows: tuple[Tensor, ...]  # in the order of the pass; each [branches, steps, 2 or 1, tokens, width or bytes]
    time: Tensor  # [steps, width], what modulated the blocks of a Flux; no width for the others

    @property
    def kind(self) -> Kind:
        return self.key.kind

    @property
    def dtype(self) -> torch.dtype:
        """That the model computes in."""
        dtype: torch.dtype = getattr(torch, self.key.dtype.removeprefix("torch."))
        return dtype

    @property
    def is_packed(self) -> bool:
        return self.key.cache_dtype == "fp8"

    @property
    def num_branches(self) -> int:
        return self.rows[0].shape[0]

    @property
    def num_steps(self) -> int:
        return self.rows[0].shape[1]

    @property
    def num_blocks(self) -> int:
        return sum(self.run_lengths)

    @property
    def num_bytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows) + self.time.nbytes

    def at(self, step: int, place: int, branch: int, device: torch.device) -> Tensor:
        """See `Reader`. Rows are copied and unpacked when they are asked for, if at all."""
        return self.readable(self.kept(step, place, branch).to(device, non_blocking=True))

    def kept(self, step: int, place: int, branch: int) -> Tensor:
        """As it is kept and where it lies [2 or 1, tokens, width or bytes]. A branch that was not registered on its own
        reads the last that was."""
        rows = self.rows[place]
        return rows[min(branch, len(rows) - 1), step]

    def readable(self, kept: Tensor) -> Tensor:
        """Rows as the model reads them, on their device."""
        if not self.is_packed:
            return kept
        rows = torch.empty(unpacked_shape(kept), dtype=self.dtype, device=kept.device)
        unpack_rows(kept, rows)
        return rows

    def addresses(self, step: int, branch: int) -> list[int]:
        """Where in memory rows lie that need no unpacking, place after place, each in one piece."""
        branch = min(branch, self.num_branches - 1)
        return [start + branch * per_branch + step * per_step for start, per_branch, per_step in self._strides]

    @cached_property
    def _strides(self) -> list[tuple[int, int, int]]:
        """Of each place: where its rows begin, and bytes from branch to branch and from step to step."""
        found = []
        for rows in self.rows:
            per_branch, per_step = (stride * rows.element_size() for stride in rows.stride()[:2])
            assert rows[0, 0].is_contiguous()
            assert not any(number % ALIGNMENT for number in (rows.data_ptr(), per_branch, per_step))
            found.append((rows.data_ptr(), per_branch, per_step))
        return found

    def last(self, num_steps: int) -> "Activations":
        """Of the last steps alone; nothing is copied."""
        if num_steps == self.num_steps:
            return self
        rows = tuple(rows[:, -num_steps:] for rows in self.rows)
        return replace(self, rows=rows, time=self.time[-num_steps:])


def split_steps(num_steps: int, num_steps_at_once: int) -> list[range]:
    """The spans of a registration."""
    starts = range(0, num_steps, num_steps_at_once)
    return [range(start, min(start + num_steps_at_once, num_steps)) for start in starts]


class Joining:
    """Spans on their way to one that has all steps. They may come one by one: each is copied to its place."""

    def __init__(self, num_steps: int, device: torch.device) -> None:
        self.num_steps, self.device = num_steps, device
        self.num_joined_steps = 0
        self.rows: tuple[Tensor, ...] = ()
        self.time = torch.empty(0)

    def add(self, span: Span) -> None:
        if not self.rows:
            self.rows = tuple(self.make_room(part, 1) for part in span.rows)
            self.time = self.make_room(span.time, 0)
        chosen = slice(span.steps.start, span.steps.stop)
        for whole, part in zip(self.rows, span.rows, strict=True):
            whole[:, chosen] = part
        self.time[chosen] = span.time
        self.num_joined_steps += len(span.steps)

    def make_room(self, part: Tensor, dim: int) -> Tensor:
        """For all steps of what a span has a few of."""
        return torch.empty(grown(part, dim, self.num_steps), dtype=part.dtype, device=self.device)

    @property
    def done(self) -> bool:
        return self.num_joined_steps == self.num_steps

    @property
    def num_bytes(self) -> int:
        """Of all steps; known after the first span."""
        return sum(rows.nbytes for rows in self.rows) + self.time.nbytes

    @property
    def whole(self) -> Span:
        assert self.done, (self.num_joined_steps, self.num_steps)
        return Span(range(self.num_steps), self.rows, self.time)


def join(num_steps: int, spans: Iterable[Span], device: torch.device) -> Span:
    """Spans that together have all steps, as one; each is copied before the next is asked for."""
    joining = Joining(num_steps, device)
    for span in spans:
        joining.add(span)
    return joining.whole


def grown(part: Tensor, dim: int, length: int) -> list[int]:
    """The part's shape, longer in one dimension."""
    return [*part.shape[:dim], length, *part.shape[dim + 1 :]]
