"""Methods that compete with reusing activations: dropping unmasked tokens, crop and stitch, skipping steps.

Each is built from the same engine parts as ours, so that only the method differs. Nothing here serves edits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from instgenie.bench.cost import square_flops
from instgenie.bench.metrics import mask_box
from instgenie.cost.plan import DENSE
from instgenie.jobs.job import Branch, Job, Template
from instgenie.jobs.tokens import concat
from instgenie.models.flux.model import FluxModel
from instgenie.models.joint.batch import pack
from instgenie.models.joint.block import modulated
from instgenie.models.joint.modulation import Modulation
from instgenie.models.joint.network import JointNetwork, run_blocks
from instgenie.models.joint.residual import Residual
from instgenie.pictures.resizing import working_size
from instgenie.types import Edit, Pixels

# TeaCache's polynomial for FLUX, from the change of the first block's modulated input to that of the output; highest
# power first
CHANGE = (498.651651, -283.781631, 55.8554382, -3.82021401, 0.264230861)
NUM_HALVINGS = 30


# Dropping the unmasked tokens


def drop_unmasked(job: Job) -> Job:
    """Return the job with its masked tokens and its text only."""
    assert not job.edit.halo
    rows = job.inside
    return replace(
        job,
        grid=(1, len(rows)),
        masked=job.masked[rows],
        template=Template(job.template.clean[rows], job.template.noise[rows]),
        conditioning=job.conditioning[rows],
        latents=job.latents[rows],
        branches=tuple(drop_positions(branch, rows) for branch in job.branches),
        activations=None,
        plan=DENSE,
    )


def drop_positions(branch: Branch, rows: Tensor) -> Branch:
    text, image = branch.rotary.split([len(branch.text), len(branch.rotary) - len(branch.text)])
    return replace(branch, rotary=torch.cat([text, image[rows]]))


def put_back(dropped: Job, job: Job) -> Job:
    """Return the finished job, its masked tokens taken from the job that had only those."""
    latents = job.template.clean.index_copy(0, job.inside, dropped.latents)
    return replace(job, latents=latents, step=job.num_steps)


# Crop and stitch


@dataclass(frozen=True, eq=False)
class Crop:
    """A part of a picture that is edited by itself."""

    whole: Edit
    edit: Edit
    top: int
    left: int

    def stitch(self, edited: Pixels) -> Pixels:
        """Return the whole picture with the edited part in its place."""
        height, width, _ = edited.shape
        picture = self.whole.picture.copy()
        picture[self.top : self.top + height, self.left : self.left + width] = edited
        return picture


def crop(edit: Edit, margin: int, side: int, model: FluxModel) -> Crop:
    """Cut out the mask's box and a margin around it, as square as the picture allows, to be edited with as many tokens
    as a square of `side` pixels has. The margin is in pixels of a picture of the model's own size."""
    pad = round(margin * max(edit.mask.shape) / model.own_size)
    top, left, bottom, right = mask_box(torch.from_numpy(edit.mask), pad, square=True)
    size = working_size(bottom - top, right - left, model.size_multiple, side)
    part = slice(top, bottom), slice(left, right)
    return Crop(
        edit, replace(edit, picture=edit.picture[part].copy(), mask=edit.mask[part].copy(), size=size), top, left
    )


def side_of_cost(model: FluxModel, num_text: int, share: float) -> int:
    """Return the largest side whose square costs at most a share of the model's own square; at least two tokens."""
    sides = range(2 * model.size_multiple, model.own_size + 1, model.size_multiple)
    most = share * square_flops(model, model.own_size, num_text)
    return max((side for side in sides if square_flops(model, side, num_text) <= most), default=sides[0])


# Skipping steps


@dataclass(eq=False)
class SkipState:
    """The state that step skipping keeps per job."""

    modulated: Tensor | None = None  # [tokens, width], input of the first block at the previous step
    residual: Tensor | None = None  # [tokens, width], sum that the blocks added when they last ran
    change: float = 0.0  # of the input since then
    num_computed: int = 0
    changes: list[float] = field(default_factory=list)  # per step


