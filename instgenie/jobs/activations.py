"""Activations: the rows that a template keeps for its edits, per block and step. Knows tensors; knows no model."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from instgenie.cost.kept_steps import KeptSteps, every_step
from instgenie.kernels.packed import PackedRows, is_packed, unpacked
from instgenie.types import NUM_PARTS, CacheDtype, Kind

__all__ = ["NUM_PARTS", "Activations", "CacheDtype", "Key", "Kind"]

ALIGNMENT = 16  # bytes, for rows that kernels read by address
NUM_STEPS_AT_ONCE = 4  # steps that one pass of a registration covers, and that are kept and moved together


@dataclass(frozen=True)
class Key:
    """Everything the activations of a template depend on. Keys that differ in any field are different templates."""

    picture: str  # digest of the decoded picture
    model: str  # digest of its weights and configuration; not its name
    size: tuple[int, int]  # (height, width) the model works at
    num_steps: int
    levels: tuple[float, ...]  # of noise, at every step
    guidance: float  # 0 if the network has no such input
    kind: Kind
    dtype: str  # in which the model computes
    cache_dtype: CacheDtype = "model"  # in which rows are kept
    prompt: str = ""  # of the registration
    isolated: bool = False  # True if the registration had no text
    tenant: str = ""  # the owner; edits of other tenants do not find the template
    code: str = ""  # version of the code that computes the activations
    stride: int = 1  # every so many steps are kept
    num_text: int = 0  # text tokens whose rows are kept, for edits that read its padding
    loras: tuple[str, ...] = ()  # that the registration saw: version and scale of each; none: the base model's own
    references: str = ""  # digest of the pictures that the model saw beside it, if it saw any
    tile: int = 0  # side of the tiles at whose borders the inputs of convolutions are kept; 0: none are

    @property
    def text(self) -> str:
        """The key as JSON, the same in every process. A key without a stride is that of a template with all steps, one
        without `num_text` that of a template without rows of its text, one without `loras` that of the base model, one
        without `references` that of a picture alone, one without `tile` that of a template without rows for
        convolutions."""
        fields = asdict(self)
        for name in ("stride", "num_text", "loras", "references", "tile"):
            if fields[name] == Key.__dataclass_fields__[name].default:
                del fields[name]
        return json.dumps(fields, sort_keys=True)

    @property
    def name(self) -> str:
        """A short name, unique to the key, that can name a file."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def kept_steps(self) -> KeptSteps:
        return every_step(self.num_steps, self.stride)

    @property
    def num_kept(self) -> int:
        """The number of steps that are kept."""
        return len(self.kept_steps.steps)

    @property
    def spans(self) -> list[range]:
        """The ranges of slots, one per kept step, in which the activations are stored and moved."""
        return split_steps(self.num_kept, NUM_STEPS_AT_ONCE)

    @property
    def slots(self) -> range:
        return range(self.num_kept)

    def num_served(self, spans: Iterable[range]) -> int:
        """The number of steps that the slots of some spans serve."""
        slots = {slot for span in spans for slot in span}
        return sum(self.kept_steps.slot(step) in slots for step in range(self.num_steps))


def parse_key(text: str) -> Key:
    """Return the key with this text, or raise a ValueError."""
    try:
        fields = json.loads(text)
        lists = {name: tuple(fields[name]) for name in ("size", "levels", "loras") if name in fields}
        key = Key(**fields | lists)
    except (TypeError, KeyError) as error:
        raise ValueError(f"not a key: {error}") from None
    if key.text != text:
        raise ValueError("not a key in its canonical form")
    return key


@dataclass(frozen=True, eq=False)
class Span:
    """Activations of consecutive kept steps, with the same fields as `Activations`. All together are a span too."""

    steps: range  # slots
    rows: tuple[Tensor, ...]  # each [branches, steps of the span, 2 or 1, tokens, width]
    time: Tensor  # [steps of the span, width]

    @property
    def num_bytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows) + self.time.nbytes


