"""ControlNets of a job: the images that guide it, and promises of residuals. Knows no ControlNet."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from instgenie.types import ControlUse


@dataclass(frozen=True, eq=False)
class JobControl:
    """A ControlNet of a job with what it sees of its image."""

    use: ControlUse
    hint: Tensor  # pixels [3, height, width], or the tokens [tokens, channels] that the autoencoder made of them

    def scale_at(self, step: int, num_steps: int) -> float:
        """0 at steps that it does not guide, as diffusers counts them."""
        return float(self.use.scale) if self.use.guides(step, num_steps) else 0.0


class Promise(Protocol):
    """Residuals of a job's present step, which somebody computes."""

    def result(self) -> Sequence[Tensor]:
        """Per place of the network [branches, ...], the sums over the job's ControlNets; waits for them."""
        ...
