"""The quality setting: how close an edit that reuses activations stays to the dense one. Knows edits; knows no model.

docs/quality.md plots fidelity against cost; these are points on that curve.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from instgenie.cost.kept_steps import at_shares
from instgenie.errors import EditError
from instgenie.types import Edit

Quality = Literal["fast", "balanced", "adaptive", "exact"]
DEFAULT: Quality = "balanced"


@dataclass(frozen=True)
class Setting:
    """The dense steps and the halo of a quality."""

    dense_share: float  # with a template: share of leading steps that are dense, rounded up to whole steps
    halo: int  # in tokens
    own_shares: tuple[float, ...] = ()  # own reuse: how far on the way its dense steps are, besides the first
    max_change: float = 0.0  # own reuse: above 0, further dense steps are found from how much K and V change

    def dense_steps(self, steps: int) -> int:
        return math.ceil(self.dense_share * steps)

    def own_steps(self, steps: int) -> tuple[int, ...]:
        """The dense steps of an edit that reuses what they leave behind."""
        return tuple(range(steps)) if self.dense_share == 1 else at_shares(steps, self.own_shares).steps


SETTINGS: dict[Quality, Setting] = {
    "fast": Setting(dense_share=0.0, halo=0, own_shares=(4 / 28, 12 / 28)),
    "balanced": Setting(dense_share=0.06, halo=0, own_shares=(1 / 28, 2 / 28, 3 / 28, 8 / 28, 16 / 28)),
    "adaptive": Setting(dense_share=0.06, halo=0, max_change=0.1),
    "exact": Setting(dense_share=1.0, halo=0),
}


def with_quality(edit: Edit, quality: Quality) -> Edit:
    """Return the edit with the dense steps and the halo of a quality."""
    if quality not in SETTINGS:
        raise EditError(f"the quality is {quality!r}: it must be one of {', '.join(get_args(Quality))}")
    setting = SETTINGS[quality]
    return replace(
        edit,
        dense_steps=setting.dense_steps(edit.steps),
        halo=setting.halo,
        own_steps=setting.own_steps(edit.steps),
        max_change=setting.max_change,
    )
