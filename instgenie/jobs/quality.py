"""The quality setting: how close an edit that reuses activations stays to the dense one. Knows edits; knows no model.

docs/quality.md plots fidelity against cost; these are points on that curve.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from instgenie.errors import EditError
from instgenie.types import Edit

Quality = Literal["fast", "balanced", "exact"]
DEFAULT: Quality = "balanced"


@dataclass(frozen=True)
class Setting:
    """The dense steps and the halo of a quality."""

    dense_share: float  # share of leading steps that are dense, rounded up to whole steps
    halo: int  # in tokens

    def dense_steps(self, steps: int) -> int:
        return math.ceil(self.dense_share * steps)


SETTINGS: dict[Quality, Setting] = {
    "fast": Setting(dense_share=0.0, halo=0),
    "balanced": Setting(dense_share=0.06, halo=0),
    "exact": Setting(dense_share=1.0, halo=0),
}


def with_quality(edit: Edit, quality: Quality) -> Edit:
    """Return the edit with the dense steps and the halo of a quality."""
    if quality not in SETTINGS:
        raise EditError(f"the quality is {quality!r}: it must be one of {', '.join(get_args(Quality))}")
    setting = SETTINGS[quality]
    return replace(edit, dense_steps=setting.dense_steps(edit.steps), halo=setting.halo)
