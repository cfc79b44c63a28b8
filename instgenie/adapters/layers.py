"""The layers of a pipeline that a LoRA may patch, as plain numbers, and the names that trainers give them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class LayerShape(NamedTuple):
    inputs: int
    outputs: int
    kernel: tuple[int, int] | None = None  # of a convolution; None: a linear layer


class Alias(NamedTuple):
    """What a foreign name stands for: one layer, or several whose outputs lie one behind the other."""

    layers: tuple[str, ...]
    swaps_halves: bool = False  # the outputs of the second half come first


@dataclass(frozen=True)
class LayerTable:
    """Per part of a pipeline, its layers by name, and aliases by underscored name."""

    shapes: Mapping[str, Mapping[str, LayerShape]]
    aliases: Mapping[str, Mapping[str, Alias]]
