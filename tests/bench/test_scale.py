"""Benches of large clusters: what they print and write, and that the played front does real work."""

import json
from pathlib import Path

import pytest

from instgenie.bench.front import BATCH_SIZE, PlayedCluster, half_mask, measure_front
from instgenie.bench.scale import ScaleRow, ScaleStudy, bench_scale, chart
from instgenie.cluster.orders import Order
from instgenie.cluster.wish import Wish


def test_bench_scale_prints_draws_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = ScaleStudy(workers=(1, 2), min_edits=12, edits_per_worker=6)
    bench_scale(study, ["size"], tmp_path / "scale.json", tmp_path / "scale.svg")
    rows = [ScaleRow(**row) for row in json.loads((tmp_path / "scale.json").read_text())["rows"]]
    assert [(row.study, row.num_workers, row.num_fronts) for row in rows] == [("size", 1, 1), ("size", 2, 1)]
    assert all(0 < row.mean_s <= row.p95_s and 0 <= row.hits <= 1 for row in rows)
    assert "fullest" in capsys.readouterr().out
    svg = (tmp_path / "scale.svg").read_text()
    assert svg == chart(rows).svg()
    assert "1 front" in svg


def test_bench_scale_knows_the_bytes_of_strided_templates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """About FLUX.1-dev's, as docs/design/cache.md lists them; a worker's memory holds three whole ones or 35 small."""
    asked = {"workers": (1,), "min_edits": 4, "edits_per_worker": 4}
    sizes = []
    for kept in ({}, {"cache_dtype": "int4", "cache_stride": 7}):
        bench_scale(ScaleStudy(**asked | kept), ["size"], tmp_path / "scale.json")
        sizes.append(json.loads((tmp_path / "scale.json").read_text())["template_bytes"])
    assert [round(size / 1e9, 1) for size in sizes] == [40.2, 3.6]
    out = capsys.readouterr().out
    assert "3 in memory" in out
    assert "35 in memory" in out


def test_a_played_front_accepts_and_steps() -> None:
    cluster = PlayedCluster(3)
    order = Order("me", half_mask()[:, :, None].repeat(3, 2).astype("uint8"), half_mask(), Wish("a cat", seed=0))
    cluster.accept(*[order] * BATCH_SIZE)
    cluster.answer_all()
    [busy] = [index for index, batch in enumerate(cluster.batches) if batch]
    assert cluster.coordinator.edits.num_outside_batches == 0
    before = cluster.workers[busy].load.num_steps
    cluster.step(busy)
    assert cluster.workers[busy].load.num_steps == before - BATCH_SIZE
    times = measure_front(3, 4)
    assert [len(one) for one in (times.decision, times.accepting, times.step)] == [4, 4, 4]
