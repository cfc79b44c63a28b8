"""What a template leaves behind for its edits: the rows of every block at every step. Knows tensors; knows no model."""

import hashlib
import json
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from instgenie.types import NUM_PARTS, Kind, Pixels

__all__ = ["NUM_PARTS", "Activations", "Key", "Kind", "digest"]


@dataclass(frozen=True)
class Key:
    """Everything the activations of a template depend on. A key that differs in anything is a miss."""

    picture: str  # digest of the decoded picture
    model: str  # digest of its weights and of whatever else makes it what it is; not its name
    size: tuple[int, int]  # (height, width) the model works at
    levels: tuple[float, ...]  # of noise, at all steps
    guidance: float  # 0 where it does not enter the network
    kind: Kind
    dtype: str
    prompt: str = ""  # what the registration saw
    isolated: bool = False  # whether its image tokens saw no text

    @property
    def text(self) -> str:
        """One text for each key, the same in every process."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True, eq=False)
class Span:
    """What consecutive steps, registered in one pass, leave behind; the fields are those of activations."""

    steps: range
    rows: tuple[Tensor, ...]  # each [branches, steps of the span, 2 or 1, tokens, width]
    time: Tensor  # [steps of the span, width]

    @property
    def num_bytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows) + self.time.nbytes


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
    units: tuple[int, ...]  # number of blocks in each
    num_tokens: int  # of the picture; deeper levels of a UNet have fewer
    rows: tuple[Tensor, ...]  # in the order of the pass; each [branches, steps, 2 or 1, tokens, width]
    time: Tensor  # [steps, width], what modulated the blocks of a Flux; no width for the others

    @property
    def kind(self) -> Kind:
        return self.key.kind

    @property
    def num_branches(self) -> int:
        return self.rows[0].shape[0]

    @property
    def num_steps(self) -> int:
        return self.rows[0].shape[1]

    @property
    def num_blocks(self) -> int:
        return sum(self.units)

    @property
    def num_bytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows) + self.time.nbytes

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
    """Spans on their way to activations. They may come one by one: each is copied to its place."""

    def __init__(self, key: Key, units: tuple[int, ...], num_tokens: int, num_steps: int, device: torch.device) -> None:
        self.key, self.units, self.num_tokens, self.num_steps, self.device = key, units, num_tokens, num_steps, device
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
        """For all steps of what a span has the first of."""
        shape = [*part.shape[:dim], self.num_steps, *part.shape[dim + 1 :]]
        return torch.empty(shape, dtype=part.dtype, device=self.device)

    @property
    def done(self) -> bool:
        return self.num_joined_steps == self.num_steps

    @property
    def num_bytes(self) -> int:
        """Of all steps; known after the first span."""
        return sum(rows.nbytes for rows in self.rows) + self.time.nbytes

    @property
    def activations(self) -> Activations:
        assert self.done, (self.num_joined_steps, self.num_steps)
        return Activations(self.key, self.units, self.num_tokens, self.rows, self.time)


def digest(picture: Pixels) -> str:
    hashed = hashlib.sha256(str(picture.shape).encode())
    hashed.update(picture.tobytes())
    return hashed.hexdigest()
