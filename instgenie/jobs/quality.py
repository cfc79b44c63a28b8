"""The quality knob: how close an edit that reuses activations keeps to the dense one. Knows edits; knows no model.

docs/quality.md draws fidelity against cost; these are the points chosen on that curve.
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
    """What a quality asks of an edit."""

    dense_share: float  # of the steps, the leading ones, rounded up
    halo: int  # in tokens

    def dense_steps(self, steps: int) -> int:
        return math.ceil(self.dense_share * steps)


SETTINGS: dict[Quality, Setting] = {
    "fast": Setting(dense_share=0.0, halo=0),
    "balanced": Setting(dense_share=0.06, halo=0),
    "exact": Setting(dense_share=1.0, halo=0),
}


def with_quality(edit: Edit, quality: Quality) -> Edit:
    """The edit with the dense steps and the halo of a quality."""
    if quality not in SETTINGS:
        raise EditError(f"the quality is {quality!r}: {', '.join(get_args(Quality))} are known")
    setting = SETTINGS[quality]
    return replace(edit, dense_steps=setting.dense_steps(edit.steps), halo=setting.halo)
