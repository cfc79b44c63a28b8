"""The types that users and all layers share: what a user asks for and gets back. Knows no model and no device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]  # [height, width, 3], sRGB
OwnPixels = NDArray[np.uint8]  # [height, width, channels]: grey, grey and alpha, RGB, or RGBA
PixelMask = NDArray[np.bool_]  # [height, width], True = masked
TierName = Literal["gpu", "host", "disk", "peer", "remote"]  # the places where activations are found, fastest first
OnStep = Callable[[int, int], None]  # called with the steps taken so far and the steps in all
OnBytes = Callable[[int, int], None]  # called with the bytes that are loaded so far and the bytes in all
Kind = Literal["kv", "y"]  # kinds of activations: K and V of every block, or the rows that go into it
CacheDtype = Literal["model", "fp8", "int4"]  # activations in the model's dtype, or packed into 1/2 or 5/16 of bfloat16
Convolutions = Literal["dense", "tiled", "reused"]  # a UNet's see whole pictures, all tiles, or masked tiles alone
TextPadding = Literal["computed", "reused"]  # reused: padding of a text is read from activations, like unmasked tokens
Quantization = Literal["fp8"]  # of the products of the network: weights and rows in e4m3
WeightsDtype = Literal["fp8"]  # of large weights, in e4m3: a byte each, whether or not products are of low precision
Reuse = Literal["auto", "own", "template", "off"]  # of activations: see `Edit.reuse`
ReuseFound = Literal["template", "own", "none"]  # whose activations an edit has read
CropMode = Literal["auto", "off", "masked"]  # what is edited: a crop around the mask if it helps, all, a crop
MaskedContent = Literal["original", "surroundings"]  # what a masked part starts from, under noise
PlanPolicy = Literal["exact", "greedy", "cached", "naive", "dense"]  # how blocks are planned; see `cost.planner`
Notes = list[str]  # plain sentences for the user about how a request was read; readers append to it
NUM_PARTS: dict[Kind, int] = {"kv": 2, "y": 1}  # K and V; or Y


class Box(NamedTuple):
    """A rectangle of a picture."""

    rows: range
    cols: range

    @property
    def size(self) -> tuple[int, int]:
        return len(self.rows), len(self.cols)


@dataclass(frozen=True, eq=False)
class Source:
    """The file that a picture was made from: what an edit of it has to keep."""

    pixels: OwnPixels | None = None  # in the file's own colours, with its alpha; None: those of the picture
    profile: bytes = b""  # ICC profile of the pixels; empty: sRGB
    exif: bytes = b""  # metadata

    @property
    def has_alpha(self) -> bool:
        return self.pixels is not None and self.pixels.shape[2] in (2, 4)


@dataclass(frozen=True, eq=False)
class Whole:
    """A photograph, and the part of it that is edited."""

    pixels: OwnPixels  # of the whole photograph, in the colours of its file
    source: Source | None  # the photograph's file; None: the pixels are all there is
    box: Box

    @property
    def is_cropped(self) -> bool:
        return self.box.size != self.pixels.shape[:2]


class LoraUse(NamedTuple):
    """A LoRA that an edit asks for."""

    name: str
    scale: float = 1.0
    path: str = ""  # of its file, which whoever knows the names fills in
    version: str = ""  # of its file
    num_bytes: int = 0
    url: str = ""  # from which its file is copied to that path; empty: it is there
    num_file_bytes: int = 0


class ControlUse(NamedTuple):
    """A ControlNet that an edit asks for. Its image is one of the edit's `control_images`."""

    name: str
    scale: float = 1.0
    start: float = 0.0  # share of the steps before it begins to guide
    end: float = 1.0  # share of the steps after which it no longer guides
    path: str = ""  # of its folder, which whoever knows the names fills in
    version: str = ""  # of its folder
    places: tuple[int, int] = (0, 0)  # numbers of its residuals: for skips and the middle, or double and single blocks
    reads_latents: bool = False  # it sees its image as the autoencoder encodes it
    mode: int | None = None  # the kind of image, for a ControlNet that knows several
    num_bytes: int = 0  # of its weights

    def guides(self, step: int, num_steps: int) -> bool:
        """Return whether it guides a step, as diffusers counts them."""
        return bool(self.scale) and step / num_steps >= self.start and (step + 1) / num_steps <= self.end

    def share(self, num_steps: int, first: int = 0) -> float:
        """Share of the steps that it guides, from one on."""
        return sum(self.guides(step, num_steps) for step in range(first, num_steps)) / max(num_steps - first, 1)


