"""The ragged batch of a Flux: tokens of all jobs packed into one tensor, differences between jobs as columns.

Knows tokens, branches and plans; knows no prompt and no module of a model. Tokens lie one branch after the other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, islice
from operator import and_

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from instgenie.adapters.applied import BatchLoras
from instgenie.jobs.activations import Kind
from instgenie.jobs.job import Branch, Job
from instgenie.jobs.rows import OWN_ROWS, JobRows, RowReader, StepRows
from instgenie.jobs.tokens import JobTokens, concat
from instgenie.kernels.addresses import RowSource
from instgenie.kernels.gather import gather_rows
from instgenie.kernels.heads import HeadPlaces
from instgenie.models.flux.controls import Depth, FluxResiduals, pack_residuals
from instgenie.models.layers.linear import Owners
from instgenie.models.packed import Column, LeftOut, PackedBatch, Static, loras_of


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
    loras: LeftOut[BatchLoras | None] = None

    @cached_property
    def num_joint(self) -> tuple[int, ...]:
        return tuple(text + image for text, image in zip(self.num_text, self.num_image, strict=True))

    @cached_property
    def num_keys(self) -> tuple[int, ...]:
        return tuple(text + image for text, image in zip(self.num_all_text, self.num_all, strict=True))

    @cached_property
    def text_owners(self) -> Owners:
        return Owners(self.text_rows, loras=self.loras, counts=self.num_text)

    @cached_property
    def image_owners(self) -> Owners:
        return Owners(self.image_rows, loras=self.loras, counts=self.num_image)

    @cached_property
    def joint_owners(self) -> Owners:
        return Owners(self.joint_rows, loras=self.loras, counts=self.num_joint)

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
def lay_out(tokens: tuple[JobTokens, ...], cached: tuple[bool, ...], keeps_text: tuple[bool, ...]) -> Layout:
    """Numbers that do not depend on the mask are counted in main memory and move to the device in one copy: the device
    waits for every launch that a changed batch needs. A cached block reads the padding of a text that is kept."""
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
    moved = to_device(counted, tokens[0].inside.device)
    text_rows, image_rows, joint_rows, joint_places, text_places, image_places, text_keys, image_starts = moved
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


@dataclass(frozen=True, eq=False)
class ImageTokens:
    """The image tokens of a job, by index: masked ones and the others; and the text whose rows its activations keep."""

    num_all: Static[int]
    inside: Column[Tensor]  # [masked tokens]
    rest: Column[Tensor]  # [padding of the text, then the other image tokens], by the rows that activations keep
    num_text: Static[int]  # text tokens whose rows lie before those of the image; 0: none are kept
    num_prompt: Static[int]  # of these, the first, which are computed anyway

    @property
    def num_rows(self) -> int:
        """Rows that activations keep."""
        return self.num_text + self.num_all

    @property
    def num_padding(self) -> int:
        return self.num_text - self.num_prompt


@dataclass(frozen=True, eq=False)
class TemplateColumns:
    """What turns a template's Y into keys."""

    time: Column[Tensor]  # [branches, width], what modulated the blocks
    rotary: Column[tuple[Tensor, ...]]  # per job [tokens whose rows are kept, head channels / 2]


