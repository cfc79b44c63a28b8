"""Decodes a box of a picture with diffusers' tiny autoencoder. It consists of convolutions only, so a pixel depends on
the latents within their reach. Other decoders have norms and attention that see everything; they decode whole pictures.

Each stage of the decoder computes the box at its own resolution with a margin as wide as the reach of the convolutions
that follow.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from diffusers import AutoencoderTiny
from torch import Tensor, nn

from instgenie.types import Box


@dataclass(frozen=True)
class Stage:
    """Consecutive layers of one resolution."""

    layers: nn.Sequential
    scale: int  # of the output to the input
    reach: int  # pixels to each side that an output depends on

    @classmethod
    def of(cls, layers: Sequence[nn.Module]) -> "Stage":
        scale = int(layers[0].scale_factor) if isinstance(layers[0], nn.Upsample) else 1  # type: ignore[arg-type]
        convolutions = (module for layer in layers for module in layer.modules() if isinstance(module, nn.Conv2d))
        return cls(nn.Sequential(*layers), scale, sum(int(one.kernel_size[0]) // 2 for one in convolutions))


def can_decode_boxes(vae: nn.Module) -> bool:
    return (
        isinstance(vae, AutoencoderTiny)
        and vae.config.upsample_fn == "nearest"
        and vae.config.upsampling_scaling_factor == 2
    )


def decode_box(vae: AutoencoderTiny, latents: Tensor, box: Box) -> Tensor:
    """Decode a box of the pictures: `vae.decode` of that box, [pictures, 3, rows, cols]."""
    stages = list(split(vae.decoder.layers))
    height, width = latents.shape[2:]
    needed = zip(needs(stages, box.rows, height), needs(stages, box.cols, width), strict=True)
    there = Box(range(height), range(width))
    values = torch.tanh(latents / 3) * 3
    for stage, (rows, cols) in zip(stages, needed, strict=True):
        values = stage.layers(cut(values, there, Box(rows, cols)))
        there = Box(magnify(rows, stage.scale), magnify(cols, stage.scale))
    return cut(values, there, box).mul(2).sub(1)


def split(layers: Iterable[nn.Module]) -> Iterator[Stage]:
    """Split the layers at each change of resolution."""
    gathered: list[nn.Module] = []
    for layer in layers:
        if isinstance(layer, nn.Upsample):
            yield Stage.of(gathered)
            gathered = []
        gathered.append(layer)
    yield Stage.of(gathered)


def needs(stages: Sequence[Stage], needed: range, length: int) -> list[range]:
    """The input that each stage needs along a side of `length` latents, for the `needed` pixels of the last stage."""
    for stage in stages:
        length *= stage.scale
    given: list[range] = []
    for stage in reversed(stages):
        start, stop = max(needed.start - stage.reach, 0), min(needed.stop + stage.reach, length)
        needed = range(start // stage.scale, -(-stop // stage.scale))
        length //= stage.scale
        given.insert(0, needed)
    return given


def magnify(span: range, scale: int) -> range:
    return range(span.start * scale, span.stop * scale)


def cut(values: Tensor, there: Box, box: Box) -> Tensor:
    """Cut the box out of values that cover the box `there`."""
    rows, cols = (
        slice(part.start - whole.start, part.stop - whole.start) for part, whole in zip(box, there, strict=True)
    )
    return values[:, :, rows, cols]
