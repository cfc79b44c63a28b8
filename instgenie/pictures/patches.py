"""Texture from one part of a picture for another: every small patch that touches a hole looks for the whole patch most
like it (PatchMatch), and overlapping patches are averaged. Knows pixels; knows no mask and no model.

It goes from a small copy of the picture to larger ones, each of which begins with the places that the one before has
found. The same picture and hole give the same pixels.
"""

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from instgenie.pictures.mask import dilated
from instgenie.pictures.resizing import resize_mask, resize_picture
from instgenie.types import PixelMask, Pixels

REACH = 3  # of a patch, in pixels on each side of its centre
SIDE = 2 * REACH + 1
LEAST_PATCHES = 16  # that are whole: with fewer, there is no texture to take
SMALLEST = 24  # longest side of the smallest copy
ROUNDS = (8, 5, 3, 2)  # of searching and averaging, in the smallest copy and in larger ones
JUMPS = (4, 2, 1)  # pixels between the patches that tell each other what they have found
FADE = 1.25  # by so much less a pixel counts with each pixel farther into the hole, where it is a guess

ValueT = TypeVar("ValueT", bound=np.generic)
Values = NDArray[np.float32]  # [height, width, channels]
Places = NDArray[np.intp]  # [patches, 2]: the rows and columns of their first pixels


def textured(picture: Pixels, hole: PixelMask) -> Pixels:
    """The picture with texture in its hole, which has colours to begin with."""
    made, coarse, random = picture, None, default_rng(0)
    for place, size in enumerate(copy_sizes(hole.shape)):
        known = ~resize_mask(hole, size)
        if not can_search(known):
            continue
        guess = np.where(known[..., None], resize_picture(picture, size), resize_picture(made, size))
        search = Search(guess.astype(np.float32), known, random)
        if coarse:
            search.take_from(coarse)
        for _ in range(ROUNDS[min(place, len(ROUNDS) - 1)]):
            search.improve()
            search.average()
        made, coarse = resize_picture(search.pixels, hole.shape), search
    return np.where(hole[..., None], made, picture)


def copy_sizes(size: tuple[int, ...]) -> list[tuple[int, int]]:
    """Sizes (height, width) of the copies: each twice as large as the one before, the last one the picture's own."""
    num_halvings = max(int(np.ceil(np.log2(max(size) / SMALLEST))), 0)
    height, width = size
    return [(max(height >> n, 1), max(width >> n, 1)) for n in range(num_halvings, -1, -1)]


def can_search(known: PixelMask) -> bool:
    if known.all() or min(known.shape) < SIDE:
        return False
    num_whole = int(windows(known).all(axis=(2, 3)).sum())
    return num_whole >= LEAST_PATCHES


def windows(values: NDArray[ValueT]) -> NDArray[ValueT]:  # [rows, columns, (channels,) SIDE, SIDE]
    return sliding_window_view(values, (SIDE, SIDE), axis=(0, 1))


def trust(known: PixelMask) -> NDArray[np.float32]:  # [height, width]
    """1 where pixels are known, and less the farther a pixel lies in the hole."""
    values, reached, distance = np.ones(known.shape, np.float32), known, 0
    while not reached.all():
        distance += 1
        values[~reached] = FADE**-distance
        reached = dilated(reached, 1)
    return values


