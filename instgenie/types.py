"""The words of the system: what a user asks for and what comes back. Knows no model and no device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]  # [height, width, 3]
PixelMask = NDArray[np.bool_]  # [height, width], True = masked
TierName = Literal["gpu", "host", "disk", "remote"]  # of the places where activations live
OnStep = Callable[[int, int], None]  # steps taken so far, steps to take
Kind = Literal["kv", "y"]  # of activations: K and V of every block, or the rows that go into it
CacheDtype = Literal["model", "fp8"]  # of activations: as the model computes them, or packed into half of bfloat16
PlanPolicy = Literal["exact", "greedy", "cached", "naive", "dense"]  # of who plans; see `planner`
NUM_PARTS: dict[Kind, int] = {"kv": 2, "y": 1}  # K and V; or Y


class Box(NamedTuple):
    """A part of a picture."""

    rows: range
    cols: range


@dataclass(frozen=True, eq=False)
class Edit:
    """What a user asks for: change the masked pixels of a picture into what the prompt says."""

    picture: Pixels
    mask: PixelMask
    prompt: str
    seed: int = 0
    steps: int = 28
    guidance: float = 3.5  # fed to Flux's guidance embedding, where it has one; true guidance for UNets
    true_guidance: float = 1.0  # > 1: classifier-free guidance against the negative prompt, two branches
    negative_prompt: str = ""
    strength: float = 1.0  # share of the trajectory that is run; < 1 keeps traces of what was there
    feather: int = 0  # width in pixels of the soft edge, inside the mask
    size: tuple[int, int] | None = None  # (height, width) the model works at; None = the model's own
    dense_steps: int = 0  # leading steps that compute every token, though the template's activations are there
    halo: int = 0  # tokens around the masked ones that are computed with them; they stay what they are


@dataclass(frozen=True)
class Timings:
    """Seconds spent on each part of an edit."""

    prepare: float
    load: float  # of the template's activations
    denoise: float
    finish: float


@dataclass(frozen=True, eq=False)
class Result:
    """An edited picture: outside the mask it is bit-identical to the edit's picture."""

    picture: Pixels
    seed: int
    num_tokens: int
    num_masked_tokens: int
    num_computed_tokens: int  # image tokens computed, in the mean over steps and blocks
    can_reuse: bool  # whether the template's activations spare such an edit anything
    cache_tier: TierName | None  # where they were found; None is a miss
    seconds: Timings

    @property
    def cache_hit(self) -> bool:
        return self.cache_tier is not None

    @property
    def masked_share(self) -> float:
        return self.num_masked_tokens / self.num_tokens


@dataclass(frozen=True)
class Registered:
    """What a registration came to."""

    num_steps: int
    num_computed_steps: int  # the others were there
    num_bytes: int
