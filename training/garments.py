"""Garments found in their photographs: what lies in the middle and has other colours than the frame around it.

Colours of the garment and of what is behind it are learnt from the picture itself, a few of each, in turn with the
garment's shape. A shape counts only if its edge is clear; where it is not, nothing is found.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from training import masks

SIDE = 64  # pixels; the shape is found at this size and refined at the picture's own
NUM_COLOURS, NUM_ROUNDS = 6, 5
AREA = (0.06, 0.75)  # of the picture
CONTRAST = 0.1  # between the colours on both sides of an edge that is clear
CLEAR_SHARE = 0.85  # of an edge
LONGEST_EDGE = 60  # squared and divided by the area: shapes with a longer one are ragged
BATCH = 64


def find_garments(pictures: Tensor) -> Tensor:
    """[N, 3, H, W] uint8 -> [N, H, W] bool, empty where no garment with a clear edge is found."""
    if not len(pictures):
        return torch.zeros_like(pictures[:, 0], dtype=torch.bool)
    return torch.cat([_find(part.float() / 255) for part in pictures.split(BATCH)])


def _find(pictures: Tensor) -> Tensor:
    height, width = pictures.shape[2:]
    small = smooth(opponents(F.interpolate(pictures, size=(SIDE, SIDE), mode="area")), 1)
    shape = coarse_shape(small)
    is_found = has_clear_edge(shape, small)
    full = F.interpolate(shape[:, None].float(), size=(height, width), mode="bilinear")[:, 0] > 0.5
    return refined(full, opponents(pictures), 3 * height // (2 * SIDE)) & is_found[:, None, None]


def coarse_shape(colours: Tensor) -> Tensor:
    """[N, 3, S, S] colours -> [N, S, S] bool: the shape in the middle, without small holes."""
    num, _, side, _ = colours.shape
    pixels = colours.flatten(2).transpose(1, 2)  # [N, S * S, 3]
    frame = torch.ones(num, side, side, dtype=torch.bool, device=colours.device)
    middle = torch.zeros_like(frame)
    frame[:, side // 20 : -(side // 20), side // 20 : -(side // 20)] = False
    middle[:, side // 3 : -(side // 3), side // 3 : -(side // 3)] = True
    inner, outer = middle, frame  # what is surely the garment, and what is surely not
    for _ in range(NUM_ROUNDS):
        near, apart = (
            distances(pixels, typical_colours(pixels, where.flatten(1))).square().amin(2).view(num, 1, side, side)
            for where in (inner, outer)
        )
        found = connected(middle, smooth(apart - near, 1)[:, 0] > 0)
        closed = masks.erode(masks.dilate(found, 1), 1) & (found | ~frame)  # nothing is joined to the picture's edge
        shape = masks.dilate(masks.erode(closed, 1), 1)
        inner, outer = masks.erode(shape, 1), ~masks.dilate(shape, 1)
        inner |= middle & ~inner.any(2, keepdim=True).any(1, keepdim=True)  # a shape that is lost begins anew
    return shape | small_holes(shape, frame)


def small_holes(shape: Tensor, frame: Tensor) -> Tensor:
    """Gaps in the shape that are no larger than a print on a garment; between an arm and the body they are."""
    holes = ~shape & ~connected(frame & ~shape, ~shape)
    return holes & ~connected(masks.erode(holes, 2), holes)


def typical_colours(pixels: Tensor, where: Tensor) -> Tensor:
    """[N, P, 3], [N, P] bool -> [N, K, 3]: k-means, begun with the mean and the colours farthest from it."""
    rows, weight = torch.arange(len(pixels), device=pixels.device), where.float()
    total = weight.sum(1).clamp(min=1)[:, None]
    centres = ((pixels * weight[..., None]).sum(1) / total)[:, None]
    for _ in range(NUM_COLOURS - 1):
        farthest = (distances(pixels, centres).amin(2) * weight).argmax(1)
        centres = torch.cat([centres, pixels[rows, farthest][:, None]], 1)
    for _ in range(NUM_COLOURS):
        nearest = F.one_hot(distances(pixels, centres).argmin(2), NUM_COLOURS) * weight[..., None]
        counts = nearest.sum(1)[..., None]  # [N, K, 1]
        centres = torch.where(counts > 0, nearest.transpose(1, 2) @ pixels / counts.clamp(min=1), centres)
    return centres


def connected(start: Tensor, inside: Tensor) -> Tensor:
    """What of `inside` can be reached from `start`; gaps of a pixel are crossed."""
    reached, grown = torch.zeros_like(inside), start & inside
    while not torch.equal(grown, reached):
        reached, grown = grown, masks.dilate(grown, 2) & inside
    return reached


def has_clear_edge(shape: Tensor, colours: Tensor) -> Tensor:
    """[N] bool: whether the shape has a sensible area, a short edge, and other colours on its two sides."""
    area = shape.sum((1, 2))
    share = area / shape[0].numel()
    line = shape & ~masks.erode(shape, 1)
    sides = (masks.erode(shape, 1) & ~masks.erode(shape, 3), masks.dilate(shape, 3) & ~masks.dilate(shape, 1))
    (inner, has_inner), (outer, has_outer) = (local_colours(colours, side, 3) for side in sides)
    judged = line & has_inner & has_outer
    is_clear = judged & ((inner - outer).norm(dim=1) > CONTRAST)
    return (
        (share > AREA[0])
        & (share < AREA[1])
        & (line.sum((1, 2)).square() < LONGEST_EDGE * area)
        & (is_clear.sum((1, 2)) > CLEAR_SHARE * judged.sum((1, 2)))
    )


def refined(shape: Tensor, colours: Tensor, reach: int) -> Tensor:
    """Move the edge by up to `reach` pixels, so that every pixel is on the side whose colours it has."""
    inner, outer = masks.erode(shape, reach), ~masks.dilate(shape, reach)
    distances = [
        torch.where(has[:, None], (colours - there).square(), 9.0).sum(1, keepdim=True)
        for there, has in (local_colours(colours, side, 3 * reach) for side in (inner, outer))
    ]
    is_inside = smooth(distances[1] - distances[0], 1)[:, 0] > 0
    return smooth((inner | (is_inside & ~outer))[:, None].float(), 2)[:, 0] > 0.5


def local_colours(colours: Tensor, where: Tensor, radius: int) -> tuple[Tensor, Tensor]:
    """[N, 3, H, W]: at every pixel the mean colour of the chosen pixels around it; [N, H, W]: whether there are any."""
    weight = smooth(where[:, None].float(), radius)
    return smooth(colours * where[:, None], radius) / weight.clamp(min=1e-6), weight[:, 0] > 1e-3


def opponents(pictures: Tensor) -> Tensor:
    """[N, 3, H, W] in [0, 1] -> light, red against green, yellow against blue; light counts a little less."""
    red, green, blue = pictures.unbind(1)
    return torch.stack([0.8 * (red + green + blue) / 3, red - green, (red + green) / 2 - blue], 1)


def smooth(x: Tensor, radius: int) -> Tensor:
    """The mean over squares; at the edge of the picture over what there is."""
    for size, pad in (((2 * radius + 1, 1), (radius, 0)), ((1, 2 * radius + 1), (0, radius))):
        x = F.avg_pool2d(x, size, 1, pad, count_include_pad=False)
    return x


def distances(pixels: Tensor, centres: Tensor) -> Tensor:
    """[N, P, 3], [N, K, 3] -> [N, P, K], computed without products, which a GPU may round to TF32."""
    return torch.cdist(pixels, centres, compute_mode="donot_use_mm_for_euclid_dist")