@dataclass(frozen=True, eq=False)
class FluxBatch(PackedBatch):
    """One step of jobs of any sizes: what the model sees, and the layouts of its blocks."""

    kinds: Static[tuple[Kind | None, ...]]  # per job, of the activations it reads or keeps
    num_kept: Static[tuple[int, ...]]  # per job, branches whose rows its activations keep; the others read the last one
    kept_kinds: Static[tuple[Kind | None, ...]]  # per branch: what is kept of it for later steps; None: nothing
    num_kept_text: Static[tuple[int, ...]]  # per job, text tokens whose rows its activations keep
    cached: Static[tuple[tuple[bool, ...], ...]]  # per block, and for what follows the last, per job
    image_tokens: Column[tuple[ImageTokens, ...]]  # per job
    layouts: Column[dict[tuple[bool, ...], Layout]]
    image: Column[Tensor]  # [image tokens, latent + conditioning channels]
    text: Column[Tensor]  # [text tokens, width]
    pooled: Column[Tensor]  # [branches, pooled channels]
    sigma: Column[Tensor]  # [branches]
    guidance: Column[Tensor]  # [branches]
    template: Column[TemplateColumns | None]  # if any job reads Y
    control: Column[FluxResiduals | None]  # if ControlNets guide any job
    modulation: Column[Tensor | None]  # [branches, outputs of all modulation layers]; None: blocks compute their own

    @property
    def layout(self) -> Layout:
        """The layout of the first block."""
        return self.layout_of(0)

    def layout_of(self, block: int) -> Layout:
        return self.layouts[self.cached[min(block, len(self.cached) - 1)]]

    @property
    def kept_text(self) -> tuple[int, ...]:
        """Per branch, the text tokens whose rows are kept."""
        jobs = zip(self.num_kept_text, self.layout.num_branches, strict=True)
        return tuple(num for num, num_branches in jobs for _ in range(num_branches))

    @property
    def readers(self) -> Sequence[RowReader]:
        """One reader per branch. Both branches of a job that reads a template read the same rows, since it is
        registered once, with the empty prompt; a job keeps rows of its own for each branch."""
        return readers_of(self.jobs)

    def read(self, place: int, wanted: Sequence[bool], layout: Layout) -> list[list[RowSource]]:
        """Per job that wants rows, the sources of those of its branches that have rows of their own."""
        nums = list(zip(layout.num_branches, self.num_kept, wanted, strict=True))
        sources = self.rows.at(place, [wants and branch < kept for num, kept, wants in nums for branch in range(num)])
        firsts = accumulate(layout.num_branches, initial=0)
        return [
            [sources[first + branch] for branch in range(min(num, kept))] if wants else []
            for first, (num, kept, wants) in zip(firsts, nums, strict=False)
        ]

    def needs_rows(self, layout: Layout, block: int) -> bool:
        """True if the rows that go into a block are needed themselves: its layout is another, or they are kept."""
        return self.layout_of(block) is not layout or "y" in self.kept_kinds

    def turn(self, layout: Layout, text: Tensor, image: Tensor, block: int) -> tuple[Layout, Tensor, Tensor]:
        """Return the layout of a block and the rows in it: where a job's plan turns, its unmasked tokens and the
        padding of its text leave, or come back from the activations."""
        turned = self.layout_of(block)
        if turned is layout:
            return layout, text, image
        back = [before and not after for before, after in zip(layout.cached, turned.cached, strict=True)]
        sources = self.read(block, back, layout) if any(back) else [[] for _ in back]
        parts = zip(text.split(layout.num_text), image.split(layout.num_image), strict=True)
        jobs = zip(self.image_tokens, layout.cached, turned.cached, layout.num_branches, sources, strict=True)
        turns = [
            turn_one(*next(parts), tokens, before, after, of_branch(own, index))
            for tokens, before, after, num, own in jobs
            for index in range(num)
        ]
        texts, images = zip(*turns, strict=True)
        is_same = turned.num_text == layout.num_text
        return turned, text if is_same else concat(texts), concat(images)

    def turn_joint(self, layout: Layout, joint: Tensor, block: int) -> tuple[Layout, Tensor]:
        if self.layout_of(block) is layout:
            return layout, joint
        turned, text, image = self.turn(layout, *layout.part(joint.split(layout.num_joint)), block)
        return turned, turned.join(text, image)

    def deal(self, predicted: Tensor) -> list[list[Tensor]]:
        """Split velocities [image tokens, latent channels]; a job that caches any block has those of its masked tokens
        alone."""
        last = self.layouts[self.cached[-1]]
        velocities = iter(predicted.split(last.num_image))
        return [
            [next(velocities)[: len(job.inside) if narrow else None] for _ in job.branches]
            for job, narrow in zip(self.jobs, last.cached, strict=True)
        ]


def of_branch(sources: Sequence[RowSource], branch: int) -> RowSource:
    """The source of a branch, or the last one there is."""
    return sources[min(branch, len(sources) - 1)] if sources else None


def readers_of(jobs: Sequence[Job]) -> tuple[RowReader, ...]:
    return tuple((job, branch) for job in jobs for branch in range(len(job.branches)))


