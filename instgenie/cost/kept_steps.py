"""Which steps leave activations behind, and which of them serves each step. Knows numbers only.

Activations change slowly from step to step, so those of one step serve the steps that follow it. A template may be
registered at every fourth step only; an edit without a template keeps what its own dense steps leave behind.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class KeptSteps:
    """The steps whose activations are kept, in rising order. The latest one up to a step serves it; its number among
    the kept ones is the slot in which its activations lie. Steps count from where the edit begins: an edit of lower
    strength leaves out the first steps of its template, so that kept steps may be negative."""

    num_steps: int  # of the edit, or of the template
    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        assert list(self.steps) == sorted(set(self.steps)), self.steps
        assert not self.steps or self.steps[-1] < self.num_steps, (self.steps, self.num_steps)

    def __contains__(self, step: int) -> bool:
        slot = bisect_right(self.steps, step) - 1
        return slot >= 0 and self.steps[slot] == step

    def slot(self, step: int) -> int:
        """The number of the kept step that serves a step. The first kept step also serves those before it."""
        return max(bisect_right(self.steps, step) - 1, 0)

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
        return KeptSteps(num_steps, tuple(step - skipped for step in self.steps))


@lru_cache(maxsize=64)
def every_step(num_steps: int, stride: int = 1) -> KeptSteps:
    """Keep the first step and every `stride`-th after it."""
    return KeptSteps(num_steps, tuple(range(0, num_steps, stride)))


def at_shares(num_steps: int, shares: tuple[float, ...]) -> KeptSteps:
    """Keep the steps nearest to these shares of the way, the first step always."""
    steps = {min(round(share * num_steps), num_steps - 1) for share in shares}
    return KeptSteps(num_steps, tuple(sorted(steps | {0})))