class StepSkipping:
    """TeaCache: runs the blocks if their input has changed enough since they last ran, and otherwise adds their last
    residual again. The first and the last step are always computed."""

    def __init__(self, network: JointNetwork, threshold: float) -> None:
        self.network = network
        self.threshold = threshold

    @torch.inference_mode()
    def run(self, jobs: Sequence[Job]) -> list[SkipState]:
        """Take all steps of the jobs, which have equal numbers of steps and branches, and return their states."""
        assert len({(job.num_steps, len(job.branches)) for job in jobs}) == 1
        tracks = [SkipState() for _ in jobs]
        while not jobs[0].done:
            for job, velocity in zip(jobs, self.step(jobs, tracks), strict=True):
                job.advance([velocity])
        return tracks

    def step(self, jobs: Sequence[Job], tracks: Sequence[SkipState]) -> list[Tensor]:
        batch = pack(jobs)
        layout, mod = batch.layout, Modulation(self.network.embed_time(batch))
        embedded = self.network.embed_image(batch)
        self.watch(tracks, first_input(self.network, embedded, mod, layout.image_rows).split(layout.num_image))
        parts = embedded.split(layout.num_image)
        at_end = jobs[0].step in (0, jobs[0].num_steps - 1)
        chosen = [index for index, track in enumerate(tracks) if at_end or track.change >= self.threshold]
        if chosen:
            self.compute([jobs[i] for i in chosen], [tracks[i] for i in chosen], [parts[i] for i in chosen])
        added = [track.residual for track in tracks if track.residual is not None]
        return list(self.network.unembed(embedded + concat(added), mod, layout).split(layout.num_image))

    def watch(self, tracks: Sequence[SkipState], modulated: Sequence[Tensor]) -> None:
        """Add up the change of each job's input."""
        pairs = [(track.modulated, now) for track, now in zip(tracks, modulated, strict=True)]
        changes = torch.stack([relative_change(before, now) for before, now in pairs]).tolist()
        for track, now, change in zip(tracks, modulated, changes, strict=True):
            track.modulated = now
            track.changes.append(abs(polynomial(change)))
            track.change += track.changes[-1]

    def compute(self, jobs: Sequence[Job], tracks: Sequence[SkipState], embedded: Sequence[Tensor]) -> None:
        batch = pack(jobs)
        image = concat(embedded)
        _, hidden = run_blocks(self.network, batch, image, Modulation(self.network.embed_time(batch)))
        for track, residual in zip(tracks, (hidden - image).split(batch.layout.num_image), strict=True):
            track.residual, track.change = residual, 0.0
            track.num_computed += 1


def first_input(network: JointNetwork, embedded: Tensor, mod: Modulation, rows: Tensor) -> Tensor:
    first, _ = modulated(network.blocks[0].entries(is_text=False)[0], Residual(embedded), mod, rows)
    assert isinstance(first, Tensor)
    return first


def relative_change(before: Tensor | None, now: Tensor) -> Tensor:
    if before is None:
        return now.new_zeros((), dtype=torch.float32)
    return (now - before).float().abs().mean() / before.float().abs().mean()


def polynomial(x: float) -> float:
    value = 0.0
    for coefficient in CHANGE:
        value = value * x + coefficient
    return value


def find_threshold(changes: Sequence[Sequence[float]], num_computed: float) -> float:
    """Find the threshold at which jobs with these changes per step compute `num_computed` steps on average."""
    low, high = 0.0, max(sum(line) for line in changes) + 1
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        if sum(count_computed(line, middle) for line in changes) > num_computed * len(changes):
            low = middle
        else:
            high = middle
    return high


def count_computed(changes: Sequence[float], threshold: float) -> int:
    """Count the computed steps, among them the first and the last."""
    num_computed, change = min(len(changes), 2), 0.0
    for step_change in changes[1:-1]:
        change += step_change
        if change >= threshold:
            num_computed, change = num_computed + 1, 0.0
    return num_computed
