"""Which steps leave activations behind, and which of them serves each step. Knows numbers only.

Activations change slowly from step to step, so those of one step serve the steps around it. A template may be
registered at every fourth step only; an edit without a template keeps what its own dense steps leave behind, for the
steps that follow them.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

NUM_KEPT = 4  # steps of a template that are kept where no stride is given


@dataclass(frozen=True)
class KeptSteps:
    """The steps whose activations are kept, in rising order, and the spans of steps that they serve. The number of a
    kept step among the others is the slot in which its activations lie. Steps count from where the edit begins: an edit
    of lower strength leaves out the first steps of its template, so that kept steps may be negative."""

    num_steps: int  # of the edit, or of the template
    steps: tuple[int, ...]
    firsts: tuple[int, ...] = ()  # the first step that each serves; empty: each serves itself and those that follow

    def __post_init__(self) -> None:
        for numbers in (self.steps, self.firsts):
            assert list(numbers) == sorted(set(numbers)), numbers
        assert not self.steps or self.steps[-1] < self.num_steps, (self.steps, self.num_steps)
        assert len(self.firsts) in (0, len(self.steps)), (self.firsts, self.steps)

    def __contains__(self, step: int) -> bool:
        slot = bisect_right(self.steps, step) - 1
        return slot >= 0 and self.steps[slot] == step

    def slot(self, step: int) -> int:
        """The number of the kept step that serves a step. The first kept step also serves those before it."""
        return max(bisect_right(self.firsts or self.steps, step) - 1, 0)

    def serving(self, step: int) -> int:
        """The kept step that serves a step."""
        return self.steps[self.slot(step)]

    @property
    def share(self) -> float:
        """The share of steps that are kept."""
        return len(self.steps) / self.num_steps

    def last(self, num_steps: int) -> "KeptSteps":
        """The same for an edit that takes the last steps alone. Slots keep their numbers."""
        skipped = self.num_steps - num_steps
        steps, firsts = (tuple(step - skipped for step in numbers) for numbers in (self.steps, self.firsts))
        return KeptSteps(num_steps, steps, firsts)


@lru_cache(maxsize=64)
def every_step(num_steps: int, stride: int = 1) -> KeptSteps:
    """Keep the step in the middle of every `stride` steps: no step is farther from it than half of them."""
    firsts = tuple(range(0, num_steps, stride))
    steps = tuple(first + min(stride, num_steps - first) // 2 for first in firsts)
    return KeptSteps(num_steps, steps, firsts)


def stride_of(stride: int, num_steps: int) -> int:
    """The stride of a template of `num_steps`; one of 0 is chosen so that few steps are kept."""
    return stride or max(num_steps // NUM_KEPT, 1)


def at_shares(num_steps: int, shares: tuple[float, ...]) -> KeptSteps:
    """Keep the steps nearest to these shares of the way, the first step always."""
    steps = {min(round(share * num_steps), num_steps - 1) for share in shares}
    return KeptSteps(num_steps, tuple(sorted(steps | {0})))
