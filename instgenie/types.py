"""The words of the system: what a user asks for and what comes back. Knows no model and no device."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]  # [height, width, 3]
PixelMask = NDArray[np.bool_]  # [height, width], True = masked


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
    cache_hit: bool  # whether the template's activations were there
    seconds: Timings

    @property
    def masked_share(self) -> float:
        return self.num_masked_tokens / self.num_tokens
