"""The study of deadlines: the bound, the summary, and that the default policy beats the others on a small workload."""

import json
from pathlib import Path

import pytest

from instgenie.bench.bound import Window, most_in_time
from instgenie.bench.deadlines import DeadlineStudy, bench_deadlines
from instgenie.bench.points import BOUND, DeadlinePoint, summary
from instgenie.bench.simulate import Setup
from instgenie.simulate.service import SideSeconds


def test_the_bound_of_workloads_worked_out_by_hand() -> None:
    assert most_in_time([Window(0, 10, 5), Window(0, 10, 5)]) == 1
    assert most_in_time([Window(0, 10, 5), Window(0, 10, 10)]) == pytest.approx(0.75)  # one, and half of the other
    assert most_in_time([Window(0, 4, 4), Window(0, 4, 4), Window(4, 8, 4)]) == pytest.approx(2 / 3)
    assert most_in_time([Window(0, 100, 6), Window(2, 8, 6), Window(9, 10, 2)]) == pytest.approx(2.5 / 3)


def test_the_summary_reads_rates_between_the_loads_that_were_simulated() -> None:
    shares = {"fcfs": (1.0, 0.98, 0.5), "preemptive": (1.0, 1.0, 0.9), BOUND: (1.0, 1.0, 0.95)}
    points = [
        DeadlinePoint("production", 1, load, policy, load, share, None if policy == BOUND else 2.0)
        for policy, values in shares.items()
        for load, share in zip((0.3, 0.5, 0.9), values, strict=True)
    ]
    at_start, at_goal, means = summary(points)
    assert "load 73.3%): fcfs 70.0%, preemptive 94.2%" in at_start
    assert "fcfs 1.00x, preemptive 1.35x" in at_goal
    assert "preemptive +0.0%" in means


def test_the_default_policy_meets_more_deadlines_than_the_others(tmp_path: Path) -> None:
    setup = Setup("dummy:flux.1-dev", "cuda", None, "exact", False, SideSeconds(prepare=0.05, decode=0.05))
    study = DeadlineStudy(("inpaint",), loads=(0.5, 0.95), seconds=150.0, neighbours=(1.0,))
    bench_deadlines(setup, study, tmp_path, tmp_path / "figures.json")
    points = json.loads((tmp_path / "figures.json").read_text())["points"]
    shares = {(point["workload"], point["load"], point["policy"]): point["attainment"] for point in points}
    for case in (("inpaint", 0.5), ("inpaint", 0.95), ("neighbour", 1.0)):
        others = [shares[(*case, policy)] for policy in ("fcfs", "edf", "slack")]
        assert shares[(*case, "preemptive")] >= max(others), shares
    assert shares["neighbour", 1.0, "preemptive"] > shares["neighbour", 1.0, "slack"] + 0.2, shares
    assert {path.name for path in tmp_path.glob("*.svg")} == {"deadlines-inpaint-1.svg", "deadlines-neighbour.svg"}
