"""The network that turns clicks into an outline: a small U-Net over a picture of 96 pixels and maps of the clicks.

instgenie/server/static/select/network.js runs the same network in the browser; `weights.py` writes its weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIDE = 96  # pixels of the longer side
INPUTS = 10  # colours, clicks near and far and by colour (each inside and outside), hint
NEAR = 3.0  # pixels: radius of a click
FAR = 24.0  # pixels: reach of a click
COLOUR = 0.12  # distance of colours that are alike
WIDTHS = (16, 24, 32, 48)  # channels at 48, 24, 12 and 6 pixels


def unit(num_inputs: int, num_outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(num_inputs, num_outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(num_outputs), nn.ReLU(inplace=True)
    )


class OutlineNetwork(nn.Module):
    """Layers in the order in which they run; the browser's copy reads their weights in the same order."""

    def __init__(self) -> None:
        super().__init__()
        a, b, c, d = WIDTHS
        self.down0 = unit(INPUTS, a, 2)
        self.down1 = nn.Sequential(unit(a, b, 2), unit(b, b))
        self.down2 = nn.Sequential(unit(b, c, 2), unit(c, c), unit(c, c))
        self.down3 = nn.Sequential(unit(c, d, 2), unit(d, d), unit(d, d))
        self.up2 = unit(d + c, c)
        self.up1 = unit(c + b, b)
        self.up0 = unit(b + a, a)
        self.out = nn.Conv2d(a, 1, 3, 1, 1)

    def forward(self, inputs: Tensor) -> Tensor:  # [B, INPUTS, H, W] -> logits [B, 1, H, W]
        x0 = self.down0(inputs)
        x1 = self.down1(x0)
        x2 = self.down2(x1)
        x = self.down3(x2)
        x = self.up2(torch.cat([larger(x), x2], 1))
        x = self.up1(torch.cat([larger(x), x1], 1))
        x = self.up0(torch.cat([larger(x), x0], 1))
        return F.interpolate(self.out(x), scale_factor=2.0, mode="bilinear", align_corners=False)


def larger(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


def inputs_of(pictures: Tensor, clicks: Tensor, hint: Tensor) -> Tensor:
    """Stack the inputs. `pictures` [B, 3, H, W] in 0..1; `clicks` [B, K, 3] are (x, y, sign), sign 1 is inside, -1
    outside, 0 none; `hint` [B, 1, H, W] is 1 inside a box or loop."""
    height, width = pictures.shape[-2:]
    rows = torch.arange(height, dtype=torch.float32)[:, None]
    columns = torch.arange(width, dtype=torch.float32)[None, :]
    x, y, sign = (clicks[..., at, None, None] for at in range(3))
    distance = ((columns - x) ** 2 + (rows - y) ** 2).sqrt()  # [B, K, H, W]
    smooth = F.avg_pool2d(pictures, 3, 1, 1, count_include_pad=False)
    places = (clicks[..., 1].round().clamp(0, height - 1) * width + clicks[..., 0].round().clamp(0, width - 1)).long()
    colours = smooth.flatten(2).gather(2, places[:, None].expand(-1, 3, -1))  # [B, 3, K]
    apart = (pictures[:, :, None] - colours[..., None, None]).square().sum(1)  # [B, K, H, W]
    kinds = [torch.exp(-(distance**2) / (2 * NEAR**2)), torch.exp(-distance / FAR), torch.exp(-apart / (2 * COLOUR**2))]
    maps = [(kind * (sign == wanted)).amax(1, keepdim=True) for wanted in (1, -1) for kind in kinds]
    return torch.cat([pictures - 0.5, *maps, hint], 1)
