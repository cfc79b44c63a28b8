"""Calibrating tiny models: everything is measured and written; their speed is not tested."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from instgenie.cli import main
from instgenie.cost.latency import latency_path, read_latency
from instgenie.engine import calibrate
from instgenie.engine.calibrate import make_cases, shares
from instgenie.models.model import Model


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "MAX_ROUNDS", calibrate.MIN_ROUNDS)


@pytest.mark.parametrize("family", ["fill", "blend_guided", "sdxl"])
def test_calibrate_writes_figures_and_a_plot(
    family: str, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "latency.json"
    assert (
        main(["calibrate", "--model", str(folders[family]), "--device", "cpu", "--size", "64x64", "--out", str(out)])
        == 0
    )
    latency = read_latency(out)
    assert latency.block + latency.flop + latency.flop_outside > 0
    assert latency.byte > 0
    ElementTree.parse(out.with_suffix(".svg"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latency.json", "latency.svg"]
    printed = capsys.readouterr().out
    assert "R²" in printed
    assert printed.strip().endswith(str(out))


def test_figures_go_to_the_cache_folder(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = str(folders["blend"])
    assert main(["calibrate", "--model", name, "--device", "cpu", "--size", "64x64"]) == 0
    [path] = tmp_path.rglob("*.json")
    assert path == latency_path(read_latency(path).device, name)


def test_a_missing_folder_is_named_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--out", "missing/latency.json"]) == 2
    assert "no folder missing" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["fill", "sdxl"])
def test_cases_differ_in_plans_jobs_and_masks(models: dict[str, Model], family: str) -> None:
    cases = make_cases(models[family], (64, 64))
    assert {case.name for case in cases} == {"cached", "half dense", "dense"}
    assert {len(case.jobs) for case in cases} == {1, 2, 4}
    largest = max(cases, key=lambda case: (len(case.jobs), case.plan))
    assert len({len(job.inside) for job in largest.jobs}) > 1
    assert all(job.plan == case.plan for case in cases for job in case.jobs)


def test_shares_are_ragged_around_the_ratio() -> None:
    assert shares(0.2, 1) == pytest.approx([0.2])
    assert shares(0.6, 4) == pytest.approx([0.375, 0.525, 0.675, 0.825])
