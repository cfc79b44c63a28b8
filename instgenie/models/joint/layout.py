"""Layouts of packed tokens: which tokens a block computes and where they lie, one branch after the other. Knows no job
and no module of a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, islice
from operator import and_

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from instgenie.adapters.applied import BatchLoras
from instgenie.jobs.tokens import JobTokens, concat
from instgenie.kernels.heads import HeadPlaces
from instgenie.kernels.roles import Column, Static
from instgenie.models.layers.linear import Owners


@dataclass(frozen=True, eq=False)
class Layout:
    """Which tokens a block computes and where they lie. The joint tokens of a branch are its text, then its image; rows
    give the branch that each token belongs to, places where each token goes."""

    cached: Static[tuple[bool, ...]]  # per job: True if its masked tokens are computed alone
    num_branches: Static[tuple[int, ...]]  # per job
    num_text: Static[tuple[int, ...]]  # per branch
    num_all_text: Static[tuple[int, ...]]  # per branch, including padding that is not computed
    num_image: Static[tuple[int, ...]]  # per branch
    num_all: Static[tuple[int, ...]]  # per branch, image tokens including those that are not computed
    rotary: Column[Tensor]  # [joint tokens, head channels / 2]
    text_rows: Column[Tensor]  # [text tokens]
    image_rows: Column[Tensor]  # [image tokens]
    joint_rows: Column[Tensor]  # [joint tokens]
    text_places: Column[HeadPlaces]
    image_places: Column[HeadPlaces]
    joint_places: Column[HeadPlaces]
    image_times: Column[Tensor | None] = None  # [image tokens], which row of modulation each reads, if not its branch's
    loras: Column[BatchLoras | None] = None

    @cached_property
    def num_joint(self) -> tuple[int, ...]:
        return tuple(text + image for text, image in zip(self.num_text, self.num_image, strict=True))

    @cached_property
    def num_keys(self) -> tuple[int, ...]:
        return tuple(text + image for text, image in zip(self.num_all_text, self.num_all, strict=True))

    @cached_property
    def text_owners(self) -> Owners:
        return Owners(self.text_rows, loras=self.loras)

    @cached_property
    def image_owners(self) -> Owners:
        return Owners(self.image_rows, loras=self.loras, times=self.image_times)

    @cached_property
    def joint_owners(self) -> Owners:
        return Owners(self.joint_rows, loras=self.loras)

    def kept_keys(self, num_text: Sequence[int]) -> list[list[slice]]:
        """Per job and branch, the slice of the keys that belongs to its image tokens, each token at its own place, and
        for jobs whose activations keep text to its text too. `num_text` has the text tokens that are kept, per job."""
        branches = zip(accumulate(self.num_keys), self.num_all, strict=True)
        kept = zip(num_text, self.num_branches, strict=True)
        return [[slice(end - image - text, end) for end, image in islice(branches, num)] for text, num in kept]

    def join(self, text: Tensor, image: Tensor) -> Tensor:
        """[text tokens, ...] and [image tokens, ...] -> [joint tokens, ...]"""
        pairs = zip(text.split(self.num_text), image.split(self.num_image), strict=True)
        return torch.cat([part for pair in pairs for part in pair])

    def part(self, joint: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Per branch [joint tokens, ...] -> [text tokens, ...] and [image tokens, ...]; views if there is one branch"""
        sizes = zip(self.num_text, self.num_image, strict=True)
        texts, images = zip(*(one.split(size) for one, size in zip(joint, sizes, strict=True)), strict=True)
        return concat(texts), concat(images)


@lru_cache(maxsize=16)  # jobs that stay together keep their layouts from step to step
def lay_out(
    tokens: tuple[JobTokens, ...],
    cached: tuple[bool, ...],
    keeps_text: tuple[bool, ...],
    clean_references: bool = False,
) -> Layout:
    """Numbers that do not depend on the mask are counted in main memory and move to the device in one copy: the device
    waits for every launch that a changed batch needs. A cached block reads the padding of a text that is kept. Clean
    references read rows of modulation that follow those of all branches."""
    jobs = list(zip(tokens, cached, map(and_, cached, keeps_text), strict=True))
    members = [(own, narrow) for own, narrow, _ in jobs for _ in own.num_text]
    num_text = np.array([num for own, _, reads_padding in jobs for num in own.num_computed_text(reads_padding)])
    num_all_text = np.array([num for own in tokens for num in own.num_text])
    num_image = np.array([own.num_image(narrow) for own, narrow in members])
    num_all = np.array([own.num_all for own, _ in members])
    first_text, first_image, first_key = (starts(nums) for nums in (num_text, num_image, num_all_text + num_all))
    counted = [rows(nums) for nums in (num_text, num_image, num_text + num_image)]
    texts, images, joint = (np.arange(len(found)) for found in counted)
    of_text, of_image, _ = counted
    counted += [joint, texts + first_image[of_text], images + (first_text + num_text)[of_image]]
    counted += [texts + (first_key - first_text)[of_text], (first_key + num_all_text)[of_image]]
    if clean_references:
        num_own = np.array([own.num_image(narrow) - (0 if narrow else own.num_references) for own, narrow in members])
        is_reference = images >= (first_image + num_own)[of_image]
        counted += [of_image + len(members) * is_reference]
    moved = to_device(counted, tokens[0].inside.device)
    text_rows, image_rows, joint_rows, joint_places, text_places, image_places, text_keys, image_starts, *times = moved
    image_keys = image_starts + concat([own.computed(narrow) for own, narrow in members])
    joint_keys = torch.empty_like(joint_places)
    joint_keys[text_places], joint_keys[image_places] = text_keys, image_keys
    return Layout(
        cached=cached,
        num_branches=tuple(len(own.num_text) for own in tokens),
        num_text=tuple(num_text.tolist()),
        num_all_text=tuple(num_all_text.tolist()),
        num_image=tuple(num_image.tolist()),
        num_all=tuple(num_all.tolist()),
        rotary=concat([table for own, narrow, reads_padding in jobs for table in own.tables(narrow, reads_padding)]),
        text_rows=text_rows,
        image_rows=image_rows,
        joint_rows=joint_rows,
        text_places=HeadPlaces(text_places, text_keys),
        image_places=HeadPlaces(image_places, image_keys),
        joint_places=HeadPlaces(joint_places, joint_keys),
        image_times=times[0] if times else None,
    )


def to_device(columns: Sequence[NDArray[np.int64]], device: torch.device) -> Sequence[Tensor]:
    """Move columns in one asynchronous copy. Each begins at an even place, as kernels prefer it."""
    places = starts(np.array([len(column) + len(column) % 2 for column in columns]))
    together = torch.empty(int(places[-1]) + len(columns[-1]), dtype=torch.int64, pin_memory=device.type == "cuda")
    for place, column in zip(places, columns, strict=True):
        together[place : place + len(column)] = torch.from_numpy(column)
    moved = together.to(device, non_blocking=True)
    return [moved[place : place + len(column)] for place, column in zip(places, columns, strict=True)]


def starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """(2, 3, 1) -> [0, 2, 5]"""
    return lengths.cumsum() - lengths


def rows(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """(2, 3) -> [0, 0, 1, 1, 1]"""
    return np.arange(len(lengths)).repeat(lengths)
