"""Step times of random mixes, predicted as a worker does and by support vector regression."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from instgenie.bench.predictors import TOLERANCE, likeness, make_row, regression, support_vectors
from instgenie.cli import main


def test_both_predictors_learn_from_measured_steps(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real steps. Each mix is recorded; a fifth of them is predicted."""
    monkeypatch.chdir(folders["fill"].parent)  # a title with a long name would be broken into lines
    path = tmp_path / "predictors.json"
    command = ["bench", "predictors", "--size", "64x64", "--mixes", "40", "--json", str(path)]
    assert main([*command, "--model", "fill"]) == 0
    found = json.loads(path.read_text())
    assert [row["predictor"] for row in found["rows"]] == ["planner and pace", "support vectors"]
    assert "40 mixes, 32 learnt from" in capsys.readouterr().out
    assert len(found["mixes"]) == 40
    assert all(1 <= mix["features"][0] <= 4 and mix["seconds"] > 0 for mix in found["mixes"])
    assert all(0 < row["mean_error"] <= row["p95_error"] <= row["worst_error"] for row in found["rows"])


def test_the_regression_finds_a_law_that_it_was_not_told() -> None:
    chance = random.Random(0)
    rows = [(chance.randint(1, 4), chance.uniform(20, 800), chance.uniform(256, 1024)) for _ in range(150)]
    seconds = [0.01 + 0.004 * jobs + 1e-4 * tokens + 1e-8 * tokens**2 for jobs, tokens, _ in rows]
    predicted = regression(np.array(rows, dtype=float), seconds, 120)
    assert len(predicted) == 30
    assert make_row("support vectors", predicted, seconds[120:]).mean_error < 0.02


def test_the_regression_is_within_its_tolerance_of_what_it_was_told() -> None:
    rows = np.array([[float(x)] for x in np.linspace(-1.5, 1.5, 30)])
    target = np.sin(2 * rows[:, 0])
    kernel = likeness(rows, rows)
    fitted = kernel @ support_vectors(kernel, target)
    assert np.abs(fitted - target).max() < 2 * TOLERANCE
