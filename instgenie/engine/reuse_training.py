"""Trains the predictor of reuse: makes dense pictures from prompts, leaves random tokens or tiles out of what they
remember, and fits a logistic regression to how wrong the guesses of these would have been."""

import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from instgenie.engine.changed import NUM_LEADING, ages, features_of
from instgenie.engine.prepare import prepare
from instgenie.engine.reuse_predictor import FEATURES, ReusePredictor
from instgenie.errors import ModelError
from instgenie.jobs.blocks import BLOCK_FEATURES, BlockMemory, BlockRule
from instgenie.jobs.history import TokenHistory
from instgenie.jobs.job import guide
from instgenie.jobs.sampler import Schedule
from instgenie.models.model import Model
from instgenie.types import Edit, OnStep

GREY = 128
PROMPTS = (
    "a photo of a Persian cat", "a photo of a pug", "a photo of a rose", "a photo of a red shirt",
    "a photo of a sunflower", "a photo of a beagle", "a photo of a blue dress", "a photo of a Siamese cat",
)  # fmt: skip
SAMPLED = 0.125  # of the units of every block
SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)  # of tokens that a replayed step computes


Sample: TypeAlias = tuple[Tensor, Tensor]  # features [units, features] and errors of guesses [units]


class Recording(NamedTuple):
    """One dense picture."""

    latents: Tensor  # [steps, tokens, channels], before each step
    predictions: Tensor  # [steps, tokens, channels]
    schedule: Schedule


@dataclass(frozen=True)
class ReuseSetting:
    """What a predictor is trained for; see `ReusePredictor`."""

    tolerance: float = 0.05
    max_steps: int = 4
    trust: float = 0.8
    per_block: bool = False
    tile: int = 0


@dataclass(frozen=True)
class Trained:
    """A predictor, and how it does on pictures that it was not fitted to."""

    predictor: ReusePredictor
    num_samples: int
    share_wrong: float  # of held-out guesses, those that are too wrong
    accuracy: float  # on held-out guesses


def picture_from(prompt: str, seed: int, model: Model, size: tuple[int, int] | None = None, **fields: object) -> Edit:
    """The edit that makes a picture from a prompt alone."""
    height, width = size or (model.own_size, model.own_size)
    grey, everything = np.full((height, width, 3), GREY, np.uint8), np.ones((height, width), np.bool_)
    edit = Edit(grey, everything, prompt, seed, model.steps, model.guidance, size=(height, width), from_nothing=True)
    return replace(edit, **fields)  # type: ignore[arg-type]


@torch.inference_mode()
def record(model: Model, edit: Edit) -> Recording:
    job = prepare(edit, model)
    latents, predictions = [], []
    while not job.done:
        predicted = model.predict([job])[0]
        latents.append(job.latents)
        predictions.append(guide(predicted, job.scale, job.keeps_norm))
        job.advance(predicted)
    return Recording(torch.stack(latents), torch.stack(predictions), job.schedule)


@torch.inference_mode()
def replay(recording: Recording, max_steps: int, trust: float, generator: torch.Generator) -> Iterator[Sample]:
    """Yield the features of all tokens [tokens, features] and the errors that their guesses at the next step have
    [tokens], for each step, while random tokens are computed and the others guessed."""
    latents, predictions, schedule = recording
    history = TokenHistory.start(predictions[0], latents[0], schedule.timestep(0), 0, trust)
    num_tokens = predictions.shape[1]
    for step in range(1, len(predictions) - 1):
        share = SHARES[int(torch.randint(len(SHARES), (), generator=generator))]
        computed = torch.rand(num_tokens, generator=generator) < (share if step >= NUM_LEADING else 1)
        is_over = (ages(history, None if step == 1 else history.steps.new_empty(0).long(), step - 1) > max_steps).cpu()
        index = (computed | is_over).nonzero()[:, 0].to(latents.device)
        features = features_of(history, latents[step], index, schedule, step)
        time = schedule.timestep(step)
        _, history = history.after(predictions[step][index], index, latents[step], time, step)
        following = predictions[step + 1]
        wrong = (history.guess(schedule.timestep(step + 1)) - following).norm(dim=1)
        if step + 1 >= NUM_LEADING:
            yield features, wrong / following.square().sum(1).mean().sqrt()


