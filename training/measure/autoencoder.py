"""Figures of the autoencoder alone: what is left of a picture that is encoded and decoded."""

import torch
from torch import Tensor

from instgenie.bench.metrics import psnr, ssim
from training.measure.bench import SIZE, Bench, Candidate, Values, as_pixels, kid_values
from training.measure.photographs import Holdout
from training.sampling import reconstruct


def autoencoder_figures(bench: Bench, holdout: Holdout, scenes: Tensor, candidate: Candidate) -> Values:
    figures = {}
    for name, pictures in (("photographs", holdout.val.pictures), ("scenes", scenes)):
        rebuilt = bench.batched(lambda x: as_pixels(reconstruct(candidate.pipe, x)), pictures)
        full = torch.ones(len(pictures), SIZE, SIZE, dtype=torch.bool)
        figures |= {
            f"PSNR, {name}": bench.batched(psnr, rebuilt, pictures).mean().item(),
            f"SSIM, {name}": bench.batched(ssim, rebuilt, pictures).mean().item(),
            f"LPIPS at 192 px, {name}": bench.lpips_inside(rebuilt, pictures, full).mean().item(),
            f"LPIPS at 256 px, {name}": bench.lpips_whole(rebuilt, pictures).mean().item(),
        }
        if name == "photographs":
            figures |= kid_values("KID of reconstructions", bench.embed(rebuilt), holdout.val_features)
    return figures