def turn_one(
    text: Tensor, image: Tensor, tokens: ImageTokens, before: bool, after: bool, source: RowSource
) -> tuple[Tensor, Tensor]:
    if before == after:
        return text, image
    if after:
        return text[: tokens.num_prompt] if tokens.num_text else text, image[tokens.inside]
    assert source is not None  # of kind y: a plan that turns back was refused for kv
    y = image.new_empty(1, tokens.num_rows, image.shape[1])
    gather_rows(source, tokens.rest, tokens.num_rows, y, tokens.rest)
    padding, rest = y[0, tokens.num_prompt : tokens.num_text], y[0, tokens.num_text :]
    whole = torch.cat([text, padding]) if tokens.num_text else text
    return whole, rest.index_copy_(0, tokens.inside, image)


def pack(
    jobs: Sequence[Job],
    pads: bool = False,
    step_rows: StepRows = OWN_ROWS,
    modulation: Tensor | None = None,
    depth: Depth = (0, 0),
) -> FluxBatch:
    """With `pads`, lists of masked tokens are as long as those of many other masks."""
    pairs = list(branches(jobs))
    tokens = tuple(job.padded_tokens if pads else job.tokens for job in jobs)
    num_blocks = max(len(job.plan) for job in jobs)
    cached = tuple(tuple(job.is_cached(block) for job in jobs) for block in range(num_blocks + 1))
    kinds = tuple(job.activations.kind if job.activations else None for job in jobs)
    seen = [inputs(job, own) for job, own in zip(jobs, tokens, strict=True)]
    image = concat([one for job, one in zip(jobs, seen, strict=True) for _ in job.branches])
    num_text = tuple(job.activations.num_text if job.activations else 0 for job in jobs)
    keeps_text = tuple(num > 0 for num in num_text)
    loras = loras_of(jobs)
    layouts = {narrow: lay_out(tokens, narrow, keeps_text) for narrow in dict.fromkeys(cached)}
    return FluxBatch(
        jobs=tuple(jobs),
        rows=JobRows(readers_of(jobs), step_rows),
        loras=loras,
        residuals=(),
        kinds=kinds,
        num_kept=tuple(job.activations.num_branches if job.activations else 1 for job in jobs),
        kept_kinds=tuple(job.kept_kind for job, _ in pairs),
        num_kept_text=num_text,
        cached=cached,
        image_tokens=tuple(map(image_tokens, tokens, num_text)),
        layouts={narrow: replace(one, loras=loras) for narrow, one in layouts.items()} if loras else layouts,
        image=image.to(pairs[0][1].text.dtype),
        text=concat([text for job, keeps in zip(jobs, keeps_text, strict=True) for text in texts(job, keeps)]),
        pooled=torch.stack([branch.pooled for _, branch in pairs]),
        sigma=torch.stack([job.timestep for job, _ in pairs]),
        guidance=torch.stack([job.guidance for job, _ in pairs]),
        template=template_columns(jobs) if "y" in kinds else None,
        control=pack_residuals(jobs, tokens, cached, depth),
        modulation=modulation,
    )


def image_tokens(tokens: JobTokens, num_text: int) -> ImageTokens:
    num_prompt = min(tokens.num_prompt, num_text)
    return ImageTokens(tokens.num_all, tokens.inside, tokens.read(num_text), num_text, num_prompt)


def template_columns(jobs: Sequence[Job]) -> TemplateColumns:
    readers = readers_of(jobs)
    times = [
        job.activations.time_at(job.step, branch) if job.activations and job.activations.kind == "y" else None
        for job, branch in readers
    ]
    anyone = next(time for time in times if time is not None)
    time = torch.stack([torch.zeros_like(anyone) if time is None else time for time in times])
    return TemplateColumns(time, tuple(map(kept_rotary, jobs)))


def kept_rotary(job: Job) -> Tensor:  # [tokens whose rows its activations keep, head channels / 2]
    keeps_text = job.activations is not None and job.activations.num_text > 0
    return job.branches[0].rotary if keeps_text else job.image_rotary


def texts(job: Job, keeps_text: bool) -> tuple[Tensor, ...]:
    """Per branch [text tokens that the first block computes, width]"""
    num = job.num_prompt if keeps_text and job.is_cached(0) else None
    return tuple(branch.text if num is None else branch.text[:num] for branch in job.branches)


def inputs(job: Job, tokens: JobTokens) -> Tensor:  # [image tokens that the first block computes, channels]
    image = torch.cat([job.latents, job.conditioning], dim=1)
    return image[tokens.inside] if job.is_cached(0) else image


def branches(jobs: Sequence[Job]) -> Iterator[tuple[Job, Branch]]:
    return ((job, branch) for job in jobs for branch in job.branches)
