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
from instgenie.engine.calibrate import Case, make_job, mask_job, measure_steps
from instgenie.engine.pricing import price_of, price_steps
from instgenie.engine.register import register
from instgenie.errors import InstGenieError
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.pictures.samples import sample_picture
from instgenie.scheduling.pace import Pace
from instgenie.telemetry.progress import Progress, show_status

MAX_JOBS = {"cpu": 4, "cuda": 8}
FULL = 0.2  # share of the jobs that compute every token
TRAINING = 0.8  # share of the mixes that both learn from; the others are predicted
SECONDS = 1.0  # for all rounds: the fewest rounds

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
    plan = (True,) * model.num_blocks
    job = replace(make_job(model, size, register(sample_picture(size), model, size, steps=1)), plan=plan)
    mixes = []
    for _ in range(num_mixes):
        num_jobs = random.integers(1, MAX_JOBS[model.device.type] + 1)
        ratios = [1.0 if random.random() < FULL else random.uniform(0.02, 0.8) for _ in range(num_jobs)]
        mixes.append(Case("mix", tuple(mask_job(job, model, size, ratio) for ratio in ratios), plan))
    return mixes


def ours(model: Model, name: str, mixes: Sequence[Case], seconds: Sequence[float], num_known: int) -> list[float]:
    """What a worker predicts after it has taken the steps of the known mixes."""
    costs, pace = price_steps(model, name, "cached", "model"), Pace()
    predicted = [costs.step_seconds(price_of(job, costs) for job in mix.jobs) for mix in mixes]
    for known in zip(predicted[:num_known], seconds, strict=False):
        pace.measure(*known)
    return [pace.seconds(1, one) for one in predicted[num_known:]]


def features(mixes: Sequence[Case]) -> Features:
    """Jobs, computed tokens, all tokens, and the largest mask of each mix."""
    rows = []
    for mix in mixes:
        computed = [len(job.inside) for job in mix.jobs]
        rows.append((len(mix.jobs), sum(computed), sum(len(job.masked) for job in mix.jobs), max(computed)))
    return np.array(rows, dtype=float)


def regression(known: Features, seconds: Sequence[float], num_known: int) -> list[float]:
    """Fit a support vector regression to the known mixes, in scaled features, and predict the others."""
    try:
        from sklearn.pipeline import make_pipeline  # an optional package
        from sklearn.preprocessing import StandardScaler
        from sklearn.svm import SVR
    except ImportError:
        raise InstGenieError("the support vector regression needs scikit-learn: pip install scikit-learn") from None
    target = np.array(seconds[:num_known])
    centre, spread = float(target.mean()), float(target.std()) or 1.0
    fitted = make_pipeline(StandardScaler(), SVR(C=100.0, epsilon=0.01))
    fitted.fit(known[:num_known], (target - centre) / spread)
    return [float(one) * spread + centre for one in fitted.predict(known[num_known:])]


def make_row(predictor: str, predicted: Sequence[float], seconds: Sequence[float]) -> PredictorRow:
    errors = [abs(one / taken - 1) for one, taken in zip(predicted, seconds, strict=True)]
    return PredictorRow(
        predictor, round(statistics.fmean(errors), 4), round(float(np.percentile(errors, 95)), 4), round(max(errors), 4)
    )
