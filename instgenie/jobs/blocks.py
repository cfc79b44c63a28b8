"""What jobs keep of every block of a network, and which units a block computes at a step. A unit is a token, or a tile
of a picture. Knows numbers of units and tensors; knows no network.

Before each block a rule looks at how much the input of each unit has changed since the step at which the block computed
it, and how wrong the block's last guess was. A unit that is not computed takes a guess in the place of what the block
would add to its input: what the block added last, moved on as that moved between the last two times.

The histories of all jobs of a pass lie in one structure per block. Jobs that were in it at the step before keep their
rows, new jobs have none yet, and the rows of jobs that have left are dropped. Jobs hold the structure, and it holds no
job: it goes with the last of them.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import NamedTuple, Self

import torch
from torch import Tensor

BLOCK_FEATURES = (
    "input change", "last error", "span of the last error", "age", "step", "step squared", "depth", "depth squared",
)  # fmt: skip
TINY = 1e-6
NUM_FACTS = 4  # numbers that a history keeps of a unit, beside its rows

Pool = Callable[[Tensor], Tensor]  # spreads the largest value of each group of units over the group [units]
# given the features of units [units, features] and the errors of their guesses [units], which were not used, returns
# which of them count as computed [units], bool
Recorder = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class BlockRule:
    """Numbers with which the features of a unit become the logit of the probability that its guess is too wrong."""

    weights: tuple[float, ...]  # one per feature
    bias: float
    bound: float  # the logit from which a unit is computed; -inf: all are
    max_steps: int  # consecutive steps that reuse a unit at most
    trust: float  # share of the movement of what a block adds that a guess expects to go on
    side: int  # of the squares of tokens that are reused together; 0: the whole picture is one
    num_leading: int  # steps that compute all units: two give a movement, and one tests a guess


class KeptUnits(NamedTuple):
    """The units of a job of which rows are kept at one place of a pass, as numbers."""

    num: int
    width: int  # of their inputs
    added_width: int

    def num_bytes(self, item_bytes: int, moves: bool) -> int:
        """Bytes of their history; `moves` if guesses move on."""
        rows = self.width + (2 if moves else 1) * self.added_width
        return self.num * (rows * item_bytes + NUM_FACTS * torch.float32.itemsize)


@dataclass(frozen=True, eq=False)
class BlockHistory:
    """What a block left of each unit when it last computed it."""

    inputs: Tensor  # [units, width]
    added: Tensor  # [units, width], to the inputs
    slopes: Tensor  # [units, width], the movement of that per unit of time; without width if none is expected to go on
    times: Tensor  # [units], at which the unit was computed
    steps: Tensor  # [units], the same as numbers of steps, float32; -inf: never
    errors: Tensor  # [units], of the last guess, relative to the inputs of all units
    spans: Tensor  # [units], the steps over which that guess reached

    @classmethod
    def unknown(cls, inputs: Tensor, width: int, moves: bool) -> Self:
        """The history of units that were never computed."""
        one = torch.ones(len(inputs), device=inputs.device)
        zeros = inputs.new_zeros(len(inputs), width)
        return cls(inputs, zeros, zeros if moves else zeros[:, :0], 0 * one, -math.inf * one, one, one)

    def guess(self, times: Tensor, trust: float) -> Tensor:  # [units, width]
        if not trust:
            return self.added
        return self.added + self.slopes * (trust * (times - self.times))[:, None].to(self.slopes.dtype)

    def after(
        self,
        inputs: Tensor,
        added: Tensor,
        index: Tensor | None,
        times: Tensor,
        steps: Tensor,
        scale: Tensor | None,
        trust: float,
    ) -> "BlockHistory":
        """The history behind a step that computed the units at the index, or all. The scale is the length of inputs,
        per computed unit; without it guesses are not judged. A step that is repeated, because something behind it
        failed, judges no guess anew."""
        old = self if index is None else self.part(index)
        times, steps = (times, steps) if index is None else (times[index], steps[index])
        was_known = old.steps.isfinite()
        errors = old.errors
        if scale is not None:
            wrong = (added - old.guess(times, trust)).float().norm(dim=1) / scale
            errors = wrong.where(was_known, 1)
        is_repeated = old.steps == steps
        passed = (times - old.times).where(was_known & (times != old.times), torch.inf)
        slopes = (added - old.added) / passed[:, None].to(added.dtype) if trust else old.slopes
        found = BlockHistory(
            inputs=inputs,
            added=added,
            slopes=torch.where(is_repeated[:, None], old.slopes, slopes),
            times=times,
            steps=steps,
            errors=torch.where(is_repeated, old.errors, errors),
            spans=torch.where(is_repeated, old.spans, (steps - old.steps).where(was_known, 1)),
        )
        if index is None:
            return found
        return BlockHistory(
            *(kept.index_copy(0, index, new) for kept, new in zip(self.columns, found.columns, strict=True))
        )

    def part(self, index: Tensor | slice) -> "BlockHistory":
        return BlockHistory(*(tensor[index] for tensor in self.columns))

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """All tensors, in the order of the fields."""
        return tuple(getattr(self, one.name) for one in fields(self))


@dataclass(frozen=True, eq=False)
class PackedHistories:
    """The histories of the jobs of a pass. The rows of a job lie together, those of the first job first."""

    sizes: dict[Hashable, tuple[int, ...]] = field(default_factory=dict)  # by block: units of each job
    blocks: dict[Hashable, BlockHistory] = field(default_factory=dict)

    def part(self, block: Hashable, job: int) -> BlockHistory:
        first = sum(self.sizes[block][:job])
        return self.blocks[block].part(slice(first, first + self.sizes[block][job]))


@dataclass(eq=False)
class BlockMemory:
    """What a job has of blocks: its rows in a structure that it shares with others."""

    rule: BlockRule
    packed: PackedHistories | None = None
    position: int = 0  # among the jobs that share it
    recorder: Recorder | None = None  # sees the errors of all guesses, where every unit is computed
    num_computed: dict[Hashable, int] = field(default_factory=dict)  # by block, units computed at the last step
    num_units: dict[Hashable, int] = field(default_factory=dict)

    def leave_others(self) -> None:
        """Take the job's rows out of a structure that it shares, because the others go on without it: their rows would
        stay as long as its own."""
        shared = self.packed
        if shared is None or all(len(sizes) == 1 for sizes in shared.sizes.values()):
            return
        own = {block: shared.part(block, self.position) for block in shared.blocks}
        rows = {block: BlockHistory(*(column.clone() for column in one.columns)) for block, one in own.items()}
        self.packed = PackedHistories({block: (len(one.steps),) for block, one in rows.items()}, rows)
        self.position = 0

    def forget(self) -> None:
        """Let go of all rows, with those of others that lie beside them: every unit is computed at the next step."""
        self.packed = None

    @property
    def share(self) -> float:
        """The share of units that the last step computed, the mean over blocks; all if no block chose."""
        shares = [num / self.num_units[block] for block, num in self.num_computed.items()]
        return sum(shares) / len(shares) if shares else 1.0


@dataclass(frozen=True)
class JobUnits:
    """A job in a pass: its memory, its branches, and where it is."""

    memory: BlockMemory
    num_branches: int
    step: int
    num_steps: int
    time: float


class BlockPass:
    """The choices of one pass. `commit` ends it; without that, nothing has changed."""

    def __init__(self, jobs: Sequence[JobUnits], num_blocks: int, device: torch.device) -> None:
        self.jobs, self.num_blocks = jobs, num_blocks
        self.rule = jobs[0].memory.rule
        olds = [job.memory.packed for job in jobs]
        places = [job.memory.position for job in jobs]
        self.old = olds[0] if all(one is olds[0] for one in olds) and places == list(range(len(jobs))) else None
        self.olds = list(zip(olds, places, strict=True))
        self.found = PackedHistories()
        self.num_computed: dict[Hashable, list[int]] = {}
        self.scales: dict[Hashable, Tensor] = {}  # of the inputs of blocks that have chosen [units]
        numbers = [(one.step, one.time, one.step / one.num_steps) for one in jobs for _ in range(one.num_branches)]
        self.facts = torch.tensor(numbers, dtype=torch.float32, device=device)  # [branches, 3]

    def history(self, block: Hashable, inputs: Tensor, sizes: tuple[int, ...], width: int) -> BlockHistory:
        """The rows of all jobs at a block, which adds so wide ones: of those that stayed, and of new ones. Sizes are
        units per job."""
        if self.old and self.old.sizes.get(block) == sizes:
            return self.old.blocks[block]
        new = inputs.split(sizes)
        parts = [old.part(block, place) if old and block in old.blocks else None for old, place in self.olds]
        width = next((part.added.shape[1] for part in parts if part), width)
        moves = self.rule.trust > 0
        known = [part or BlockHistory.unknown(own, width, moves) for part, own in zip(parts, new, strict=True)]
        return BlockHistory(*(torch.cat(columns) for columns in zip(*(one.columns for one in known), strict=True)))

    def features(self, history: BlockHistory, inputs: Tensor, scale: Tensor, owners: Tensor, number: int) -> Tensor:
        """What is known of each unit before a block [units, features]. Owners are the branches of units."""
        step, _, share = self.facts[owners].unbind(1)
        change = (inputs - history.inputs).float().norm(dim=1) / scale
        logs = torch.stack([change, history.errors, history.spans, step - history.steps], dim=1).clamp(TINY, 1e6).log()
        depth = torch.full_like(share, number / max(self.num_blocks - 1, 1))
        return torch.cat([logs, torch.stack([share, share**2, depth, depth**2], dim=1)], dim=1)

    def scale(self, inputs: Tensor, owners: Tensor) -> Tensor:
        """The length of the inputs of each unit's branch: the root of their mean square [units]."""
        square = inputs.float().square().sum(1)
        zeros = square.new_zeros(len(self.facts))
        mean = zeros.index_add(0, owners, square) / zeros.index_add(0, owners, torch.ones_like(square)).clamp(min=1)
        return mean.sqrt().clamp(min=TINY)[owners]

    def choose(self, number: int, inputs: Tensor, owners: Tensor, sizes: tuple[int, ...], pool: Pool) -> Tensor:
        """Which units a block computes [units], bool."""
        history = self.history(number, inputs, sizes, 0)
        weights = torch.tensor(self.rule.weights, device=inputs.device)
        self.scales[number] = self.scale(inputs, owners)
        logits = self.features(history, inputs, self.scales[number], owners, number) @ weights + self.rule.bias
        step = self.facts[owners, 0]
        is_due = (step - history.steps > self.rule.max_steps) | (step < self.rule.num_leading)
        return pool(logits.masked_fill(is_due, math.inf)) >= self.rule.bound

    def complete(
        self,
        block: Hashable,
        inputs: Tensor,
        outputs: Tensor,
        index: Tensor | None,
        owners: Tensor,
        sizes: tuple[int, ...],
        around: Tensor | None = None,
    ) -> Tensor:
        """The outputs of all units [units, width], of which those at the index were computed, or all. Guesses are added
        to the inputs, or to what goes around the block."""
        around = inputs if around is None else around
        history = self.history(block, inputs, sizes, outputs.shape[1])
        steps, times, _ = self.facts[owners].unbind(1)
        scale, trust = self.scales.pop(block, None), self.rule.trust
        self.found.sizes[block] = sizes
        if index is not None:
            added = outputs - around[index]
            scale = None if scale is None else scale[index]
            self.found.blocks[block] = history.after(inputs[index], added, index, times, steps, scale, trust)
            return (around + history.guess(times, trust)).index_copy(0, index, outputs)
        added, recorder = outputs - around, self.jobs[0].memory.recorder
        if recorder and scale is not None and isinstance(block, int):
            errors = (added - history.guess(times, trust)).float().norm(dim=1) / scale
            index = recorder(self.features(history, inputs, scale, owners, block), errors).nonzero()[:, 0]
            inputs, added, scale = inputs[index], added[index], scale[index]
        self.found.blocks[block] = history.after(inputs, added, index, times, steps, scale, trust)
        return outputs

    def count(self, block: Hashable, nums: Sequence[int]) -> None:
        """Note how many units a block computes, per job."""
        self.num_computed[block] = list(nums)

    def commit(self) -> None:
        for place, job in enumerate(self.jobs):
            job.memory.packed, job.memory.position = self.found, place
            job.memory.num_computed = {block: nums[place] for block, nums in self.num_computed.items()}
            job.memory.num_units = {block: self.found.sizes[block][place] for block in self.num_computed}


def per_job(sizes: Sequence[int], num_branches: Sequence[int]) -> tuple[int, ...]:
    """Sums over the branches of each job."""
    ends = list(accumulate(num_branches))
    return tuple(sum(sizes[end - num : end]) for end, num in zip(ends, num_branches, strict=True))
