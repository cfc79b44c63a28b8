"""Workloads: the same from the same seed, right in distribution, saved and read again."""

import io
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from instgenie.bench.arrivals import read_times, replayed
from instgenie.bench.pictures import MaskShape, draw_mask, make_mask, make_picture
from instgenie.bench.ratios import QUANTILES, read_ratios
from instgenie.bench.workload import SHAPES, WorkloadRecipe, draw_workload, popularity, read_workload, save_workload
from instgenie.errors import WorkloadError
from instgenie.pictures.mask import read_mask
from instgenie.pictures.picture import open_picture

MANY = WorkloadRecipe(num_edits=20_000, rate=5.0)


def test_the_same_recipe_is_the_same_workload() -> None:
    recipe = WorkloadRecipe(num_edits=50, rate=2.0, seed=7)
    assert draw_workload(recipe) == draw_workload(recipe)
    assert draw_workload(recipe) != draw_workload(replace(recipe, seed=8))


def test_changing_one_column_leaves_the_others() -> None:
    slow, fast = (draw_workload(WorkloadRecipe(num_edits=50, rate=rate)) for rate in (1.0, 4.0))
    assert [replace(arrival, at=0.0) for arrival in slow] == [replace(arrival, at=0.0) for arrival in fast]
    assert [arrival.at for arrival in slow] == pytest.approx([4 * arrival.at for arrival in fast])


def test_poisson_arrivals_come_at_the_rate_asked_for() -> None:
    times = np.array([arrival.at for arrival in draw_workload(MANY)])
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() == pytest.approx(0.2, rel=0.03)  # of an exponential distribution, as large as the mean
    assert {arrival.at for arrival in draw_workload(WorkloadRecipe(num_edits=5))} == {0.0}


@pytest.mark.parametrize(
    ("name", "mean", "median"), [("production", 0.112, 0.095), ("inpaint", 0.354, 0.221), ("retouch", 0.029, 0.023)]
)
def test_mask_ratios_are_distributed_as_measured(name: str, mean: float, median: float) -> None:
    ratios = [arrival.mask_ratio for arrival in draw_workload(replace(MANY, mask_ratios=name))]
    assert np.mean(ratios) == pytest.approx(mean, rel=0.03)
    assert np.median(ratios) == pytest.approx(median, rel=0.03)
    assert np.quantile(ratios, 0.95) == pytest.approx(QUANTILES[name][-6], rel=0.03)


def test_few_templates_get_most_edits() -> None:
    counts = Counter(arrival.template for arrival in draw_workload(MANY))
    shares = popularity(970, 1.0)
    assert max(counts) < 970
    assert counts.most_common(1)[0][0] == 0
    assert counts[0] / 20_000 == pytest.approx(shares[0], rel=0.1)
    assert sum(num for _, num in counts.most_common(97)) / 20_000 > 0.6
    assert popularity(4, 0.0).tolist() == [0.25] * 4


def test_shapes_sizes_and_steps_get_equal_shares() -> None:
    recipe = replace(MANY, sizes=((256, 256), (512, 384)), steps=(4, 28, None))
    workload = draw_workload(recipe)
    for column, num in (("mask_shape", 3), ("size", 2), ("steps", 3)):
        counts = Counter(getattr(arrival, column) for arrival in workload)
        assert len(counts) == num
        assert all(count == pytest.approx(20_000 / num, rel=0.1) for count in counts.values())


@pytest.mark.parametrize(
    "content",
    [
        "[4.0, 1.0, 2.0]",
        "1\n2\n4\n",
        "1000.0,17\n4000.0,3\n2000.0,9\n",  # in no order, as such files are
        "gmt_create,kind\n2024-11-15 16:57:50,A\n2024-11-15 16:57:53,B\n2024-11-15 16:57:51,A\n",
    ],
)
def test_arrival_times_from_a_file(content: str, tmp_path: Path) -> None:
    path = tmp_path / "arrivals"
    path.write_text(content)
    assert read_times(str(path)).tolist() == [0.0, 1.0, 3.0]
    assert replayed(str(path), 2, math.inf).tolist() == [0.0, 1.0]
    assert replayed(str(path), 3, 0.5).tolist() == pytest.approx([0.0, 4 / 3, 4.0])
    arrivals = [arrival.at for arrival in draw_workload(WorkloadRecipe(num_edits=3, arrivals=str(path)))]
    assert arrivals == [0.0, 1.0, 3.0]


