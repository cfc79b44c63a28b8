"""The network that turns clicks into an outline: a small U-Net over a picture of 128 pixels, maps of the clicks, and
the outline that the clicks before gave, so that a further click refines it.

instgenie/server/static/select/network.js runs the same network in the browser; `weights.py` writes its weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIDE = 128  # pixels of the longer side
INPUTS = 11  # colours, clicks near and far and by colour (each inside and outside), hint, previous outline
NEAR = 4.0  # pixels: radius of a click
FAR = 32.0  # pixels: reach of a click
COLOUR = 0.12  # distance of colours that are alike
WIDTHS = (24, 48, 80, 112)  # channels at 64, 32, 16 and 8 pixels
DOWN = (1, 2, 3, 4)  # blocks of each width on the way down
UP = (2, 2, 2)  # blocks of each width but the last on the way up


def depthwise(channels: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False)
    return [conv, nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]


def pointwise(num_inputs: int, num_outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(num_inputs, num_outputs, 1, bias=False), nn.BatchNorm2d(num_outputs)]


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*depthwise(channels), *pointwise(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class OutlineNetwork(nn.Module):
    """Layers in the order in which they run; the browser's copy reads their weights in the same order."""

    def __init__(self) -> None:
        super().__init__()
        stem = nn.Conv2d(INPUTS, WIDTHS[0], 3, 2, 1, bias=False)
        starts = [nn.Sequential(stem, nn.BatchNorm2d(WIDTHS[0]), nn.ReLU(inplace=True))]
        for wider, width in zip(WIDTHS[1:], WIDTHS[:-1], strict=True):
            starts.append(nn.Sequential(*depthwise(width, 2), *pointwise(width, wider), nn.ReLU(inplace=True)))
        self.down = nn.ModuleList(
            nn.Sequential(start, *(Block(width) for _ in range(count)))
            for start, width, count in zip(starts, WIDTHS, DOWN, strict=True)
        )
        self.narrow, self.up = nn.ModuleList(), nn.ModuleList()
        for wider, width, count in reversed(list(zip(WIDTHS[1:], WIDTHS[:-1], UP, strict=True))):
            self.narrow.append(nn.Sequential(*pointwise(wider, width)))
            self.up.append(nn.Sequential(*(Block(width) for _ in range(count))))
        self.out = nn.Conv2d(WIDTHS[0], 1, 3, 1, 1)

    def forward(self, inputs: Tensor) -> Tensor:  # [B, INPUTS, H, W] -> logits [B, 1, H, W]
        x, skips = inputs, []
        for stage in self.down:
            x = stage(x)
            skips.append(x)
        for narrow, stage, skip in zip(self.narrow, self.up, reversed(skips[:-1]), strict=True):
            x = stage(F.relu(F.interpolate(narrow(x), scale_factor=2.0, mode="nearest") + skip))
        return F.interpolate(self.out(x), scale_factor=2.0, mode="bilinear", align_corners=False)

    def layers(self) -> list[nn.Module]:
        """Return convolutions and normalisations in the order in which they run."""
        ways = [*self.down, *(part for pair in zip(self.narrow, self.up, strict=True) for part in pair), self.out]
        return [part for way in ways for part in way.modules() if isinstance(part, (nn.Conv2d, nn.BatchNorm2d))]


def inputs_of(pictures: Tensor, clicks: Tensor, hint: Tensor, previous: Tensor) -> Tensor:
    """Stack the inputs. `pictures` [B, 3, H, W] in 0..1; `clicks` [B, K, 3] are (x, y, sign), sign 1 is inside, -1
    outside, 0 none; `hint` [B, 1, H, W] is 1 inside a box or loop; `previous` [B, 1, H, W] is 1 inside the outline so
    far."""
    height, width = pictures.shape[-2:]
    rows = torch.arange(height, dtype=torch.float32, device=pictures.device)[:, None]
    columns = torch.arange(width, dtype=torch.float32, device=pictures.device)[None, :]
    x, y, sign = (clicks[..., at, None, None] for at in range(3))
    squared = (columns - x) ** 2 + (rows - y) ** 2  # [B, K, H, W]
    smooth = F.avg_pool2d(pictures, 3, 1, 1, count_include_pad=False)
    places = (clicks[..., 1].round().clamp(0, height - 1) * width + clicks[..., 0].round().clamp(0, width - 1)).long()
    colours = smooth.flatten(2).gather(2, places[:, None].expand(-1, 3, -1))  # [B, 3, K]
    apart = sum((pictures[:, at, None] - colours[:, at, :, None, None]).square() for at in range(3))  # [B, K, H, W]
    kinds = [torch.exp(-squared / (2 * NEAR**2)), torch.exp(-squared.sqrt() / FAR), torch.exp(-apart / (2 * COLOUR**2))]
    maps = [(kind * (sign == wanted)).amax(1, keepdim=True) for wanted in (1, -1) for kind in kinds]
    return torch.cat([pictures - 0.5, *maps, hint, previous], 1)
