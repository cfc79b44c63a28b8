"""Snapshots for the engine page, made from the events of the cluster."""

import numpy as np
import pytest

from instgenie.cluster.cluster import Cluster
from instgenie.cluster.config import ClusterConfig
from instgenie.cluster.status import JobStatus
from instgenie.server.monitoring.pulse import Pulse, histogram, percentile


def job(name: str, plan: tuple[bool, ...] = ()) -> JobStatus:
    return JobStatus(name, step=0, num_steps=4, num_tokens=16, num_masked_tokens=4, num_computed_tokens=4, plan=plan)


@pytest.fixture
def pulse() -> Pulse:
    return Pulse(Cluster(ClusterConfig(devices=("cpu", "cpu"))), "tiny")


def test_a_bar_lasts_from_joining_to_leaving(pulse: Pulse) -> None:
    pulse.joined(1, job("a"))
    pulse.joined(1, job("b", (True, True)))
    pulse.left(1, "a")
    first, second = pulse.snapshot(0)["workers"]
    assert first["bars"] == []
    assert [(bar["job"], bar["is_cached"], bar["left"] is None) for bar in second["bars"]] == [
        ("a", False, False),
        ("b", True, True),
    ]


def test_a_job_that_made_way_for_another_has_a_mark(pulse: Pulse) -> None:
    pulse.joined(0, job("a"))
    pulse.left(0, "a")
    pulse.preempted(0, "a", by="b")
    pulse.joined(0, job("a"))
    seen = pulse.snapshot(0)
    assert [bar["made_way"] for bar in seen["workers"][0]["bars"]] == [True, False]
    assert [(one["job"], one["by"]) for one in seen["preemptions"]] == [("a", "b")]


def test_a_step_is_sent_once(pulse: Pulse) -> None:
    pulse.step(0, 0.1, batch_size=3, between=0.0)
    seen = pulse.snapshot(0)
    assert [step["batch_size"] for step in seen["workers"][0]["steps"]] == [3]
    assert pulse.snapshot(seen["now"])["workers"][0]["steps"] == []


def test_percentiles_are_observed_values() -> None:
    values = np.random.default_rng(0).random(101).tolist()
    assert percentile(values, 0.5) == sorted(values)[50]
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([], 0.5) is None


def test_ratios_are_counted_by_tenths() -> None:
    assert histogram([0.0, 0.05, 0.95, 1.0]) == [2, 0, 0, 0, 0, 0, 0, 0, 0, 2]
