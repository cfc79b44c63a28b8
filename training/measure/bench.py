"""The tools that measure pictures, and the models that make them. Pictures are uint8 [N, 3, 256, 256], as people see
them; masks are bool [N, 256, 256], True = edit."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Generator, Tensor, nn

from instgenie.bench.metrics import Features, Lpips, Probe, crop_to_masks, kid
from instgenie.pictures.surroundings import with_surroundings
from instgenie.types import PixelMask, Pixels
from training.guidance import Guidance
from training.measure.painting import paint_one
from training.sampling import fill, load_pipeline

SIZE = 256
CROP_SIZE, CROP_PAD = 224, 8  # of the crops that are embedded
LPIPS_SIZE = 192  # side to which boxes are scaled
BATCH = {"cuda": 256, "cpu": 4}  # pictures at once; a CPU is faster with few, which fit its caches
LPIPS_BATCH = 32
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}  # of the transformer

Values = dict[str, float]


@dataclass(frozen=True, eq=False)
class Candidate:
    """A pipeline folder that is measured. Its latent channels, text tokens and sizes are read from the folder."""

    name: str  # its column in the tables
    folder: Path
    pipe: Any
    rule: Guidance | None = None  # by which it is guided in two branches; None if guidance is distilled into it

    @classmethod
    def load(cls, name: str, folder: str | Path, device: str) -> "Candidate":
        return cls(name, Path(folder), load_pipeline(str(folder), device, DTYPE[torch.device(device).type]))


@dataclass
class Bench:
    device: str
    steps: int
    guidance: float
    seed: int
    features: nn.Module  # pictures [B, 3, H, W] in [0, 1] -> [B, F]
    lpips: nn.Module
    workers: Executor = field(default_factory=ThreadPoolExecutor)
    console: Console = field(default_factory=Console)

    @classmethod
    def load(cls, device: str, steps: int, guidance: float, seed: int) -> "Bench":
        # threads would wait for each other; processes forked from one that uses a GPU may hang
        workers = ProcessPoolExecutor(mp_context=get_context("spawn")) if device != "cpu" else ThreadPoolExecutor()
        return cls(device, steps, guidance, seed, Features().to(device), Lpips().to(device), workers)

    @property
    def batch(self) -> int:
        return BATCH[torch.device(self.device).type]

    def generator(self, salt: int) -> Generator:
        """On the CPU, so that masks and choices are the same on every device."""
        return Generator().manual_seed(self.seed * 1000 + salt)

    def batched(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Apply a function batch by batch on the device; pictures become floats in [0, 1]."""
        parts = zip(*(tensor.split(self.batch) for tensor in tensors), strict=True)
        with torch.inference_mode():
            results = torch.cat([function(*(as_input(part.to(self.device)) for part in row)) for row in parts])
        return results.clone()  # outside inference mode: the probe is fitted with gradients

    def embed(self, pictures: Tensor) -> Tensor:
        return self.batched(self.features, pictures)

    def embed_crops(self, pictures: Tensor, masks: Tensor) -> Tensor:
        return self.batched(lambda p, m: self.features(crop_to_masks(p, m, CROP_SIZE, CROP_PAD)), pictures, masks)

    def lpips_whole(self, a: Tensor, b: Tensor) -> Tensor:
        return self.batched(self._lpips_parts, a, b)

    def lpips_inside(self, a: Tensor, b: Tensor, masks: Tensor) -> Tensor:
        """Distances of the boxes around the masks, with b's pixels outside the mask in both."""

        def part(a: Tensor, b: Tensor, masks: Tensor) -> Tensor:
            inside = torch.where(masks[:, None], a, b)
            return self._lpips_parts(*(crop_to_masks(x, masks, LPIPS_SIZE) for x in (inside, b)))

        return self.batched(part, a, b, masks)

    def _lpips_parts(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([self.lpips(*row) for row in zip(a.split(LPIPS_BATCH), b.split(LPIPS_BATCH), strict=True)])

    def edit(
        self,
        candidate: Candidate,
        pictures: Tensor,
        masks: Tensor,
        prompts: Sequence[str],
        salt: int,
        contents: Tensor | None = None,
    ) -> Tensor:  # like pictures
        """Edits as the engine paints them, from noise or from contents, which are like pictures. The noise of a picture
        depends on the seed, the salt and its place alone."""
        painted: list[Iterator[Pixels]] = []
        for start in range(0, len(prompts), self.batch):
            rows = slice(start, start + self.batch)
            seed = (self.seed * 1000 + salt) * 100_000 + start
            chunk, mask = as_input(pictures[rows].to(self.device)), masks[rows].to(self.device)
            edits = candidate.pipe, chunk, mask, list(prompts[rows]), self.guidance, self.steps, seed
            content = None if contents is None else as_input(contents[rows].to(self.device))
            decoded = as_pixels(fill(*edits, rule=candidate.rule, content=content))
            # the workers paint while the next batch is made
            own, made = as_pictures(pictures[rows]), as_pictures(decoded)
            painted.append(self.work(paint_one, own, made, masks[rows].cpu().numpy()))
        return stacked(chain.from_iterable(painted)).to(pictures.device)

    def surroundings(self, pictures: Tensor, masks: Tensor) -> Tensor:
        """Pictures with what surrounds their masks in the place of what is masked."""
        made = self.work(with_surroundings, as_pictures(pictures), masks.cpu().numpy())
        return stacked(made).to(pictures.device)

    def work(self, function: Callable[..., Pixels], *columns: Pixels | PixelMask) -> Iterator[Pixels]:
        """Call the function for every row of the columns; the iterator waits for the workers."""
        return self.workers.map(function, *columns, chunksize=8)

    def generate(self, candidate: Candidate, prompts: Sequence[str], salt: int) -> Tensor:
        blank = torch.full((1, 3, SIZE, SIZE), 128, dtype=torch.uint8).expand(len(prompts), -1, -1, -1)
        full = torch.ones(1, SIZE, SIZE, dtype=torch.bool).expand(len(prompts), -1, -1)
        return self.edit(candidate, blank, full, prompts, salt)


def stacked(pictures: Iterable[Pixels]) -> Tensor:
    return torch.from_numpy(np.stack(list(pictures))).permute(0, 3, 1, 2).contiguous()


def as_pictures(pixels: Tensor) -> Pixels:
    return pixels.permute(0, 2, 3, 1).contiguous().cpu().numpy()  # [B, H, W, 3]


def as_input(tensor: Tensor) -> Tensor:
    return tensor.float() / 255 if tensor.dtype == torch.uint8 else tensor


def as_pixels(pictures: Tensor) -> Tensor:
    return (pictures.clamp(0, 1) * 255).round().byte()


def share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits) if hits else float("nan")


def accuracy(probe: Probe, features: Tensor, labels: Sequence[str]) -> float:
    return share([a == b for a, b in zip(probe.predict(features), labels, strict=True)])


def kid_values(name: str, made: Tensor, real: Tensor) -> Values:
    mean, deviation = kid(made, real)
    return {name: mean, f"{name} deviation": deviation}


def prefixed(prefix: str, values: Values) -> Values:
    return {f"{prefix}, {name}": value for name, value in values.items()}
