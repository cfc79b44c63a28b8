"""`instgenie bench edit` and `bench pipeline`: what they print and write."""

import json
from pathlib import Path

import pytest

from instgenie.cli import main


@pytest.mark.parametrize("family", ["blend_guided", "fill", "sd", "sdxl", "sd_fill"])
def test_bench_edit_prints_and_writes_its_rows(
    family: str, desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", str(folders[family]), "--device", "cpu", "--size", "48x32", "--json", "bench.json"]
    assert main(["bench", "edit", *model, "--steps", "2", "--repeats", "2", "--batch", "1", "--batch", "3"]) == 0
    report = json.loads(Path("bench.json").read_text())
    assert [row["system"] for row in report["rows"]] == ["diffusers", "dense", "own", "cached"] * 4
    assert [row["kind"] for row in report["rows"]] == [None, None, "kv", "kv"] * 4
    assert [row["batch"] for row in report["rows"]] == ([1] * 4 + [3] * 4) * 2
    assert [row["mask_ratio"] for row in report["rows"]] == pytest.approx([1] * 8 + [0.2] * 8, abs=0.05)
    assert all(row["step_ms"] > 0 for row in report["rows"])
    assert {"device", "torch", "cuda", "diffusers", "kernels"} < set(report["machine"])
    assert "1.00x" in capsys.readouterr().out


def test_bench_edit_measures_what_it_is_asked_for(desk: Path, folders: dict[str, Path]) -> None:
    given = ["--model", str(folders["blend"]), "--device", "cpu", "--size", "48x32", "--json", "bench.json"]
    asked = ["--system", "cached", "--kind", "y", "--kind", "kv", "--mask-ratio", "0.3", "--no-kernels", "--no-graphs"]
    assert main(["bench", "edit", *given, *asked, "--steps", "1", "--repeats", "1"]) == 0
    report = json.loads(Path("bench.json").read_text())
    assert [(row["system"], row["kind"]) for row in report["rows"]] == [("cached", "y"), ("cached", "kv")]
    assert report["machine"]["kernels"] == "off"


def test_bench_edit_measures_tiers_policies_and_storage(desk: Path, folders: dict[str, Path]) -> None:
    given = ["--model", str(folders["sdxl"]), "--device", "cpu", "--size", "64x64", "--json", "bench.json"]
    asked = ["--tier", "gpu", "--tier", "host", "--policy", "naive", "--policy", "exact", "--cache-dtype", "fp8"]
    asked += ["--system", "cached", "--mask-ratio", "0.3", "--rows", "whole"]
    assert main(["bench", "edit", *given, *asked, "--steps", "2", "--repeats", "1"]) == 0
    rows = json.loads(Path("bench.json").read_text())["rows"]
    assert {(row["kind"], row["cache_dtype"]) for row in rows} == {("kv", "fp8")}
    assert [(row["tier"], row["policy"]) for row in rows] == [("gpu", "cached"), ("host", "naive"), ("host", "exact")]


@pytest.mark.parametrize("family", ["blend", "kontext", "klein", "qwen", "qwen_edit", "sd3", "sdxl", "zimage"])
def test_bench_edit_runs_a_batch_of_eight(family: str, desk: Path, folders: dict[str, Path]) -> None:
    """Over a template of some steps in main memory, as its memory is measured on a GPU."""
    given = ["--model", str(folders[family]), "--device", "cpu", "--size", "64x64", "--json", "bench.json"]
    asked = ["--system", "cached", "--tier", "host", "--cache-dtype", "int4", "--cache-stride", "2", "--batch", "8"]
    assert main(["bench", "edit", *given, *asked, "--mask-ratio", ".11", "--steps", "4", "--repeats", "1"]) == 0
    [row] = json.loads(Path("bench.json").read_text())["rows"]
    assert (row["system"], row["tier"], row["batch"]) == ("cached", "host", 8)


def test_bench_edit_with_convolutions_reused(desk: Path, folders: dict[str, Path]) -> None:
    given = ["--model", str(folders["sdxl"]), "--device", "cpu", "--size", "64x64", "--json", "bench.json"]
    asked = ["--system", "own", "--system", "cached", "--tier", "host", "--cache-dtype", "int4", "--mask-ratio", "0.1"]
    assert main(["bench", "edit", *given, *asked, "--convolutions", "reused", "--steps", "2", "--repeats", "1"]) == 0
    report = json.loads(Path("bench.json").read_text())
    assert [row["system"] for row in report["rows"]] == ["own", "cached"]
    assert report["convolutions"] == "reused"
    asked = ["--system", "dense", "--system", "cached", "--batch", "2", "--convolutions", "reused"]
    assert main(["bench", "engine", *given, *asked, "--steps", "2", "--repeats", "1"]) == 0
    assert json.loads(Path("bench.json").read_text())["study"]["convolutions"] == "reused"


def test_bench_mixed(desk: Path, folders: dict[str, Path]) -> None:
    given = ["--model", str(folders["sd"]), "--device", "cpu", "--json", "bench.json", "--batch", "3"]
    sizes = ["--size", "32x32", "--size", "48x32"]
    assert main(["bench", "mixed", *given, *sizes, "--steps", "2", "--repeats", "1", "--cache-dtype", "fp8"]) == 0
    rows = json.loads(Path("bench.json").read_text())["rows"]
    assert [(row["edits"], row["convolutions"], row["num_passes"]) for row in rows] == [
        ("dense", "dense", 2), ("dense", "tiled", 1), ("cached", "dense", 2), ("cached", "tiled", 1),
        ("cached", "reused", 1),
    ]  # fmt: skip
    assert rows[1]["apart"] < 1e-3
    assert all(row["step_ms"] > 0 for row in rows)


def test_bench_pipeline_draws_what_it_measures(
    desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", str(folders["sdxl"]), "--device", "cpu", "--size", "64x64", "--kind", "y", "--batch", "2"]
    files = ["--timeline", "out.html", "--trace", "out.json"]
    assert main(["bench", "pipeline", *given, *files, "--policy", "naive", "--policy", "cached"]) == 0
    page, trace = Path("out.html").read_text(), json.loads(Path("out.json").read_text())
    assert page.count("<svg") == 2
    assert "block 5, cached" in page
    assert "http" not in page.replace("http://www.w3.org", "")  # nothing from elsewhere
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {bar["pid"] for bar in bars} == {0, 1}
    for policy in (0, 1):
        loads = [bar for bar in bars if bar["pid"] == policy and bar["cat"] == "load"]
        assert len(loads) == 12  # eight blocks, and what left the four transformers
    out = capsys.readouterr().out
    assert "naive" in out
    assert "out.html" in out


def test_bench_pipeline_needs_a_folder_for_its_page(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "pipeline", "--timeline", "missing/out.html"]) == 2
    assert "no folder missing" in capsys.readouterr().err


@pytest.mark.parametrize("ratio", ["0", "1.5", "many"])
def test_mask_ratios_are_shares(ratio: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "edit", "--mask-ratio", ratio])
    assert f"'{ratio}' is not a number above 0 and up to 1" in capsys.readouterr().err


def test_bench_edit_needs_a_folder_for_its_file(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "edit", "--json", "missing/bench.json"]) == 2
    assert "no folder missing" in capsys.readouterr().err


@pytest.mark.parametrize("is_dense", [False, True])
def test_bench_profile_adds_up_the_kernels_of_a_step(
    is_dense: bool, desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", str(folders["blend"]), "--device", "cpu", "--size", "48x32", "--json", "profile.json"]
    asked = ["--dense", "--batch", "2"] if is_dense else ["--text-padding", "reused", "--cache-dtype", "fp8"]
    assert main(["bench", "profile", *given, *asked]) == 0
    report = json.loads(Path("profile.json").read_text())
    products = [kernel for kernel in report["kernels"] if kernel["group"] == "products"]
    assert sum(kernel["count"] for kernel in products) >= 20
    assert sum(kernel["ms"] for kernel in report["kernels"]) > 0
    shown = " ".join(capsys.readouterr().out.split())  # a title with a long path has several lines
    assert "no kernel runs, less those that overlap" in shown
    assert ("10 + 192 tokens" if is_dense else "2 + 11 tokens") in shown
