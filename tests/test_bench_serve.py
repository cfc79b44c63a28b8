"""The load is what it says, and a real server's figures come out."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from serving import ALICE, Running

from instgenie.bench.load import QUANTILES, draw_load, make_mask, make_picture, read_ratios
from instgenie.bench.serve import Answer, make_row
from instgenie.cli import main
from instgenie.errors import ServeError
from instgenie.mask import read_mask
from instgenie.picture import open_picture


def test_the_same_seed_draws_the_same_load() -> None:
    ratios = QUANTILES["production"]
    assert draw_load(50, 2.0, 3, ratios, 7) == draw_load(50, 2.0, 3, ratios, 7)
    assert draw_load(50, 2.0, 3, ratios, 7) != draw_load(50, 2.0, 3, ratios, 8)


def test_arrivals_come_at_the_rate_asked_for() -> None:
    load = draw_load(4000, 5.0, 3, QUANTILES["production"], 0)
    assert load[0].at == 0
    assert load[-1].at == pytest.approx(800, rel=0.1)
    assert {arrival.picture for arrival in load} == {0, 1, 2}
    assert {arrival.at for arrival in draw_load(5, math.inf, 1, [0.5], 0)} == {0.0}


@pytest.mark.parametrize(("name", "mean"), [("production", 0.112), ("inpaint", 0.354), ("retouch", 0.029)])
def test_mask_ratios_have_the_measured_mean(name: str, mean: float) -> None:
    load = draw_load(20_000, 1.0, 1, QUANTILES[name], 0)
    assert np.mean([arrival.mask_ratio for arrival in load]) == pytest.approx(mean, rel=0.25)


@pytest.mark.parametrize("content", ["0.1\n0.5\n0.2\n", "[0.5, 0.1, 0.2]"])
def test_ratios_from_a_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "ratios").write_text(content)
    assert read_ratios(str(tmp_path / "ratios")) == (0.1, 0.2, 0.5)


@pytest.mark.parametrize("content", ["", "2", "x", "-0.1"])
def test_bad_ratios(content: str, tmp_path: Path) -> None:
    (tmp_path / "ratios").write_text(content)
    for source in (str(tmp_path / "ratios"), "none"):
        with pytest.raises(ServeError):
            read_ratios(source)


@pytest.mark.parametrize("ratio", [0.01, 0.11, 0.5, 1.0])
def test_masks_mask_what_they_should(ratio: float) -> None:
    size = (96, 128)
    assert read_mask(make_mask(ratio, 3, size), size).mean() == pytest.approx(ratio, rel=0.15)


def test_pictures_differ() -> None:
    one, other = (open_picture(make_picture(seed, (32, 48))) for seed in (0, 1))
    assert one.shape == (32, 48, 3)
    assert not np.array_equal(one, other)
    assert Image.open(io.BytesIO(make_picture(0, (32, 48)))).format == "PNG"


def test_a_row_counts_what_came_in_time() -> None:
    answers = [Answer(latency, 0.1, "") for latency in (1.0, 2.0, 3.0, 4.0)] + [Answer(9.0, 0.6, "500 no")]
    row = make_row("x", answers, duration=2.0, alone=1.0, slo_scale=2.0)
    assert (row.num_finished, row.num_failed, row.throughput, row.mean_s) == (4, 1, 2.0, 2.5)
    assert (row.slo_attainment, row.mask_ratio) == (0.4, 0.2)
    assert row.p90_s <= row.p95_s <= row.p99_s <= 4.0


def test_a_load_on_a_real_server(server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "figures.json"
    arguments = ["--base-url", server.url, "--api-key", ALICE, "--num-prompts", "6", "--request-rate", "20"]
    arguments += ["--steps", "2", "--num-templates", "2", "--size", "48x32", "--json", str(target)]
    assert main(["bench", "serve", *arguments]) == 0
    [row] = json.loads(target.read_text())["rows"]
    assert (row["num_finished"], row["num_failed"]) == (6, 0)
    assert "SLO" in capsys.readouterr().out


def test_no_server_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9", "--num-prompts", "1"]) == 2
    assert "cannot be reached" in capsys.readouterr().err
