"""Looks that a LoRA learns: filters of pictures, and examples whose masked part has such a look. Knows no model.

The surroundings of the mask stay a photograph, so a LoRA learns to paint in its look whatever is around.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from training.examples import Examples, ExampleSource

Style = Callable[[Tensor], Tensor]  # pictures [B, 3, height, width] in [-1, 1] to pictures

LUMA = (0.299, 0.587, 0.114)
PENCIL_BLUR = 5.0  # pixels: the width of a soft stroke
PENCIL_PRESSURE = 2.5  # how dark strokes are
DUOTONE = ((0.0, 0.13, 0.2), (0.1, 0.5, 0.52), (1.0, 0.84, 0.6))  # colours of black, grey and white


def luminance(pictures: Tensor) -> Tensor:
    """[B, 1, height, width] in [0, 1]."""
    weights = pictures.new_tensor(LUMA)[:, None, None]
    return ((pictures + 1) / 2 * weights).sum(1, keepdim=True).clamp(0, 1)


def blurred(grey: Tensor, sigma: float) -> Tensor:
    """A Gaussian blur [B, 1, height, width]."""
    reach = round(3 * sigma)
    places = torch.arange(-reach, reach + 1, device=grey.device, dtype=grey.dtype)
    kernel = torch.softmax(-places.square() / (2 * sigma**2), 0)
    rows = F.conv2d(F.pad(grey, (reach, reach, 0, 0), mode="reflect"), kernel.view(1, 1, 1, -1))
    return F.conv2d(F.pad(rows, (0, 0, reach, reach), mode="reflect"), kernel.view(1, 1, -1, 1))


def pencil(pictures: Tensor) -> Tensor:
    """A pencil drawing: paper where the picture is even, strokes where it is darker than around, and a light shade."""
    grey = luminance(pictures)
    strokes = (grey / blurred(grey, PENCIL_BLUR).clamp(min=0.02)).clamp(0, 1) ** PENCIL_PRESSURE
    drawing = strokes * (0.7 + 0.3 * grey)
    return (2 * drawing - 1).expand_as(pictures)


def teal(pictures: Tensor) -> Tensor:
    """Two colours: shadows are teal and lights are a warm cream."""
    grey = luminance(pictures)
    dark, middle, light = (pictures.new_tensor(colour)[:, None, None] for colour in DUOTONE)
    shadows = torch.lerp(dark, middle, (2 * grey).clamp(0, 1))
    return 2 * torch.lerp(shadows, light, (2 * grey - 1).clamp(0, 1)) - 1


class StyledSource(ExampleSource):
    """Examples whose picture has the style inside the mask."""

    style: ClassVar[Style]

    def draw(self, num: int, height: int, width: int) -> Examples:
        examples = super().draw(num, height, width)
        styled = type(self).style(examples.pictures.clamp(-1, 1))
        examples.pictures = torch.where(examples.masks[:, None], styled, examples.pictures)
        return examples


class PencilSource(StyledSource):
    style = staticmethod(pencil)


class TealSource(StyledSource):
    style = staticmethod(teal)


SOURCES: dict[str, type[StyledSource]] = {"pencil": PencilSource, "teal": TealSource}
