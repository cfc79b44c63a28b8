"""Chooses the tokens that a job without a template computes at a step: those whose predictions have changed too much to
be guessed. Knows jobs, their histories and a trained predictor; the families know how few tokens are computed.

The predictor gives each token the probability that its guess would be too wrong. Tokens below the threshold are reused:
their predictions are guessed, and their K and V are those of the step that computed them last. With the threshold 0 no
token is, and the job is dense. Where the whole picture is one tile, a step computes all tokens or none, and nothing has
to be kept but predictions: every family can do that. With smaller tiles a step computes some tokens, and keeps their
rows, as only the families do whose tokens flow from the first block to the last.

The choice for a step is made when the step before begins, from what is known then, and read when that one has been
launched. So no device waits. A step computes one of a few numbers of tokens, so that captured passes serve many steps.
"""

import math
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from instgenie.engine.changes import to_host
from instgenie.engine.reuse_predictor import ReusePredictor, find_predictor
from instgenie.errors import ModelError
from instgenie.jobs.history import TokenHistory
from instgenie.jobs.job import Grid, Job, choose, stand_by, stands_by
from instgenie.jobs.sampler import Schedule
from instgenie.jobs.tokens import JobTokens
from instgenie.models.model import Model

NUM_LEADING = 3  # steps that compute all tokens: two give a prediction's movement, and one tests a guess
NUM_SIZES = 8  # a step computes a multiple of an eighth of the tokens
TINY = 1e-6


@dataclass(frozen=True, eq=False)
class Choice:
    """The tokens of a job in the order in which they should be computed at a step, and how many have to be."""

    step: int
    order: Tensor  # [tokens that may be computed], their indices
    count: Tensor  # [1], in main memory once it is ready
    ready: torch.cuda.Event | None

    def num_tokens(self, max_share: float) -> int:
        """The tokens that have to be computed, rounded up to one of a few numbers; all, if they are a larger share."""
        if self.ready:
            self.ready.synchronize()
        num_all = len(self.order)
        unit = max(num_all // NUM_SIZES, 1)
        num = -(-int(self.count.numpy()[0]) // unit) * unit
        return num_all if num > max_share * num_all else num


class ChangedTokens:
    """The choices for the jobs of a step loop; those of a job go with it."""

    def __init__(self, predictor: ReusePredictor, threshold: float, device: torch.device) -> None:
        self.predictor = predictor
        self.bound = logit(threshold)
        self.weights = torch.tensor(predictor.weights, device=device)
        self._tokens: WeakKeyDictionary[Job, JobTokens] = WeakKeyDictionary()  # all that may be computed
        self._choices: WeakKeyDictionary[Job, Choice] = WeakKeyDictionary()  # for the next step

    @property
    def in_tiles(self) -> bool:
        """True if a step may compute some tokens and guess the others."""
        return self.predictor.tile > 0

    def settle(self, job: Job) -> None:
        """Let the job's present step compute the tokens that were chosen for it, and choose those of the next step."""
        every, job.trust = self._tokens.setdefault(job, job.tokens), self.predictor.trust
        choice = self._choices.get(job)
        if choice and choice.step == job.step and job.history:
            self.apply(choice, every, job)
        elif job.chosen_step != job.step:  # there is no choice yet
            choose(job, every)
        if job.history and NUM_LEADING <= job.step + 1 < job.num_steps:
            self._choices[job] = self.look_ahead(job, every)

    def apply(self, choice: Choice, every: JobTokens, job: Job) -> None:
        num = choice.num_tokens(self.predictor.max_share)
        if num == 0:
            stand_by(job)
        else:
            choose(job, every if num == len(every.inside) else chosen(every, choice.order, num))

    def look_ahead(self, job: Job, every: JobTokens) -> Choice:
        assert job.history is not None
        now = computed_now(job)
        features = features_of(job.history, job.latents, now, job.schedule, job.step)
        logits = features @ self.weights + self.predictor.bias
        is_over = ages(job.history, now, job.step) > self.predictor.max_steps
        asked = torch.full_like(logits, -math.inf)
        asked = asked.index_copy(0, every.inside, logits.masked_fill(is_over, math.inf)[every.inside])
        urgency = in_tiles(asked, job.grid, self.predictor.tile)[every.inside]
        count, ready = to_host((urgency >= self.bound).sum())
        return Choice(job.step + 1, every.inside[urgency.argsort(descending=True, stable=True)], count, ready)


def make_changed(model: Model, name: str, threshold: float) -> ChangedTokens | None:
    """Choices with the predictor of the model that was loaded by this name; None if the threshold is 0."""
    if not threshold:
        return None
    predictor = find_predictor(name)
    if predictor.tile and not model.text_flows:
        raise ModelError(
            f"the predictor of {name!r} reuses tiles of {predictor.tile} tokens: a network with convolutions computes "
            "all tokens of a step or none (tile 0)"
        )
    return ChangedTokens(predictor, threshold, model.device)


def logit(probability: float) -> float:
    if not 0 < probability < 1:
        return math.inf if probability >= 1 else -math.inf
    return math.log(probability / (1 - probability))


def computed_now(job: Job) -> Tensor | None:
    """Indices of the tokens that a job's present step computes; None: all."""
    if stands_by(job):
        return job.inside[:0]
    return None if job.in_dense_steps or not any(job.plan) else job.inside


def chosen(every: JobTokens, order: Tensor, num: int) -> JobTokens:
    """The tokens of a job of which the first in the order are computed, and the others read."""
    inside, rest = order[:num].sort().values, order[num:].sort().values
    return replace(every, inside=inside, rest=torch.cat([rest, every.rest]) if len(every.rest) else rest)


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


def in_tiles(values: Tensor, grid: Grid, side: int) -> Tensor:  # [tokens]
    """The largest value in the tile of each token."""
    if side == 1:
        return values
    height, width = grid
    down, across = (side, side) if side else grid
    most = F.max_pool2d(values.view(1, 1, height, width), (down, across), ceil_mode=True)
    spread = most.repeat_interleave(down, dim=2).repeat_interleave(across, dim=3)
    return spread[..., :height, :width].reshape(-1)
