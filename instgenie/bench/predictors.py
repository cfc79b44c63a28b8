"""Predicting the seconds of a step from the mix of jobs in it: the planner's table with the pace of the worker, as
servers use them, beside support vector regression on the same measured steps, as in PatchedServe."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from instgenie.bench.files import check_folder, write_json
from instgenie.bench.machine import describe_machine
from instgenie.cost.learning import LearntCosts
from instgenie.cost.table import StepCosts
from instgenie.engine.calibrate import Case, make_job, mask_job, measure_steps
from instgenie.engine.pricing import price_of, price_steps
from instgenie.engine.register import register
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.pictures.samples import sample_picture
from instgenie.scheduling.pace import Pace
from instgenie.telemetry.progress import Progress, show_status

MAX_JOBS = {"cpu": 4, "cuda": 8}
FULL = 0.2  # share of the jobs that compute every token
TRAINING = 0.8  # share of the mixes that both learn from; the others are predicted
SECONDS = 1.0  # for all rounds: the fewest rounds
COST, TOLERANCE = 100.0, 0.01  # of the support vector regression, in standard deviations of the seconds
MAX_ROUNDS, SMALL = 500, 1e-3  # its fit ends when no weight moves by more

Features = NDArray[np.float64]  # [mixes, features]


@dataclass(frozen=True)
class PredictorRow:
    predictor: str
    mean_error: float  # relative, over the mixes that were not learnt from
    p95_error: float
    worst_error: float


def bench_predictors(
    name: str, device: str, size: tuple[int, int] | None, num_mixes: int, seed: int, json_path: Path | None
) -> None:
    check_folder(json_path)
    with show_status("loading the model"):
        model = load(name, device)
    mixes = draw_mixes(model, size or (model.own_size, model.own_size), num_mixes, seed)
    with Progress(transient=True) as progress:
        task = progress.add("measuring", 1)
        samples = measure_steps(model, model.describe(), mixes, task.update, SECONDS)
    seconds = [sample.seconds for sample in samples]
    num_known = round(TRAINING * num_mixes)
    rows = [
        make_row("planner and pace", ours(model, name, mixes, seconds, num_known), seconds[num_known:]),
        make_row("support vectors", regression(features(mixes), seconds, num_known), seconds[num_known:]),
    ]
    table = Table(
        "predictor", "mean error", "P95", "worst", title=f"{name}: {num_mixes} mixes, {num_known} learnt from"
    )
    for row in rows:
        table.add_row(row.predictor, *(f"{one:.1%}" for one in (row.mean_error, row.p95_error, row.worst_error)))
    Console().print(table)
    if json_path:
        recorded = [
            {"features": row, "seconds": taken} for row, taken in zip(features(mixes).tolist(), seconds, strict=True)
        ]
        figures = {"rows": [asdict(row) for row in rows], "mixes": recorded}
        write_json({"machine": describe_machine(model)} | figures, json_path)


def draw_mixes(model: Model, size: tuple[int, int], num_mixes: int, seed: int) -> list[Case]:
    """Draw batches of jobs with masks of all sizes, some of which compute every token."""
    random = np.random.default_rng(seed)
    plan = (True,) * sum(model.run_lengths)
    job = replace(make_job(model, size, register(sample_picture(size), model, size, steps=1)), plan=plan)
    mixes = []
    for _ in range(num_mixes):
        num_jobs = random.integers(1, MAX_JOBS[model.device.type] + 1)
        ratios = [1.0 if random.random() < FULL else random.uniform(0.02, 0.8) for _ in range(num_jobs)]
        mixes.append(Case("mix", tuple(mask_job(job, model, size, ratio) for ratio in ratios), plan))
    return mixes


def ours(model: Model, name: str, mixes: Sequence[Case], seconds: Sequence[float], num_known: int) -> list[float]:
    """What a worker predicts after it has taken the steps of the known mixes."""
    learnt, pace = LearntCosts(price_steps(model, name, "cached", "model")), Pace()
    for mix, taken in zip(mixes[:num_known], seconds, strict=False):
        pace.measure(step_seconds(mix, learnt.costs), taken)
        ratio = learnt.costs.ratio
        learnt.measure([price_of(job, learnt.table) for job in mix.jobs], taken)
        if learnt.costs.ratio != ratio:
            pace.restart(learnt.costs.ratio)
    return [pace.seconds(1, step_seconds(mix, learnt.costs)) for mix in mixes[num_known:]]


def step_seconds(mix: Case, costs: StepCosts) -> float:
    return costs.step_seconds(price_of(job, costs) for job in mix.jobs)


def features(mixes: Sequence[Case]) -> Features:
    """Jobs, computed tokens, all tokens, and the largest mask of each mix."""
    rows = []
    for mix in mixes:
        computed = [len(job.inside) for job in mix.jobs]
        rows.append((len(mix.jobs), sum(computed), sum(len(job.masked) for job in mix.jobs), max(computed)))
    return np.array(rows, dtype=float)


def regression(known: Features, seconds: Sequence[float], num_known: int) -> list[float]:
    """Fit a support vector regression to the known mixes, in scaled features and seconds, and predict the others."""
    taught, target = known[:num_known], np.array(seconds[:num_known])
    centre, spread = taught.mean(axis=0), np.where(taught.std(axis=0) > 0, taught.std(axis=0), 1.0)
    mean, deviation = float(target.mean()), float(target.std()) or 1.0
    scaled = (known - centre) / spread
    kernel = likeness(scaled, scaled[:num_known])  # [mixes, known]
    weights = support_vectors(kernel[:num_known], (target - mean) / deviation)
    return [float(one) * deviation + mean for one in kernel[num_known:] @ weights]


def likeness(rows: Features, others: Features) -> Features:
    """The radial kernel between rows of features, plus one: the constant of the regression is a weight like others."""
    squares = ((rows[:, None, :] - others[None, :, :]) ** 2).sum(axis=2)
    return np.asarray(1 + np.exp(-squares / rows.shape[1]))


def support_vectors(kernel: Features, target: Features) -> Features:
    """Weights of the known rows. Errors below TOLERANCE cost nothing, larger ones COST for each unit beyond it. In the
    dual problem each weight has a best value given the others, within +-COST; they take turns until none moves."""
    weights, fitted = np.zeros(len(target)), np.zeros(len(target))
    for _ in range(MAX_ROUNDS):
        largest = 0.0
        for index, own in enumerate(kernel.diagonal()):
            missing = target[index] - fitted[index] + own * weights[index]
            shrunk = np.sign(missing) * max(abs(missing) - TOLERANCE, 0.0)
            moved = float(np.clip(shrunk / own, -COST, COST)) - weights[index]
            weights[index] += moved
            fitted += moved * kernel[:, index]
            largest = max(largest, abs(moved))
        if largest < SMALL:
            break
    return weights


def make_row(predictor: str, predicted: Sequence[float], seconds: Sequence[float]) -> PredictorRow:
    errors = [abs(one / taken - 1) for one, taken in zip(predicted, seconds, strict=True)]
    return PredictorRow(
        predictor, round(statistics.fmean(errors), 4), round(float(np.percentile(errors, 95)), 4), round(max(errors), 4)
    )
