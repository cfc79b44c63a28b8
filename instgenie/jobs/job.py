"""Jobs: edits with everything they carry from step to step. Knows tokens, branches, steps and plans; knows no picture,
no prompt and no model family.

A job has one branch, or two when its guidance is true (classifier-free): both branches share the job's latents and its
template's activations. A dense block computes all tokens of a job, a cached block its text, its masked tokens and their
halo. Halo tokens are computed, so that they see what the masked ones become, and stay on the template's trajectory.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from instgenie.adapters.applied import AppliedLoras
from instgenie.cost.kept_steps import KeptSteps
from instgenie.cost.plan import DENSE, Plan, check_plan, is_cached
from instgenie.errors import PlanError
from instgenie.jobs.activations import Activations, Kind
from instgenie.jobs.blocks import BlockMemory, JobUnits
from instgenie.jobs.controls import JobControl, Promise
from instgenie.jobs.history import TokenHistory
from instgenie.jobs.sampler import Schedule
from instgenie.jobs.tokens import JobTokens, Level, pool, spread, text_bucket
from instgenie.types import Edit

Grid = tuple[int, int]  # rows and columns of image tokens


@dataclass(frozen=True, eq=False)
class Template:
    """A picture's own tokens and noise. They fix where its tokens are at every step, whatever the edit."""

    clean: Tensor  # [tokens, channels]
    noise: Tensor  # [tokens, channels]

    def at(self, step: int, schedule: Schedule) -> Tensor:
        return self.clean if step == schedule.num_steps else schedule.noised(self.clean, self.noise, step)


@dataclass(frozen=True, eq=False)
class Branch:
    """One sequence of a job: what the model sees at every step besides the image tokens."""

    text: Tensor  # [text tokens, width], embedded
    pooled: Tensor  # [pooled channels; 0 for models without a pooled embedding]
    rotary: Tensor  # [text tokens + image tokens seen, head channels / 2], complex; no channels for models without
    num_prompt: int | None = None  # leading text tokens that are the prompt's; those after them are padding. None: all
    words: Tensor | None = None  # [text tokens, channels], for ControlNets where `text` is not what they embed
    num_facts: int = (
        0  # trailing text tokens, the same for every prompt: if any, activations keep rows of no other text
    )


