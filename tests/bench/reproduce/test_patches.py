"""PatchedServe's figures: what methods save is counted and compared rightly."""

from dataclasses import replace

import pytest

from instgenie.bench.reproduce.lab import SCALES, Lab
from instgenie.bench.reproduce.patches import CachedOutcome, begin, overheads, pass_flops, saved_at, tell_gain
from instgenie.cost.network import Demand, step_flops
from instgenie.engine.reuse_predictor import ReusePredictor
from instgenie.jobs.blocks import BLOCK_FEATURES
from instgenie.models.model import Model


def outcome(method: str, saved: float, lpips: float) -> CachedOutcome:
    return CachedOutcome(method, 0.5, saved, ssim=1.0, lpips=lpips, likeness=1.0, seconds=1.0)


def test_methods_are_compared_at_an_equal_distance() -> None:
    outcomes = [outcome("a", 0.2, 0.01), outcome("a", 0.4, 0.03), outcome("b", 0.1, 0.01), outcome("b", 0.2, 0.02)]
    assert saved_at(outcomes, "a", 0.02) == pytest.approx(0.3)
    assert saved_at(outcomes, "a", 0.005) == pytest.approx(0.1)
    assert saved_at(outcomes, "a", 0.04) is None
    assert "30.0%: 1.5" in tell_gain(outcomes, "a", "b")


def test_a_row_tells_how_much_each_way_computes(models: dict[str, Model]) -> None:
    lab = Lab("sd", replace(models["sd"], own_size=48), replace(SCALES["cpu"], repeats=1))
    shares = [row.cells[2] for row in overheads(lab)]
    assert shares[:3] == ["100%"] * 3
    assert shares[3] != "100%"


def test_operations_of_blocks_that_compute_everything_are_those_of_a_step(models: dict[str, Model]) -> None:
    lab = Lab("blend", replace(models["blend"], own_size=48), SCALES["cpu"])
    sure = ReusePredictor((0.0,) * len(BLOCK_FEATURES), -1.0, tolerance=0.05, max_steps=2, per_block=True, tile=1)
    engine, job = begin(lab, sure)
    num_tokens, network = len(job.masked), lab.network
    whole = Demand(num_tokens, {1: num_tokens}, len(job.branches[0].text), len(job.branches), "kv")
    found = []
    for _ in range(4):
        engine.step()
        found.append(pass_flops(network, job))
    assert found[:3] == [step_flops(network, [whole], [True] * len(network.blocks))] * 3
    assert found[3] < found[0] / 10  # embeddings remain