@dataclass(eq=False)
class Search:
    """The patches of one copy that touch the hole, and the best whole patch known for each."""

    values: Values  # the copy, with what is made up so far
    known: PixelMask
    random: Generator
    is_whole: PixelMask = field(init=False)  # by the patches' first pixels
    targets: Places = field(init=False)
    sources: Places = field(init=False)  # one for each target
    distances: NDArray[np.float32] = field(init=False)
    numbers: NDArray[np.intp] = field(init=False)  # of the target that begins at a pixel; -1: none
    weights: NDArray[np.float32] = field(init=False)  # [targets, SIDE, SIDE]: of the pixels of a target
    votes: NDArray[np.float32] = field(init=False)  # [targets]

    def __post_init__(self) -> None:
        self.is_whole = np.asarray(windows(self.known).all(axis=(2, 3)))
        self.targets, whole = np.argwhere(~self.is_whole), np.argwhere(self.is_whole)
        self.sources = whole[self.random.integers(len(whole), size=len(self.targets))]
        self.distances = np.zeros(len(self.targets), np.float32)
        self.numbers = np.full(self.is_whole.shape, -1)
        self.numbers[tuple(self.targets.T)] = np.arange(len(self.targets))
        trusted = trust(self.known)
        self.weights = windows(trusted)[tuple(self.targets.T)]
        self.weights = self.weights / self.weights.sum((1, 2), keepdims=True)
        self.votes = trusted[tuple((self.targets + REACH).T)]

    @property
    def limits(self) -> Places:
        return np.array(self.is_whole.shape) - 1

    @property
    def pixels(self) -> Pixels:
        return self.values.round().clip(0, 255).astype(np.uint8)

    def take_from(self, coarse: "Search") -> None:
        """Begin with what a smaller copy has found."""
        scale = np.array(self.known.shape) / coarse.known.shape
        nearest = np.minimum((self.targets / scale).astype(np.intp), coarse.limits)
        numbers = coarse.numbers[tuple(nearest.T)]
        taken = coarse.sources[numbers] * scale + self.targets - nearest * scale
        offered = np.rint(taken).astype(np.intp).clip(0, self.limits)
        fits = (numbers >= 0) & self.is_whole[tuple(offered.T)]
        self.sources[fits] = offered[fits]
        self.average()

    def improve(self) -> None:
        """Find better sources. Neighbours tell each other where theirs are, and every target looks around its own, far
        and near."""
        patches, targets = windows(self.values), self.targets
        wanted = patches[tuple(targets.T)]

        def apart(offered: Places, rows: NDArray[np.intp]) -> NDArray[np.float32]:
            squares = np.square(patches[tuple(offered.T)] - wanted[rows])
            return np.asarray((squares * self.weights[rows, None]).sum((1, 2, 3)))

        def offer(offered: Places, rows: NDArray[np.intp]) -> None:
            offered = offered.clip(0, self.limits)
            allowed = self.is_whole[tuple(offered.T)]
            offered, rows = offered[allowed], rows[allowed]
            distances = apart(offered, rows)
            better = distances < self.distances[rows]
            self.distances[rows[better]], self.sources[rows[better]] = distances[better], offered[better]

        everyone = np.arange(len(targets))
        self.distances = apart(self.sources, everyone)
        for jump in JUMPS:
            for step in ((jump, 0), (-jump, 0), (0, jump), (0, -jump)):
                beside = targets + step
                inside = ((beside >= 0) & (beside <= self.limits)).all(1)
                neighbours = np.where(inside, self.numbers[tuple(beside.clip(0, self.limits).T)], -1)
                rows = everyone[neighbours >= 0]
                offer(self.sources[neighbours[rows]] - step, rows)
        reach = int(self.limits.max())
        while reach >= 1:
            offer(self.sources + self.random.integers(-reach, reach + 1, size=targets.shape), everyone)
            reach //= 2

    def average(self) -> None:
        """Make every unknown pixel the mean of what the patches that cover it would have it be. A patch counts more if
        its centre is near the edge of the hole, and if its source is nearly the same."""
        spread = max(float(np.quantile(self.distances, 0.75)), 1.0)
        votes = (self.votes * np.exp(-self.distances / (2 * spread)))[:, None].astype(np.float32)
        sums, weights = np.zeros_like(self.values), np.zeros_like(self.values[..., :1])
        for offset in np.ndindex(SIDE, SIDE):
            to, source = tuple((self.targets + offset).T), tuple((self.sources + offset).T)
            sums[to] += votes * self.values[source]
            weights[to] += votes
        known = self.known[..., None] | (weights == 0)
        self.values = np.where(known, self.values, sums / np.where(known, 1, weights))
