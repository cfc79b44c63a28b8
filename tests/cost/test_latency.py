"""Latency models without any measuring: fits of invented times, files, and the two streams."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from instgenie.cost.latency import (
    DEFAULTS,
    BlockCost,
    Latency,
    LoadSample,
    StepSample,
    find_latency,
    fit,
    fit_latency,
    latency_path,
    makespan,
    read_latency,
    write_latency,
)
from instgenie.cost.network import BlockShape, Demand, NetworkShape
from instgenie.errors import CalibrationError

BLOCK = BlockShape(per_token=900, per_text=700, per_rest=100, per_pair=40, per_branch=30, width=10)
NETWORK = NetworkShape(
    blocks=(BLOCK, replace(BLOCK, side=2, width=20), replace(BLOCK, side=2, width=20, output_width=8)),
    run_lengths=(1, 2),
    per_token=5000,
    per_branch=100,
)
LATENCY = Latency("a device", "a/model", block=0.01, flop=1e-7, flop_outside=3e-8, load=1e-3, byte=1e-6)


def demand(num_masked: int, **fields: Any) -> Demand:
    num_coarse = -(-num_masked // 3)
    return Demand(num_tokens=64, num_masked={1: num_masked, 2: num_coarse}, num_text=5, kind="kv", **fields)


def make_samples() -> list[StepSample]:
    plans = itertools.product((False, True), repeat=3)
    batches = [(demand(8),), (demand(30),), (demand(8), demand(20, num_branches=2))]
    here = frozenset(range(3))
    return [
        StepSample(batch, plan, LATENCY.predict_step(NETWORK, [replace(one, in_gpu=here) for one in batch], plan))
        for plan in plans
        for batch in batches
    ]


def test_a_fit_finds_the_coefficients_that_made_the_times() -> None:
    loads = [LoadSample(size, 1e-3 + 1e-6 * size) for size in (100, 1000, 50_000)]
    fitted = fit_latency("a device", "a/model", NETWORK, make_samples(), loads)
    assert fitted.r2_compute == pytest.approx(1)
    assert fitted.r2_load == pytest.approx(1)
    for name in ("block", "flop", "flop_outside", "load", "byte"):
        assert getattr(fitted, name) == pytest.approx(getattr(LATENCY, name), rel=1e-6), name


def test_a_fit_is_never_negative() -> None:
    slopes, r2 = fit([[1, 1, 1], [1, 2, 3]], [0.5, 2.0, 3.5])  # a line that starts below zero
    assert slopes[0] == 0
    assert slopes[1] > 0
    assert 0 < r2 < 1


def test_a_column_of_zeros_gets_the_coefficient_zero() -> None:
    slopes, r2 = fit([[1, 1, 1], [1, 2, 3], [0, 0, 0]], [3.0, 5.0, 7.0])
    assert slopes == pytest.approx([1, 2, 0])
    assert r2 == pytest.approx(1)


def test_two_streams() -> None:
    costs = [BlockCost(0.1, 1.0, 0.5), BlockCost(0.2, 2.0, 0.7), BlockCost(0.3, 3.0, 0.1)]
    assert makespan([False] * 3, costs) == pytest.approx(6)
    assert makespan([True] * 3, costs) == pytest.approx(0.5 + 0.7 + 0.2 + 0.3)  # the third load is hidden
    assert makespan([False, True, True], costs) == pytest.approx(1.0 + 0.2 + 0.3)  # all loads are
    assert makespan([True] * 3, costs, lead=0.5) == pytest.approx(0.7 + 0.2 + 0.3)
    assert makespan([True] * 3, costs, lead=9) == pytest.approx(0.6)


def test_costs_of_a_batch_are_sums() -> None:
    alone = [LATENCY.block_costs(NETWORK, [one]) for one in (demand(8), demand(20))]
    for first, second, both in zip(*alone, LATENCY.block_costs(NETWORK, [demand(8), demand(20)]), strict=True):
        assert both.load == pytest.approx(first.load + second.load)
        assert both.dense == pytest.approx(first.dense + second.dense - LATENCY.block)
        assert both.cached == pytest.approx(first.cached + second.cached - LATENCY.block)
        assert both.cached < both.dense


def test_dense_jobs_in_a_pass_of_their_own_pay_for_two_passes() -> None:
    latency = Latency("d", "m", block=1.0, flop=0.0, flop_outside=0.0, load=0.0, byte=0.0)
    cached, dense = demand(10), replace(demand(10), kind=None)
    for network, num_passes in ((NETWORK, 1), (replace(NETWORK, dense_apart=True), 2)):
        assert latency.predict_step(network, [cached, dense], (True,) * 3) == num_passes * len(NETWORK.blocks)
        assert latency.predict_step(network, [cached, cached], (True,) * 3) == len(NETWORK.blocks)


def test_blocks_in_gpu_memory_need_no_load() -> None:
    costs = LATENCY.block_costs(NETWORK, [demand(8, in_gpu=frozenset({1}))])
    assert [cost.load > 0 for cost in costs] == [True, False, True]


def test_outside_of_the_blocks_nothing_is_cached() -> None:
    few, many = (LATENCY.outside(NETWORK, [demand(num_masked)]) for num_masked in (1, 60))
    assert few == many > 0
    dense = LATENCY.predict_step(NETWORK, [demand(8)], [False] * 3)
    assert dense == pytest.approx(few + sum(cost.dense for cost in LATENCY.block_costs(NETWORK, [demand(8)])))


def test_a_written_latency_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = latency_path(LATENCY.device, LATENCY.model)
    assert path.is_relative_to(tmp_path)
    assert find_latency(LATENCY.device, LATENCY.model, "cuda") == replace(
        DEFAULTS["cuda"], device=LATENCY.device, model=LATENCY.model
    )
    write_latency(LATENCY, path)
    assert read_latency(path) == find_latency(LATENCY.device, LATENCY.model, "cuda") == LATENCY
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_devices_and_models_have_files_of_their_own() -> None:
    names = itertools.product(("cpu A", "cpu B"), ("builtin", "dummy:flux.1-dev", "../etc/flux"))
    paths = [latency_path(*pair) for pair in names]
    assert len(set(paths)) == 6
    assert len({path.parent for path in paths}) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[1, 2]", "not a latency file of version 1"),
        ('{"version": 9}', "not a latency file of version 1"),
        ('{"version": 1, "flop": 1}', "block, byte, device"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "latency.json"
    path.write_text(text)
    with pytest.raises(CalibrationError, match=message):
        read_latency(path)


@pytest.mark.parametrize(
    "bad", [{"flop": -1}, {"block": "fast"}, {"byte": True}, {"load": float("nan")}, {"device": 3}]
)
def test_fields_are_checked(tmp_path: Path, bad: dict[str, object]) -> None:
    path = tmp_path / "latency.json"
    write_latency(LATENCY, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | bad))
    with pytest.raises(CalibrationError, match=f"has {next(iter(bad))}="):
        read_latency(path)


def test_a_missing_or_unwritable_file_is_a_calibration_error(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"missing\.json"):
        read_latency(tmp_path / "missing.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibrationError, match="cannot be written"):
        write_latency(LATENCY, tmp_path / "file" / "latency.json")
