"""The ragged batch of models whose text flows beside the image: tokens of all jobs packed into one tensor, differences
between jobs as columns.

Knows tokens, branches and plans; knows no prompt and no module of a model. Tokens lie one branch after the other.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from instgenie.jobs.activations import Kind
from instgenie.jobs.job import Branch, Job
from instgenie.jobs.rows import OWN_ROWS, JobRows, RowReader, StepRows
from instgenie.jobs.tokens import JobTokens, concat
from instgenie.kernels.addresses import RowSource
from instgenie.kernels.gather import gather_rows
from instgenie.kernels.roles import Column, Static
from instgenie.models.joint.controls import BlockResiduals, Depth, pack_residuals
from instgenie.models.joint.layout import Layout, lay_out
from instgenie.models.packed import PackedBatch, loras_of


@dataclass(frozen=True, eq=False)
class ImageTokens:
    """The image tokens of a job, by index: masked ones and the others; and the text whose rows its activations keep."""

    num_all: Static[int]
    inside: Column[Tensor]  # [masked tokens]
    rest: Column[Tensor]  # [padding of the text, then the other image tokens], by the rows that activations keep
    num_text: Static[int]  # text tokens, the last, whose rows lie before those of the image; 0: none are kept
    num_prompt: Static[int]  # of these, the first, which are computed anyway
    times: Column[Tensor | None]  # per token of `rest`, 1 if it shows a clean reference, else 0; None: there are none

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

    time: Column[Tensor]  # [branches, width, or twice that where references are clean], what modulated the blocks
    rotary: Column[tuple[Tensor, ...]]  # per job [tokens whose rows are kept, head channels / 2]


@dataclass(frozen=True, eq=False)
class JointBatch(PackedBatch):
    """One step of jobs of any sizes: what the model sees, and the layouts of its blocks."""

    kinds: Static[tuple[Kind | None, ...]]  # per job, of the activations it reads or keeps
    num_kept: Static[tuple[int, ...]]  # per job, branches whose rows its activations keep; the others read the last one
    kept_kinds: Static[tuple[Kind | None, ...]]  # per branch: what is kept of it for later steps; None: nothing
    num_kept_text: Static[tuple[int, ...]]  # per job, text tokens whose rows its activations keep
    cached: Static[tuple[tuple[bool, ...], ...]]  # per block, and for what follows the last, per job
    image_tokens: Column[tuple[ImageTokens, ...]]  # per job
    layouts: Column[dict[tuple[bool, ...], Layout]]
    image: Column[Tensor]  # [image tokens, latent + conditioning channels]
    positions: Column[Tensor | None]  # [image tokens], for models that embed positions with the image
    text: Column[Tensor]  # [text tokens, width]
    pooled: Column[Tensor]  # [branches, pooled channels]
    sigma: Column[Tensor]  # [branches]
    guidance: Column[Tensor]  # [branches]
    template: Column[TemplateColumns | None]  # if any job reads Y
    control: Column[BlockResiduals | None]  # if ControlNets guide any job
    modulation: Column[Tensor | None]  # [rows of modulation, outputs of all layers]; None: blocks compute their own

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
            [next(velocities)[: len(job.inside if narrow else job.masked)] for _ in job.branches]
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
        return text[: len(text) - tokens.num_padding], image[tokens.inside]
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
    positions: Callable[[tuple[int, int]], Tensor] | None = None,
    depth: Depth = (0, 0),
    clean_references: bool = False,
) -> JointBatch:
    """With `pads`, lists of masked tokens are as long as those of many other masks. `positions` gives the positions of
    the tokens of a grid, for models that embed them; `depth` the double and single blocks, for models that ControlNets
    guide; `clean_references` says that references are modulated as at time 0."""
    pairs = list(branches(jobs))
    tokens = tuple(job.padded_tokens if pads else job.tokens for job in jobs)
    num_blocks = max(len(job.plan) for job in jobs)
    cached = tuple(tuple(job.is_cached(block) for job in jobs) for block in range(num_blocks + 1))
    kinds = tuple(job.activations.kind if job.activations else None for job in jobs)
    seen = [inputs(job, own) for job, own in zip(jobs, tokens, strict=True)]
    image = concat([one for job, one in zip(jobs, seen, strict=True) for _ in job.branches])
    where = [
        chosen(positions(job.grid), job, own) if positions else None for job, own in zip(jobs, tokens, strict=True)
    ]
    num_text = tuple(job.activations.num_text if job.activations else 0 for job in jobs)
    keeps_text = tuple(num > 0 for num in num_text)
    loras = loras_of(jobs)
    layouts = {narrow: lay_out(tokens, narrow, keeps_text, clean_references) for narrow in dict.fromkeys(cached)}
    return JointBatch(
        jobs=tuple(jobs),
        rows=JobRows(readers_of(jobs), step_rows),
        loras=loras,
        residuals=(),
        kinds=kinds,
        num_kept=tuple(job.activations.num_branches if job.activations else 1 for job in jobs),
        kept_kinds=tuple(job.kept_kind for job, _ in pairs),
        num_kept_text=num_text,
        cached=cached,
        image_tokens=tuple(
            image_tokens(own, num, clean_references and kind == "y")
            for own, num, kind in zip(tokens, num_text, kinds, strict=True)
        ),
        layouts={narrow: replace(one, loras=loras) for narrow, one in layouts.items()} if loras else layouts,
        image=image.to(pairs[0][1].text.dtype),
        positions=concat([one for job, one in zip(jobs, where, strict=True) for _ in job.branches if one is not None])
        if positions
        else None,
        text=concat([text for job, keeps in zip(jobs, keeps_text, strict=True) for text in texts(job, keeps)]),
        pooled=torch.stack([branch.pooled for _, branch in pairs]),
        sigma=torch.stack([job.timestep for job, _ in pairs]),
        guidance=torch.stack([job.guidance for job, _ in pairs]),
        template=template_columns(jobs) if "y" in kinds else None,
        control=pack_residuals(jobs, tokens, cached, depth),
        modulation=modulation,
    )


def image_tokens(tokens: JobTokens, num_text: int, has_times: bool) -> ImageTokens:
    num_prompt = 0 if tokens.num_facts else min(tokens.num_prompt, num_text)
    times = tokens.read_references(num_text) if has_times else None
    return ImageTokens(tokens.num_all, tokens.inside, tokens.read(num_text), num_text, num_prompt, times)


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
    num_text = job.activations.num_text if job.activations else 0
    branch = job.branches[0]  # all have the same positions
    return branch.rotary[len(branch.text) - num_text :]


def texts(job: Job, keeps_text: bool) -> tuple[Tensor, ...]:
    """Per branch [text tokens that the first block computes, width]"""
    nums = job.tokens.num_computed_text(keeps_text and job.is_cached(0))
    return tuple(branch.text[:num] for branch, num in zip(job.branches, nums, strict=True))


def inputs(job: Job, tokens: JobTokens) -> Tensor:  # [image tokens that the first block computes, channels]
    image = torch.cat([job.latents, job.conditioning], dim=1)
    return chosen(image if job.reference is None else torch.cat([image, job.reference]), job, tokens)


def chosen(image: Tensor, job: Job, tokens: JobTokens) -> Tensor:
    """Of all image tokens, those that the first block computes."""
    return image[tokens.inside] if job.is_cached(0) else image


def branches(jobs: Sequence[Job]) -> Iterator[tuple[Job, Branch]]:
    return ((job, branch) for job in jobs for branch in job.branches)