@dataclass(eq=False)
class Job:
    """An edit on a worker. It has one owner, which advances it step by step."""

    edit: Edit
    grid: Grid
    template: Template
    masked: Tensor  # [tokens, 1], bool
    conditioning: Tensor  # [tokens, channels that fill models see beside the latents; 0 for other models]
    branches: tuple[Branch, ...]  # the prompt's, then the negative prompt's where guidance is true
    scale: float  # of classifier-free guidance, where there is a second branch
    schedule: Schedule
    latents: Tensor  # [tokens, channels]
    step: int = 0
    activations: Activations | None = None  # of its template, or its own
    plan: Plan = DENSE  # for the steps that are not dense
    own_steps: KeptSteps | None = None  # dense steps, if the activations are those that these leave behind
    kept_step: int | None = None  # the step that left its own activations; None: there are none yet
    loras: AppliedLoras | None = None  # that are there, on its device; None: it has none, or none yet
    is_held: bool = False  # True while it waits in the batch, for LoRAs, and takes no step
    controls: tuple[JobControl, ...] = ()
    residuals: Promise | None = None  # of the ControlNets that guide its present step; None: none does
    awaits_controls: bool = False  # True while it waits in the batch for its ControlNets, and takes no step
    awaits_branch: bool = False  # the same, for the process that computes its other branch
    keeps_norm: bool = False  # guided predictions are as long as those of the prompt, token by token
    reference: Tensor | None = None  # [reference tokens, channels] beside its own, the same at every step
    reuses_changed: bool = False  # True: what hardly changes is guessed; see `engine.changed`
    idle_step: int = -1  # the last step that computes no token
    history: TokenHistory | None = None  # of its predictions, if it reuses them
    trust: float = 0.0  # of guesses, in the movement of predictions; see `TokenHistory`
    blocks: BlockMemory | None = None  # of what its blocks added, if each of them chooses the tokens that it computes
    num_taken_tokens: float = 0  # image tokens computed so far, over all steps

    def __post_init__(self) -> None:
        cache = self.activations
        if cache is None and any(self.plan):
            raise PlanError(f"the plan caches {sum(self.plan)} blocks: the template has no activations")
        if cache is not None:
            check_plan(self.plan, cache.kind, cache.run_lengths)
            assert (cache.num_steps, cache.num_tokens) == (self.num_steps, len(self.masked))
            num_facts = self.branches[0].num_facts
            assert not num_facts or cache.num_text in (0, num_facts), (cache.num_text, num_facts)

    @property
    def num_steps(self) -> int:
        return self.schedule.num_steps

    @property
    def done(self) -> bool:
        return self.step == self.num_steps

    @property
    def timestep(self) -> Tensor:  # []
        return self.timesteps[self.step]

    @cached_property
    def computed(self) -> Tensor:  # [tokens, 1], bool: the masked tokens and their halo
        return spread(self.masked, self.grid, self.edit.halo) if self.edit.halo else self.masked

    @cached_property
    def inside(self) -> Tensor:  # [masked tokens and their halo], their indices
        return self.computed[:, 0].nonzero()[:, 0]

    @cached_property
    def outside(self) -> Tensor:  # [the other tokens], their indices
        return (~self.computed[:, 0]).nonzero()[:, 0]

    @property
    def num_seen(self) -> int:
        """Image tokens that the network sees: the picture's own, then those of references."""
        return len(self.masked) + (0 if self.reference is None else len(self.reference))

    @cached_property
    def rest(self) -> Tensor:  # [tokens outside, then reference tokens], the indices of all that may be read
        if self.reference is None:
            return self.outside
        return torch.cat([self.outside, torch.arange(len(self.masked), self.num_seen, device=self.device)])

    @cached_property
    def timesteps(self) -> Tensor:  # [steps], on the device from the first step on
        return torch.tensor([self.schedule.timestep(step) for step in range(self.num_steps)], device=self.device)

    @cached_property
    def guidance(self) -> Tensor:  # []
        return torch.full((), self.edit.guidance, dtype=torch.float32, device=self.device)

    @property
    def device(self) -> torch.device:
        return self.latents.device

    @cached_property
    def tokens(self) -> JobTokens:
        num_text = tuple(len(branch.text) for branch in self.branches)
        rotary = tuple(branch.rotary for branch in self.branches)
        num_facts = self.branches[0].num_facts
        num_seen, num_references = self.num_seen, self.num_seen - len(self.masked)
        return JobTokens(num_seen, self.inside, self.rest, num_text, rotary, self.num_prompt, num_facts, num_references)

    @cached_property
    def num_prompt(self) -> int:
        """Text tokens that are computed where the padding of all branches is read from activations: as many as for
        prompts of about that length, so that few captured passes serve all prompts. A text with facts has no
        padding."""
        num_text = max(len(branch.text) for branch in self.branches)
        if num_facts := self.branches[0].num_facts:
            return num_text - num_facts
        longest = max(len(branch.text) if branch.num_prompt is None else branch.num_prompt for branch in self.branches)
        return text_bucket(longest, num_text) if len(self.rest) else num_text

    @cached_property
    def padded_tokens(self) -> JobTokens:
        """The job's tokens in lists as long as those of many other masks."""
        return self.tokens.padded(reads_padding=self.activations is not None and self.activations.num_text > 0)

    @cached_property
    def levels(self) -> dict[int, Level]:
        return {}

    def level(self, num_tokens: int) -> Level:
        """The level that has `num_tokens` tokens; computed once."""
        if num_tokens not in self.levels:
            self.levels[num_tokens] = pool(self.computed, self.grid, num_tokens)
        return self.levels[num_tokens]

    @property
    def in_dense_steps(self) -> bool:
        """True if this step computes every token even where activations are at hand."""
        return self.is_dense_at(self.step)

    def is_dense_at(self, step: int) -> bool:
        if self.own_steps is None:
            return step < self.edit.dense_steps
        return self.kept_step is None or step in self.own_steps

    @property
    def keeps_activations(self) -> bool:
        """True if this step's activations serve the next one."""
        is_read = self.own_steps is not None and self.step + 1 < self.num_steps and self.step + 1 not in self.own_steps
        return is_read and self.in_dense_steps and not stands_by(self)

    @property
    def kept_kind(self) -> Kind | None:
        """The kind of the activations that this step leaves behind; None if it leaves none."""
        return self.activations.kind if self.activations and self.keeps_activations else None

    @property
    def present_plan(self) -> Plan:
        """The plan of this step."""
        return DENSE if self.in_dense_steps else self.plan

    def is_cached(self, block: int) -> bool:
        """True if the block is cached at this step; `plan.is_cached` says what follows the last block."""
        return is_cached(self.present_plan, block)

    @property
    def num_computed_tokens(self) -> int:
        """Mean number of image tokens computed, over steps and blocks."""
        if self.reuses_changed:
            return round(self.num_taken_tokens / max(self.step, 1))
        num_dense = self.edit.dense_steps if self.own_steps is None else len(self.own_steps.steps)
        cached_steps = max(self.num_steps - num_dense, 0) / self.num_steps
        cached_blocks = sum(self.plan) / max(len(self.plan), 1)
        return round(len(self.masked) - cached_steps * cached_blocks * len(self.outside))

    def advance(self, predictions: Sequence[Tensor]) -> None:
        """Take one step with one prediction per branch, for all tokens or for the computed ones alone; with none if no
        token was computed. Masked tokens follow the prediction; the others stay on the template's trajectory."""
        guided = guide(predictions, self.scale, self.keeps_norm) if predictions else None
        prediction, history = complete(self, guided)
        moved = self.schedule.advanced(self.latents, prediction, self.step)
        latents = torch.where(self.masked, moved, self.template.at(self.step + 1, self.schedule))
        if self.keeps_activations:
            self.kept_step = self.step
        if guided is not None:
            share = self.blocks.share if self.blocks and chooses(self) else 1.0
            self.num_taken_tokens += share * len(self.inside if any(self.present_plan) else self.masked)
        self.history = history
        self.step, self.latents = self.step + 1, latents  # together, so that running out of memory changes neither


