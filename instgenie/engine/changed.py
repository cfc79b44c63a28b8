"""Chooses what a job without a template computes at a step: what has changed too much to be guessed. Knows jobs, their
histories and a trained predictor.

A predictor of steps gives each token the probability that the guess of its prediction would be too wrong. If all are
below the threshold, the step computes no token, and nothing has to be kept but predictions: every family can do that.
The choice for a step is made when the step before begins, from what is known then, and read when that one has been
launched. So no device waits.

A predictor of blocks is asked before each block, for each token or tile, while the step runs: see `jobs.blocks`. With
the threshold 0 nothing is guessed, and the job is dense.
"""

import math
import sys
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from instgenie.engine.changes import to_host
from instgenie.engine.reuse_predictor import ReusePredictor, find_predictor
from instgenie.jobs.blocks import BlockMemory, BlockRule
from instgenie.jobs.history import TokenHistory
from instgenie.jobs.job import Job, reads_others, stand_by, stands_by
from instgenie.jobs.sampler import Schedule
from instgenie.models.model import Model

NUM_LEADING = 3  # steps that compute all tokens: two give a prediction's movement, and one tests a guess
TINY = 1e-6


@dataclass(frozen=True, eq=False)
class StepChoice:
    """Whether a job has to compute its tokens at a step."""

    step: int
    is_needed: Tensor  # [1], in main memory once it is ready
    ready: torch.cuda.Event | None

    def result(self) -> bool:
        if self.ready:
            self.ready.synchronize()
        return bool(self.is_needed.numpy()[0])


class Changed:
    """The choices for the jobs of a step loop; those of a job go with it."""

    def __init__(self, predictor: ReusePredictor, threshold: float, model: Model, max_bytes: int = sys.maxsize) -> None:
        self.predictor, self.model = predictor, model
        self.max_bytes = max_bytes  # that a job may keep; blocks of one that would keep more compute everything
        self.bound = logit(threshold)
        self.weights = torch.tensor(predictor.weights, device=model.device)
        self._choices: WeakKeyDictionary[Job, StepChoice] = WeakKeyDictionary()  # for the next step
        self._num_bytes: WeakKeyDictionary[Job, dict[bool, int]] = WeakKeyDictionary()  # see `count_bytes`

    @property
    def per_block(self) -> bool:
        return self.predictor.per_block

    def welcome(self, job: Job, own_bytes: int = 0) -> None:
        """Let a job that joins reuse what hardly changes, if it may. So many bytes are kept beside rows of blocks."""
        if job.reuses_changed or not self.can_reuse(job):
            return
        if self.per_block and self.bound > -math.inf:
            if not 0 < self.count_bytes(job) <= self.max_bytes - own_bytes:  # 0: no block can choose
                return
            job.blocks = BlockMemory(self.rule)
        job.reuses_changed = True

    def can_reuse(self, job: Job) -> bool:
        """Return whether a job may guess. A job needs all of its branches. Blocks do not guess where convolutions
        compute masked tiles alone."""
        may_choose = not (self.per_block and self.model.kept_convolutions.tile and reads_others(job))
        has_branches = len(job.branches) > 1 or job.scale <= 1
        return may_choose and has_branches and job.edit.reuse != "off" and job.edit.dense_steps < job.num_steps

    def bytes_of(self, job: Job, own_bytes: int = 0) -> int:
        """Bytes that the rows of blocks take of a job that has joined, or will join, and keeps so many beside them."""
        will_choose = not job.reuses_changed and self.can_reuse(job)
        if not self.per_block or self.bound == -math.inf or not (job.blocks or will_choose):
            return 0
        num_bytes = self.count_bytes(job)
        return num_bytes if num_bytes <= self.max_bytes - own_bytes else 0

    def count_bytes(self, job: Job) -> int:
        """The rows before a pass and those behind it exist side by side. They are counted once for a job that reads
        activations, and once for a dense one: jobs that wait are asked for them before every step."""
        counted, key = self._num_bytes.setdefault(job, {}), reads_others(job)
        if key not in counted:
            own, item_bytes = self.predictor, self.model.dtype.itemsize
            units = self.model.kept_units(job, own.tile)
            counted[key] = 2 * sum(one.num_bytes(item_bytes, own.trust > 0) for one in units)
        return counted[key]

    @property
    def rule(self) -> BlockRule:
        own = self.predictor
        return BlockRule(own.weights, own.bias, self.bound, own.max_steps, own.trust, own.tile, NUM_LEADING)

    def settle(self, job: Job) -> None:
        """Let the job's present step compute its tokens or not, as was chosen, and choose for the next step."""
        if self.per_block:
            return
        job.trust = self.predictor.trust
        choice = self._choices.get(job)
        if choice and choice.step == job.step and job.history and not choice.result():
            stand_by(job)
        if job.history and NUM_LEADING <= job.step + 1 < job.num_steps:
            self._choices[job] = self.look_ahead(job)

    def look_ahead(self, job: Job) -> StepChoice:
        assert job.history is not None
        now = computed_now(job)
        features = features_of(job.history, job.latents, now, job.schedule, job.step)
        logits = features @ self.weights + self.predictor.bias
        is_over = ages(job.history, now, job.step) > self.predictor.max_steps
        asked = logits.masked_fill(is_over, math.inf)[job.inside] >= self.bound
        return StepChoice(job.step + 1, *to_host(asked.any()))


def make_changed(model: Model, name: str, threshold: float, max_bytes: int = sys.maxsize) -> Changed | None:
    """Choices with the predictor of the model that was loaded by this name; None if the threshold is 0."""
    return Changed(find_predictor(name), threshold, model, max_bytes) if threshold else None


def logit(probability: float) -> float:
    if not 0 < probability < 1:
        return math.inf if probability >= 1 else -math.inf
    return math.log(probability / (1 - probability))


def computed_now(job: Job) -> Tensor | None:
    """Indices of the tokens that a job's present step computes; None: all."""
    if stands_by(job):
        return job.inside[:0]
    return None if job.in_dense_steps or not any(job.plan) else job.inside


def ages(history: TokenHistory, now: Tensor | None, step: int) -> Tensor:  # [tokens]
    """The steps since each token was computed, at the step after this one, which computes the tokens `now`, or all."""
    if now is None:
        return torch.ones_like(history.steps)
    return (step + 1 - history.steps).index_fill(0, now, 1)


def features_of(
    history: TokenHistory, latents: Tensor, now: Tensor | None, schedule: Schedule, step: int
) -> Tensor:  # [tokens, features]
    """What is known of each token when a step begins that computes the tokens `now`, or all of them, with a view to
    reusing it at the step after."""
    ahead = schedule.advanced(latents, history.guess(schedule.timestep(step)), step)
    before = latents if now is None else history.latents.index_copy(0, now, latents[now])
    change = (ahead - before).norm(dim=1) / latents.square().sum(1).mean().sqrt()
    share = (step + 1) / schedule.num_steps
    numbers = [change, history.errors, history.spans, ages(history, now, step)]
    logs = torch.stack([number.clamp(min=TINY).log() for number in numbers], dim=1)
    return F.pad(F.pad(logs, (0, 1), value=share), (0, 1), value=share**2)