@dataclass(frozen=True, eq=False)
class Edit:
    """A request to change the masked pixels of a picture into what the prompt describes."""

    picture: Pixels
    mask: PixelMask
    prompt: str
    seed: int = 0
    steps: int = 28
    guidance: float = 3.5  # input of Flux's guidance embedding, if it has one; classifier-free guidance for others
    true_guidance: float = 1.0  # > 1: classifier-free guidance against the negative prompt, two branches
    negative_prompt: str = ""
    strength: float = 1.0  # share of the trajectory that is run; < 1 keeps traces of the original
    masked_content: MaskedContent = "original"  # what the masked part starts from, if the strength is below 1
    feather: int = 0  # width in pixels of the soft edge, inside the mask
    size: tuple[int, int] | None = None  # (height, width) the model works at; None = the model's own
    dense_steps: int = 0  # leading steps that compute every token even if the template has activations
    halo: int = 0  # width in tokens of the rim around the mask that is computed too, but keeps its content
    reuse: Reuse = "auto"
    """auto reads the activations of a registered template, or without one those that the edit's own dense steps leave
    behind; own always does the latter; template registers the picture first if need be, or fails; off computes every
    token."""
    own_steps: tuple[int, ...] | None = None  # dense steps of own reuse; None: those of the quality `balanced`
    max_change: float = 0.0  # own reuse: above 0, the last of these steps are found as K and V change by so much
    source: Source | None = None  # the picture's file; None: the picture is all there is
    crop: CropMode = "auto"  # whether a crop around the mask is edited in the place of the picture
    crop_padding: int | None = None  # pixels that a crop shows around the mask at least; None: a share of its box
    references: tuple[Pixels, ...] = ()  # pictures that the model looks at beside the edited one, if it can
    from_nothing: bool = False  # True: the picture stands for none, so a model that sees pictures sees none
    whole: Whole | None = None  # where the picture is a crop: the photograph that the result is put back into
    loras: tuple[LoraUse, ...] = ()  # added one to the other
    controls: tuple[ControlUse, ...] = ()
    control_images: tuple[Pixels, ...] = ()  # one per control, of the picture's size


@dataclass(frozen=True)
class Timings:
    """Seconds spent on each part of an edit."""

    prepare: float
    load: float  # looking up and loading the template's activations
    denoise: float
    finish: float


@dataclass(frozen=True, eq=False)
class Result:
    """An edited picture: outside the mask it is bit-identical to the edit's picture, or to the pixels of its source."""

    picture: OwnPixels
    seed: int
    num_tokens: int
    num_masked_tokens: int
    num_computed_tokens: int  # image tokens computed, mean over steps and blocks
    can_reuse: bool  # True if the template's activations can save such an edit any work
    cache_tier: TierName | None  # where the activations were found; None is a miss
    seconds: Timings
    reuse: ReuseFound = "none"  # whose activations were read
    crop: Box | None = None  # the part of the picture that was edited; None: all of it
    lora_step: int | None = None  # the step from which its LoRAs were applied; None: it has none

    @property
    def cache_hit(self) -> bool:
        return self.cache_tier is not None

    @property
    def masked_share(self) -> float:
        return self.num_masked_tokens / self.num_tokens


@dataclass(frozen=True)
class RegisterResult:
    """The outcome of a registration."""

    num_steps: int
    num_computed_steps: int  # the other steps were already kept
    num_bytes: int
