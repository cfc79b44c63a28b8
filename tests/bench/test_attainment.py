"""Policies compared on real servers over HTTP, and the simulator compared with what was measured."""

from pathlib import Path
from typing import Any

import pytest

from instgenie.bench import attainment
from instgenie.bench.recorder import StepRecorder
from instgenie.bench.served import (
    AloneSeconds,
    ServedEdit,
    ServedJob,
    ServedRecord,
    ServedRun,
    ServedStudy,
    read_record,
)
from instgenie.bench.workload import Arrival, WorkloadRecipe
from instgenie.cli import main

STUDY = ServedStudy("tiny", "cpu", WorkloadRecipe(sizes=((32, 48),), steps=(6,)))


def test_a_deadline_is_a_multiple_of_what_edits_like_it_take_alone() -> None:
    alone = AloneSeconds((32, 48), 6, (0.1, 0.5), (1.0, 3.0))
    record = ServedRecord(STUDY, "a machine", 1, 8, 2.0, (alone,))
    for ratio, seconds in ((0.05, 5.0), (0.1, 5.0), (0.3, 10.0), (0.9, 15.0)):
        assert record.deadline_of(Arrival(0.0, 0, ratio, "box", (32, 48), 6, 0)) == pytest.approx(seconds)


def test_an_edit_that_failed_is_not_in_time() -> None:
    assert ServedEdit(0.0, 0, 6, deadline=2.0, latency=1.0).in_time
    assert not ServedEdit(0.0, 0, 6, deadline=2.0, latency=2.1).in_time
    assert not ServedEdit(0.0, 0, 6, deadline=2.0, latency=1.0, error="500 no").in_time


def test_predictions_are_compared_with_latencies() -> None:
    edits = [
        ServedEdit(0.0, 0, 6, 9.0, latency, predicted=said) for latency, said in ((2.0, 3.0), (4.0, 3.0), (1.0, 0.0))
    ]
    failed = ServedEdit(0.0, 0, 6, 9.0, 1.0, error="500 no", predicted=7.0)
    assert ServedRun("fcfs", 0.5, 1.0, (*edits, failed), ()).prediction_error == pytest.approx((0.5 + 0.25) / 2)
    assert ServedRun("fcfs", 0.5, 1.0, (edits[2],), ()).prediction_error is None


def stay(job: str, joined: float, left: float | None, step: int = 0) -> dict[str, Any]:
    sizes = {"num_steps": 6, "num_tokens": 16, "num_masked_tokens": 4}
    return {"job": job, "joined": joined, "left": left, "is_cached": True, "step": step} | sizes


def snapshot(steps: list[tuple[float, int]], stays: list[dict[str, Any]]) -> dict[str, Any]:
    told = [{"ended": ended, "seconds": 0.5, "between": 0.1, "batch_size": size} for ended, size in steps]
    return {"max_batch_size": 8, "workers": [{"index": 0, "steps": told, "bars": stays}]}


def test_the_jobs_of_a_step_are_those_that_were_in_the_batch_at_its_end() -> None:
    """The first job leaves after the second step and comes back with the fourth. The third step is of one job."""
    recorder = StepRecorder()
    recorder.take(snapshot([(1.0, 1), (2.0, 2)], [stay("a", 0.5, None), stay("b", 1.1, None)]))
    later = [stay("a", 0.5, 2.1), stay("b", 1.1, None), stay("a", 3.1, None, step=2)]
    recorder.take(snapshot([(3.0, 1), (4.0, 2)], later))
    steps = [[job.step for job in step.jobs] for step in recorder.steps()]
    assert steps == [[0], [1, 0], [1], [2, 2]]
    assert recorder.steps()[0].jobs == (ServedJob(16, 4, 0, 6, True),)
    assert (recorder.num_workers, recorder.max_batch_size) == (1, 8)


def test_policies_are_compared_and_simulated(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured is kept: the second command starts no server."""
    out = tmp_path / "out"
    common = ["bench", "serve", "--scheduling", "preemptive", "--model", str(folders["sd_fill"]), "--device", "cpu"]
    common += ["--seconds", "1", "--num-templates", "1", "--size", "48x32", "--steps", "6", "--out", str(out)]
    common += ["--server-flags", "--max-batch-size 4"]
    loads = ["--load", "0.2", "--load", "0.4"]
    assert main([*common, *loads, "--together"]) == 0
    assert "preemptive, load 40%" in capsys.readouterr().out
    record = read_record(out / "attainment.json")
    assert [(run.policy, run.load) for run in record.runs] == [("preemptive", 0.2), ("preemptive", 0.4)]
    assert (record.num_workers, record.max_batch_size) == (1, 4)
    for run in record.runs:
        assert len(run.edits) == max(round(run.load * record.capacity), 1)
        assert not any(edit.error for edit in run.edits)
        assert sum(len(step.jobs) for step in run.steps) == 6 * len(run.edits)
        assert all(edit.num_tokens > edit.num_masked_tokens > 0 for edit in run.edits)
        assert all(edit.predicted > 0 for edit in run.edits)
        assert run.prediction_error is not None
    monkeypatch.setattr(attainment, "started", lambda *_: pytest.fail("a server was started"))
    assert main([*common, *loads]) == 0
    assert "40%" in capsys.readouterr().out
    assert "Edits in time" in (out / "attainment.svg").read_text()
    assert main(["bench", "simulate", "--against", str(out / "attainment.json")]) == 0
    said = capsys.readouterr().out
    assert "mean latency over all runs" in said
    assert said.count("preemptive") == 2
    assert main([*common, "--seed", "1"]) == 2
    assert "has another study" in capsys.readouterr().err


def test_a_comparison_of_policies_draws_its_own_arrivals(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "serve", "--scheduling", "fcfs", "--request-rate", "2"])
    assert "--load and --seconds" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "serve", "--scheduling", "fcfs,best"])
    assert "'best' is not one of" in capsys.readouterr().err


def test_a_file_that_is_no_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("{}")
    assert main(["bench", "simulate", "--against", str(tmp_path / "other.json")]) == 2
    assert "cannot be read as a comparison of policies" in capsys.readouterr().err