class BlockSampler:
    """Sees what blocks compute, and lets their histories count random units as computed."""

    def __init__(self, max_steps: int, generator: torch.Generator) -> None:
        self.max_steps, self.generator = max_steps, generator
        self.samples: list[Sample] = []

    def __call__(self, features: Tensor, errors: Tensor) -> Tensor:
        ages = features[:, FEATURES.index("age")].exp().round()
        is_known = ages <= self.max_steps
        drawn = torch.rand(len(errors), generator=self.generator).to(errors.device)
        kept = is_known & (drawn < SAMPLED)
        self.samples.append((features[kept].cpu(), errors[kept].cpu()))
        share = SHARES[int(torch.randint(len(SHARES), (), generator=self.generator))]
        computed = torch.rand(len(errors), generator=self.generator).to(errors.device) < share
        return computed | (ages >= self.max_steps)


@torch.inference_mode()
def sample_blocks(model: Model, edit: Edit, setting: ReuseSetting, seed: int) -> list[Sample]:
    """The features and errors of guesses that the blocks of one dense picture would have made."""
    sampler = BlockSampler(setting.max_steps, torch.Generator().manual_seed(seed))
    rule = BlockRule(
        (0.0,) * len(BLOCK_FEATURES), 0.0, -math.inf, setting.max_steps, setting.trust, setting.tile, NUM_LEADING
    )
    job = prepare(edit, model)
    job.blocks = BlockMemory(rule, recorder=sampler)
    while not job.done:
        job.advance(model.predict([job])[0])
        if job.step <= NUM_LEADING:
            sampler.samples.clear()
    return sampler.samples


def train(model: Model, edits: Sequence[Edit], setting: ReuseSetting, on_step: OnStep | None = None) -> Trained:
    """Fit a predictor to pictures from prompts; every fourth of them is held out."""
    find_regressions()  # before the pictures are made
    pictures: list[list[Sample]] = []
    generator = torch.Generator().manual_seed(0)
    for number, edit in enumerate(edits, 1):
        if setting.per_block:
            pictures.append(sample_blocks(model, edit, setting, number))
        else:
            pictures.append(list(replay(record(model, edit), setting.max_steps, setting.trust, generator)))
        if on_step:
            on_step(number, len(edits))
    return fit(pictures, setting)


def find_regressions() -> ModuleType:
    try:
        return importlib.import_module("sklearn.linear_model")
    except ImportError:
        raise ModelError("the package scikit-learn is missing; it comes with the 'train' extra of instgenie") from None


def fit(pictures: Sequence[Sequence[Sample]], setting: ReuseSetting) -> Trained:
    """Fit a predictor to the samples of pictures."""
    regressions = find_regressions()
    held_out = [one for number, own in enumerate(pictures) if number % 4 == 3 for one in own]
    seen = [one for number, own in enumerate(pictures) if number % 4 != 3 for one in own]
    features, wrong = stack(seen, setting.tolerance)
    if wrong.all() or not wrong.any():
        raise ModelError(
            f"{wrong.mean():.0%} of {len(wrong)} guesses are further off than the tolerance {setting.tolerance}: "
            "choose another"
        )
    mean, spread = features.mean(0), features.std(0).clip(1e-6)
    regression = regressions.LogisticRegression(max_iter=1000).fit((features - mean) / spread, wrong)
    weights = regression.coef_[0] / spread
    bias = float(regression.intercept_[0] - weights @ mean)
    rounded = tuple(round(float(weight), 6) for weight in weights)
    features, wrong = stack(held_out or seen, setting.tolerance)
    accuracy = float(((features @ weights + bias > 0) == wrong).mean())
    predictor = ReusePredictor(rounded, round(bias, 6), **asdict(setting))
    return Trained(predictor, len(wrong), float(wrong.mean()), accuracy)


def stack(found: Sequence[Sample], tolerance: float) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Features [samples, features], and whether a guess was too wrong [samples]."""
    if not found:
        raise ModelError("no guess can be tested: pictures need at least three steps")
    features, errors = (torch.cat([pair[number] for pair in found]).double().cpu().numpy() for number in (0, 1))
    return features, errors > tolerance
