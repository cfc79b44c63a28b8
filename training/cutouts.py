"""Objects that are pasted into other photographs, cut out along their outlines: pets, garments, flowers."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from instgenie.bench.photos import Photos
from training import masks
from training.colours import ORANGE, PETALS, WHITE, YELLOW, colour_names
from training.garments import find_garments
from training.views import Draw, outline_view, view


@dataclass
class Pasted:
    """Pictures with an object in them, and where it is."""

    pictures: Tensor  # [B, 3, H, W]
    shapes: Tensor  # [B, H, W] bool
    rows: Tensor  # [B] the object's photograph
    theta: Tensor  # [B, 2, 3] how that photograph was placed


class Cutouts:
    def __init__(self, photos: Photos, draw: Draw) -> None:
        device = photos.pictures.device
        self.pictures, self.draw = photos.pictures, draw
        self.outlines = photos.outlines.clone()
        flowers, clothing = (_rows(photos, name, device) for name in ("flower", "clothing"))
        pets = photos.outlines.flatten(1).any(1).nonzero()[:, 0]
        self.outlines[clothing] = find_garments(self.pictures[clothing])
        for part in flowers.split(256):
            self.outlines[part] = tidy(petals(self.pictures[part].float() / 127.5 - 1))
        self.clothing = clothing[self.outlines[clothing].flatten(1).any(1)]
        self.pets, self.garments, self.flowers = (self._whole(rows) for rows in (pets, self.clothing, flowers))
        self.shapes = torch.cat([pets, self.clothing])  # photographs with an outline, cut by the frame or not
        self.objects = torch.cat([self.pets, self.garments])

    def paste(self, pictures: Tensor, rows: Tensor, low: float, high: float) -> Pasted:
        """Paste the object of another photograph, cut out along its outline."""
        num, _, height, width = pictures.shape
        theta = self.draw.placement(num, low, high)
        shapes = outline_view(self.outlines[rows], theta, height, width)
        alpha = soft(masks.erode(shapes, 2))
        pasted = view(self.pictures[rows], theta, height, width)
        return Pasted(pictures * (1 - alpha) + pasted * alpha, shapes, rows, theta)

    def foreign(self, num: int, height: int, width: int, theta: Tensor | None = None) -> Tensor:
        """[num, height, width] bool: outlines of any objects, put anywhere or where `theta` [num, 2, 3] says."""
        if not len(self.shapes):
            return torch.zeros(num, height, width, dtype=torch.bool, device=self.pictures.device)
        rows = self.draw.pick(self.shapes, num)
        theta = self.draw.placement(num, 0.35, 1.1) if theta is None else theta
        return outline_view(self.outlines[rows], theta, height, width)

    def _whole(self, rows: Tensor) -> Tensor:
        """Those rows whose object has a sensible size and is not cut by the frame."""
        if not len(rows):
            return rows
        edge = torch.ones(256, 256, dtype=torch.bool, device=self.pictures.device)
        edge[2:-2, 2:-2] = False
        outlines = self.outlines[rows]
        touching, area = (outlines & edge).flatten(1).sum(1), outlines.flatten(1).float().mean(1)
        return rows[(touching < 100) & (area > 0.06) & (area < 0.7)]


def soft(shapes: Tensor) -> Tensor:
    """[B, H, W] bool -> [B, 1, H, W]: the share of a shape in each pixel, with a soft edge."""
    return F.avg_pool2d(shapes[:, None].float(), 3, 1, 1)


def tidy(found: Tensor) -> Tensor:
    """[B, H, W] bool without specks and small holes, with a smooth edge."""
    closed = masks.erode(masks.dilate(found, 6), 6)
    opened = masks.dilate(masks.erode(closed, 3), 3)
    return F.avg_pool2d(opened[:, None].float(), 7, 1, 3)[:, 0] > 0.5


def differs_from_edges(pictures: Tensor) -> Tensor:
    """[B, H, W] bool: pixels that differ from the left and right edges of the picture."""
    edges = torch.cat([pictures[..., :8], pictures[..., -8:]], -1).flatten(2).median(2).values
    return (pictures - edges[:, :, None, None]).abs().mean(1) > 0.2


def petals(pictures: Tensor) -> Tensor:
    """[B, H, W] bool: pixels whose colour is that of most petals in the middle, or of a flower's heart."""
    names = colour_names(pictures / 2 + 0.5)
    height, width = names.shape[1:]
    middle = names[:, height // 4 : -height // 4, width // 4 : -width // 4].flatten(1)
    counts = torch.stack([(middle == name).sum(1) for name in PETALS], 1)
    main = torch.tensor(PETALS, device=names.device)[counts.argmax(1)][:, None, None]
    return (names == main) | (names == YELLOW) | ((names == ORANGE) & (main != WHITE))


def _rows(photos: Photos, species: str, device: torch.device) -> Tensor:
    rows = [row for row, name in enumerate(photos.species) if name == species]
    return torch.tensor(rows, device=device, dtype=torch.long)
