"""Random draws on the device, and views of photographs: crops, flips, placements."""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from training import masks


class Draw:
    """Random numbers of one generator, and of a second one on the CPU where the program needs to know them."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.host = Generator().manual_seed(generator.initial_seed())

    def integers(self, high: int, num: int) -> Tensor:
        return torch.randint(high, (num,), generator=self.generator, device=self.generator.device)

    def integer(self, low: int, high: int) -> int:
        """One number of low to high - 1, drawn without waiting for the device."""
        return int(torch.randint(low, high, (), generator=self.host))

    def pick(self, rows: Tensor, num: int) -> Tensor:
        return rows[self.integers(len(rows), num)]

    def chance(self, num: int, share: float) -> Tensor:
        return self.uniform((num,), 0, 1) < share

    def uniform(self, shape: tuple[int, ...], low: float, high: float) -> Tensor:
        return masks.uniform(shape, low, high, self.generator)

    def crop(self, num: int, height: int, width: int) -> Tensor:
        """A random crop of at least 75 % of the side, flipped half of the time: output to input coordinates."""
        scale = 1 - self.uniform((num,), 0, 0.25) * self.chance(num, 0.7)
        scale_x, scale_y = scale * min(1, width / height), scale * min(1, height / width)
        shift_x = self.uniform((num,), -1, 1) * (1 - scale_x)
        shift_y = self.uniform((num,), -1, 1) * (1 - scale_y)
        return self._affine(scale_x, scale_y, shift_x, shift_y)

    def placement(self, num: int, low: float, high: float) -> Tensor:
        """The whole photograph, scaled and put somewhere."""
        size = self.uniform((num,), low, high)
        shift_x, shift_y = ((self.uniform((num,), -1, 1) * (1 - size).clamp(min=0)) / size for _ in range(2))
        return self._affine(1 / size, 1 / size, shift_x, shift_y)

    def light(self, pictures: Tensor) -> Tensor:
        """Half of the pictures get a little more or less contrast and brightness."""
        num = len(pictures)
        is_changed = self.chance(num, 0.5)
        contrast = torch.where(is_changed, self.uniform((num,), 0.85, 1.15), 1.0)[:, None, None, None]
        brightness = torch.where(is_changed, self.uniform((num,), -0.12, 0.12), 0.0)[:, None, None, None]
        return (pictures * contrast + brightness).clamp(-1, 1)

    def _affine(self, scale_x: Tensor, scale_y: Tensor, shift_x: Tensor, shift_y: Tensor) -> Tensor:
        flip = torch.where(self.chance(len(scale_x), 0.5), -1.0, 1.0)
        zero = torch.zeros_like(scale_x)
        return torch.stack([flip * scale_x, zero, shift_x, zero, scale_y, shift_y], 1).view(-1, 2, 3)


def view(pictures: Tensor, theta: Tensor, height: int, width: int) -> Tensor:
    """[B, C, 256, 256] uint8 -> [B, C, height, width] in [-1, 1]; -1 beyond the edge."""
    places = F.affine_grid(theta, [len(theta), 3, height, width], align_corners=False)
    seen = F.grid_sample(pictures.float() / 255, places, mode="bicubic", align_corners=False)
    return seen.clamp(0, 1) * 2 - 1


def outline_view(outlines: Tensor, theta: Tensor, height: int, width: int) -> Tensor:
    """[B, 256, 256] bool -> [B, height, width] bool."""
    places = F.affine_grid(theta, [len(theta), 1, height, width], align_corners=False)
    return F.grid_sample(outlines[:, None].to(torch.bfloat16).float(), places, align_corners=False)[:, 0] > 0.5