@pytest.mark.parametrize("content", ["", "x", "a,b\n", "[1, {}]", "gmt_create\nyesterday\n", "nan"])
def test_bad_arrival_times(content: str, tmp_path: Path) -> None:
    (tmp_path / "arrivals").write_text(content)
    with pytest.raises(WorkloadError):
        read_times(str(tmp_path / "arrivals"))
    with pytest.raises(WorkloadError, match="not a file of arrival times"):
        read_times(str(tmp_path / "none"))


def test_too_few_arrival_times(tmp_path: Path) -> None:
    (tmp_path / "arrivals").write_text("1\n2\n")
    with pytest.raises(WorkloadError, match="has 2 arrivals: at least 3"):
        replayed(str(tmp_path / "arrivals"), 3, 1.0)


@pytest.mark.parametrize("content", ["0.1\n0.5\n0.2\n", "[0.5, 0.1, 0.2]", "npy"])
def test_ratios_from_a_file(content: str, tmp_path: Path) -> None:
    path = tmp_path / ("ratios.npy" if content == "npy" else "ratios.txt")
    if content == "npy":
        np.save(path, np.array([0.5, 0.1, 0.2]))
    else:
        path.write_text(content)
    assert read_ratios(str(path)) == (0.1, 0.2, 0.5)
    drawn = {arrival.mask_ratio for arrival in draw_workload(WorkloadRecipe(num_edits=50, mask_ratios=str(path)))}
    assert drawn == {0.1, 0.2, 0.5}


@pytest.mark.parametrize("content", ["", "2", "x", "-0.1", "[1", "[open('x')]"])
def test_bad_ratios(content: str, tmp_path: Path) -> None:
    (tmp_path / "ratios").write_text(content)
    for source in (str(tmp_path / "ratios"), "none"):
        with pytest.raises(WorkloadError):
            read_ratios(source)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.11, 0.5, 1.0])
def test_masks_mask_what_they_should(ratio: float, shape: MaskShape) -> None:
    size = (96, 128)
    mask = draw_mask(ratio, shape, 3, size)
    assert mask.sum() == max(round(ratio * mask.size), 1)
    assert (read_mask(make_mask(ratio, shape, 3, size), size) == mask).all()


def test_shapes_and_seeds_make_other_masks() -> None:
    masks = [draw_mask(0.2, shape, seed, (64, 64)).tobytes() for shape in SHAPES for seed in (0, 1)]
    assert len(set(masks)) == 6


def test_pictures_differ() -> None:
    one, other = (open_picture(make_picture(seed, (32, 48))) for seed in (0, 1))
    assert one.shape == (32, 48, 3)
    assert not np.array_equal(one, other)
    assert Image.open(io.BytesIO(make_picture(0, (32, 48)))).format == "PNG"


def test_a_saved_workload_is_the_workload(tmp_path: Path) -> None:
    workload = draw_workload(WorkloadRecipe(num_edits=20, rate=3.0, steps=(4, None), sizes=((64, 48), (32, 32))))
    save_workload(workload, tmp_path / "workload.jsonl")
    assert read_workload(tmp_path / "workload.jsonl") == workload


GOOD = {
    "at": 0.0,
    "template": 1,
    "mask_ratio": 0.1,
    "mask_shape": "box",
    "size": [64, 64],
    "steps": None,
    "seed": 3,
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"at": -1}, "line 1 has at=-1"),
        ({"mask_ratio": 1.5}, "mask_ratio=1.5: a number from 0 to 1"),
        ({"template": "x"}, "template='x'"),
        ({"mask_shape": "star"}, "'star'"),
        ({"steps": 0}, "0 steps"),
        ({"size": 3}, "is not an edit"),
        ({"more": 3}, "is not an edit: a JSON object with at, template"),
    ],
)
def test_bad_workloads(change: dict[str, object], says: str, tmp_path: Path) -> None:
    path = tmp_path / "workload.jsonl"
    path.write_text(json.dumps(GOOD | change) + "\n")
    with pytest.raises(WorkloadError, match=says):
        read_workload(path)
    path.write_text("")
    with pytest.raises(WorkloadError, match="has no edits"):
        read_workload(path)