@dataclass(frozen=True, eq=False)
class Activations:
    """Rows that are registered once, read by many edits and written by none; or those that an edit's own dense steps
    leave behind, which that edit alone reads and writes.

    `kv`: K and V of all image tokens, after norm and rotary embedding, ready for attention.
    `y`: the image rows that go into a block, which are the Y of the block before; into the first, the embedded image.
    Blocks come in runs; tokens dropped in a run stay dropped to its end. A Flux is a single run, a UNet has one per
    transformer. After the blocks of each run a UNet also keeps the run's output, because convolutions read every token.
    A Flux does not: it needs velocities of masked tokens alone. Rows of the text, if they are kept, lie before those of
    the image. Where a block has two attentions, a row of K or V has the heads of both. For a UNet whose convolutions
    are reused, the inputs of all convolutions follow, where tiles meet, and numbers of the tiles of all norms, which
    are never packed. A pass reads them between the others: `ranks` has its order.
    """

    key: Key
    run_lengths: tuple[int, ...]  # number of blocks in each run
    num_tokens: int  # at full resolution; coarser levels of a UNet have fewer
    rows: tuple[Tensor, ...]  # per place [branches, slots, 2 or 1, tokens, width or bytes]
    time: Tensor  # [slots, width] or [slots, branches, width], the input of modulation; a UNet's has no width
    steps: KeptSteps | None = None  # the steps whose rows lie in the slots; None: every step
    ranks: tuple[int, ...] = ()  # per place, which in turn a pass reads; none: one after the other

    def rank(self, place: int) -> int:
        return self.ranks[place] if self.ranks else place

    @property
    def kind(self) -> Kind:
        return self.key.kind

    @property
    def num_text(self) -> int:
        """Text tokens whose rows lie before those of the image tokens."""
        return self.key.num_text

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the model computes."""
        dtype: torch.dtype = getattr(torch, self.key.dtype.removeprefix("torch."))
        return dtype

    @property
    def is_packed(self) -> bool:
        return is_packed(self.key.cache_dtype)

    @property
    def num_branches(self) -> int:
        return self.rows[0].shape[0]

    @cached_property
    def kept_steps(self) -> KeptSteps:
        return self.steps or every_step(self.rows[0].shape[1])

    @property
    def num_steps(self) -> int:
        return self.kept_steps.num_steps

    def slot(self, step: int) -> int:
        """The slot of the rows that serve a step."""
        return self.kept_steps.slot(step)

    @property
    def num_blocks(self) -> int:
        return sum(self.run_lengths)

    @property
    def num_places(self) -> int:
        """Places of blocks and of the outputs of runs; what is kept for convolutions follows them."""
        return min(len(self.rows), self.num_blocks + len(self.run_lengths))

    @property
    def has_convolutions(self) -> bool:
        return len(self.rows) > self.num_places

    @property
    def num_bytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows) + self.time.nbytes

    def at(self, step: int, place: int, branch: int, device: torch.device) -> Tensor:
        """The rows of a place at a step [2 or 1, tokens, width], copied to the device and unpacked where necessary."""
        return self.readable(self.kept(step, place, branch).to(device, non_blocking=True))

    def kept(self, step: int, place: int, branch: int) -> Tensor:
        """The rows of a place at a step as they are kept [2 or 1, tokens, width or bytes]. A branch that was not
        registered reads the last one that was."""
        rows = self.rows[place]
        return rows[min(branch, len(rows) - 1), self.slot(step)]

    def time_at(self, step: int, branch: int = 0) -> Tensor:  # [width]
        time = self.time[self.slot(step)]
        return time if time.ndim == 1 else time[branch]

    def packs(self, kept: Tensor) -> bool:
        """Return whether these of its rows are packed; numbers of tiles never are."""
        return self.is_packed and kept.dtype == torch.uint8

    def readable(self, kept: Tensor) -> Tensor:
        """Unpack rows, on their device, if they are packed."""
        return unpacked(kept, self.key.cache_dtype, self.dtype) if self.packs(kept) else kept

    def source(self, kept: Tensor) -> Tensor | PackedRows:
        """Rows as kernels read them: packed ones are unpacked on the way."""
        return PackedRows(kept, self.key.cache_dtype) if self.packs(kept) else kept

    def addresses(self, step: int, branch: int) -> list[int]:
        """Addresses of the rows of a step, place after place. Each place is contiguous."""
        branch, slot = min(branch, self.num_branches - 1), self.slot(step)
        return [start + branch * per_branch + slot * per_slot for start, per_branch, per_slot in self._strides]

    @cached_property
    def _strides(self) -> list[tuple[int, int, int]]:
        """Per place: the address of its rows, and the strides in bytes of branches and of slots."""
        found = []
        for rows in self.rows:
            per_branch, per_slot = (stride * rows.element_size() for stride in rows.stride()[:2])
            assert rows[0, 0].is_contiguous()
            assert self.is_packed or not any(number % ALIGNMENT for number in (rows.data_ptr(), per_branch, per_slot))
            found.append((rows.data_ptr(), per_branch, per_slot))
        return found

    def last(self, num_steps: int) -> "Activations":
        """The activations of the last steps alone; nothing is copied."""
        return self if num_steps == self.num_steps else replace(self, steps=self.kept_steps.last(num_steps))


def split_steps(num_steps: int, num_steps_at_once: int) -> list[range]:
    """Split steps into ranges of `num_steps_at_once`; the last may be shorter."""
    starts = range(0, num_steps, num_steps_at_once)
    return [range(start, min(start + num_steps_at_once, num_steps)) for start in starts]


class Joining:
    """Joins spans into one that has all steps. They may come one by one: each is copied to its place."""

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
        """Allocate a tensor for all steps, like one that has some of them."""
        return torch.empty(grown(part, dim, self.num_steps), dtype=part.dtype, device=self.device)

    @property
    def done(self) -> bool:
        return self.num_joined_steps == self.num_steps

    @property
    def num_bytes(self) -> int:
        """Bytes of all steps; known after the first span."""
        return sum(rows.nbytes for rows in self.rows) + self.time.nbytes

    @property
    def whole(self) -> Span:
        assert self.done, (self.num_joined_steps, self.num_steps)
        return Span(range(self.num_steps), self.rows, self.time)


def join(num_steps: int, spans: Iterable[Span], device: torch.device) -> Span:
    """Join spans that together have all steps; each is copied before the next is asked for."""
    joining = Joining(num_steps, device)
    for span in spans:
        joining.add(span)
    return joining.whole


def grown(part: Tensor, dim: int, length: int) -> list[int]:
    """The shape of a tensor, with another length in one dimension."""
    return [*part.shape[:dim], length, *part.shape[dim + 1 :]]
