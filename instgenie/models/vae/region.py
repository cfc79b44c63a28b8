"""Decodes a box of a picture, with diffusers' tiny autoencoder: it is convolutions and nothing else, so a pixel depends
on no more of the picture than they reach. Other decoders, whose norms and attention see everything, decode all of it.

A stage of the decoder computes what is needed of it: the box at its resolution, and around it as many pixels as
convolutions follow.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from diffusers import AutoencoderTiny
from torch import Tensor, nn

from instgenie.types import Box


@dataclass(frozen=True)
class Stage:
    """Layers of one resolution."""

    layers: nn.Sequential
    scale: int  # of what comes out to what goes in
    reach: int  # pixels that what comes out depends on, to each side

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
    """`vae.decode`, of a box of the pictures: [pictures, 3, rows, cols]."""
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
    """At each change of resolution."""
    gathered: list[nn.Module] = []
    for layer in layers:
        if isinstance(layer, nn.Upsample):
            yield Stage.of(gathered)
            gathered = []
        gathered.append(layer)
    yield Stage.of(gathered)


def needs(stages: Sequence[Stage], needed: range, length: int) -> list[range]:
    """What each stage has to be given of a side of so many latents, for what is needed of the last one's pixels."""
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
    """The box out of what is there."""
    rows, cols = (
        slice(part.start - whole.start, part.stop - whole.start) for part, whole in zip(box, there, strict=True)
    )
    return values[:, :, rows, cols]