def stands_still(job: Job) -> bool:
    """True while a job is in the batch and takes no step."""
    return job.is_held or job.awaits_controls or job.awaits_branch


def reads_convolutions(job: Job, plan: Plan | None = None) -> bool:
    """Return whether convolutions compute masked tiles alone at the job's present step, or one with a plan: where every
    block computes masked tokens alone, and no LoRA and no ControlNet may change what convolutions compute elsewhere."""
    has_any = job.activations is not None and job.activations.has_convolutions and len(job.inside) > 0
    plan = job.present_plan if plan is None else plan
    return has_any and bool(plan) and all(plan) and not (job.edit.loras or job.edit.controls)


def keeps_convolutions(job: Job) -> bool:
    """Return whether the job's present step leaves behind what convolutions read."""
    return job.activations is not None and job.activations.has_convolutions and job.keeps_activations


def control_scales(job: Job) -> tuple[float, ...]:
    """The scale of each of a job's ControlNets at its present step; 0: it does not guide it."""
    return tuple(control.scale_at(job.step, job.num_steps) for control in job.controls)


def guide(predictions: Sequence[Tensor], scale: float, keeps_norm: bool = False) -> Tensor:
    """Classifier-free guidance, where there is a second branch; with `keeps_norm` a token's prediction is as long as
    that of the prompt."""
    positive, *negative = (prediction.float() for prediction in predictions)
    if not negative:
        return positive
    guided = negative[0] + scale * (positive - negative[0])
    if not keeps_norm:
        return guided
    longer: Tensor = positive.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
    return guided * longer


def locate(job: Job, sides: Iterable[int], tiles: Iterable[tuple[int, int]] = ()) -> tuple[Tensor, ...]:
    """Find out now which tokens are inside and outside, also at the levels at which a token stands for `side` by `side`
    of them, which tiles have masked tokens, by the sides of their levels and their own, and put the times of the steps
    on the device. That waits for the device, so that no step has to."""
    for side, tile in tiles:
        job.level(len(job.masked) // side**2).tiles((job.grid[0] // side, job.grid[1] // side), tile)
    levels = [job.level(len(job.masked) // side**2) for side in sides]
    return job.inside, job.outside, job.timesteps, *(level.inside for level in levels)


def chooses(job: Job) -> bool:
    """Return whether blocks choose what they compute at the job's present step. Those of a job that reads activations
    choose among its masked tokens, and not at steps or with plans that compute any block in full."""
    if job.blocks is None or not len(job.inside):
        return False
    return not reads_others(job) or (bool(job.present_plan) and all(job.present_plan))


def reads_others(job: Job) -> bool:
    """Return whether a job reads K and V of the tokens that it does not compute: a template's, or its own."""
    return job.activations is not None or job.own_steps is not None


def block_units(job: Job) -> JobUnits:
    """A job in a pass whose blocks choose what they compute."""
    assert job.blocks is not None
    return JobUnits(job.blocks, len(job.branches), job.step, job.num_steps, job.schedule.timestep(job.step))


def stand_by(job: Job) -> None:
    """Compute no token at this step, where it is not a dense one."""
    job.idle_step = job.step


def complete(job: Job, prediction: Tensor | None) -> tuple[Tensor, TokenHistory | None]:
    """The predictions of all tokens. Those that were not computed are guessed, if the job has a history; what that
    is behind this step is returned, too."""
    time = job.schedule.timestep(job.step)
    if prediction is None:
        assert job.history is not None
        return job.history.guess(time), job.history
    index = None if len(prediction) == len(job.masked) else job.inside
    if job.history is not None:
        return job.history.after(prediction, index, job.latents, time, job.step)
    whole = prediction if index is None else torch.zeros_like(job.latents).index_copy(0, index, prediction)
    if not job.reuses_changed:
        return whole, None
    return whole, TokenHistory.start(whole, job.latents, time, job.step, job.trust)


def stands_by(job: Job) -> bool:
    """True if a job's present step computes no token: all predictions are guessed."""
    return job.idle_step == job.step and not job.in_dense_steps
