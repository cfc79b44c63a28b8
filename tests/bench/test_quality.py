"""The quality study end to end on photographs that the test makes, and its parts on figures that are known."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.photos import write_photos
from PIL import Image

from instgenie.bench import quality, report
from instgenie.bench.charts import GRID, PLOTS
from instgenie.bench.figures import Figures, Method, Picture, bars
from instgenie.bench.judge import Judge, box_of, has_networks
from instgenie.bench.markdown import put_between
from instgenie.bench.photos import load_photos
from instgenie.bench.quality import RATIOS, QualityStudy, Sample, draw_cells, make_samples, masked_samples, studied
from instgenie.bench.schedules import table_rows, write_schedules
from instgenie.bench.variants import DENSE, NAIVE, SKIPPING, SMALL_CROP, Outcome, of_quality
from instgenie.cli import EXIT_BAD_INPUT, main
from instgenie.errors import InstGenieError
from instgenie.models.flux.model import FluxModel
from instgenie.models.loading.folder import BUILTIN_DEFAULTS
from instgenie.models.model import Model
from instgenie.telemetry.progress import Progress


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    write_photos(folder, num_val=6, num_train=6)
    return folder


@pytest.fixture
def flux(models: dict[str, Model]) -> FluxModel:
    model = models["builtin"]
    assert isinstance(model, FluxModel)
    return model


def write_example(folder: Path) -> None:
    pixels = np.full((256, 256, 4), 120, dtype=np.uint8)
    Image.fromarray(pixels[..., :3]).save(folder / "grey.png")
    pixels[100:150, 90:160, 3] = 0
    Image.fromarray(pixels).save(folder / "grey.mask.png")
    (folder / "edits.toml").write_text(
        '[[edit]]\nname = "grey"\npicture = "grey.png"\nmask = "grey.mask.png"\nprompts = ["a cat"]\nseed = 1\n'
    )


def test_the_study_end_to_end(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_example(tmp_path)
    monkeypatch.setitem(BUILTIN_DEFAULTS, "own_size", 96)  # a seventh of the tokens
    monkeypatch.setattr(quality, "EXAMPLES", tmp_path)
    monkeypatch.setattr(quality, "studied", lambda steps: studied(steps)[:3])
    out, path = tmp_path / "out", tmp_path / "figures.json"
    out.mkdir()
    (out / "quality.md").write_text(f"# Ours\n{report.START}\nold\n{report.END}\nkept\n")
    options = ["--num", "2", "--steps", "2", "--device", "cpu", "--no-networks"]
    assert main(["bench", "quality", "--photos", str(photos), *options, "--json", str(path), "--out", str(out)]) == 0
    figures = json.loads(path.read_text())
    assert {DENSE, NAIVE, SKIPPING, SMALL_CROP} < set(figures["methods"])
    assert set(figures["qualities"].values()) <= set(figures["methods"])
    dense, naive = (figures["methods"][name]["scores"] for name in (DENSE, NAIVE))
    assert dense["ssim"] == [1.0, 1.0]
    assert dense["cost"] == [1.0, 1.0]
    assert max(naive["ssim_box"]) < 1
    assert max(naive["cost"]) < 1
    assert {picture["mask_kind"] for picture in figures["pictures"]} == {"outline", "box"}
    page = (out / "quality.md").read_text()
    assert page.startswith("# Ours")
    assert page.endswith("kept\n")
    assert "old" not in page
    for name in (*PLOTS, GRID):
        assert (out / name).stat().st_size > 1000
        assert name in page


@pytest.mark.parametrize("wrong", [["--json", "no/such/folder.json"], ["--out", "no/such"]])
def test_what_cannot_be_done_is_said_first(photos: Path, wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "quality", "--photos", str(photos), "--device", "cpu", *wrong]) == EXIT_BAD_INPUT
    assert "no folder" in capsys.readouterr().err


def test_other_families_are_refused(photos: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--photos", str(photos), "--device", "cpu", "--model", str(folders["sd"])]
    assert main(["bench", "quality", *options]) == EXIT_BAD_INPUT
    assert "needs a Flux model" in capsys.readouterr().err


def test_every_photograph_once_and_outlines_for_pets(photos: Path) -> None:
    val = load_photos(photos, "val")
    cells = draw_cells(val, 100)
    assert sorted(row for row, _, _ in cells) == list(range(len(val)))
    assert all(val.species[row] == "cat" for row, kind, _ in cells if kind == "outline")
    assert {ratio for _, _, ratio in cells} == set(RATIOS)


def test_the_qualities_are_among_what_is_studied() -> None:
    for steps in (2, 28, 50):
        ways = studied(steps)
        assert len(ways) == len({way.name for way in ways})
        assert {of_quality(quality, steps) for quality in ("fast", "balanced")} <= set(ways)


def halved(sample: Sample) -> Sample:
    """Every second pixel of both sides: networks take a quarter of the time."""
    edit = sample.edit
    return replace(sample, edit=replace(edit, picture=edit.picture[::2, ::2], mask=edit.mask[::2, ::2]))


def test_networks_judge_sets(photos: Path, flux: FluxModel) -> None:
    if not has_networks():
        pytest.skip("the packages of the bench extra are not installed")
    samples = [halved(sample) for sample in make_samples(load_photos(photos, "val"), 2, flux, 2, 0)]
    study = QualityStudy(flux, Judge.load(torch.device("cpu")), 2, samples)
    real = Outcome(DENSE, [sample.edit.picture for sample in samples], [1.0] * 2, 1.0)
    grey = Outcome(NAIVE, [np.full_like(picture, 90) for picture in real.pictures], [0.5] * 2, 1.0)
    for outcome in (real, grey):
        study.keep(outcome, real, samples)
    study.pictures = samples
    with Progress() as progress:
        study.judge_sets(load_photos(photos, "train"), progress)
    assert study.sets[NAIVE]["kid"] > study.sets[DENSE]["kid"]
    assert study.scores[DENSE]["lpips_box"] == pytest.approx([0.0] * 2, abs=1e-5)
    assert min(study.scores[NAIVE]["lpips"]) > 0
    assert len(study.scores[NAIVE]["right"]) == 2


def test_thin_masks_have_a_box_that_ssim_can_read() -> None:
    mask = torch.zeros(64, 64, dtype=torch.bool)
    mask[0, 10:40] = True
    top, left, bottom, right = box_of(mask)
    assert min(bottom - top, right - left) >= 11


def made_figures(ssim_box: float, jumps: list[float]) -> Figures:
    def method(scale: float, jumps: list[float]) -> Method:
        count = len(jumps)
        scores = {
            "ssim": [1 - scale / 10] * count,
            "ssim_box": [1 - scale] * count,
            "cost": [1.0] * count,
            "jump": jumps,
        }
        return Method(scores, dict.fromkeys(RATIOS, 1.0), {})

    pictures = [Picture("box", 0.2, 0.2) for _ in jumps]
    methods = {DENSE: method(0.0, [10.0] * len(jumps)), "kv": method(1 - ssim_box, jumps)}
    return Figures({}, pictures, methods, {"fast": "kv", "balanced": "kv", "exact": DENSE}, {})


def test_bars_are_met_and_missed() -> None:
    assert all(met for *_, met in bars(made_figures(0.96, [10.0] * 20)))
    one_seam = [10.0] * 19 + [15.0]
    assert [met for *_, met in bars(made_figures(0.94, one_seam))] == [False, True, True]
    two_seams = [10.0] * 18 + [15.0] * 2
    assert [met for *_, met in bars(made_figures(0.96, two_seams))] == [True, True, False]


def test_a_page_without_marks_gets_them_at_its_end() -> None:
    marks = report.START, report.END
    page = put_between("# Title\n", "new\n", *marks)
    assert page.startswith("# Title\n")
    assert put_between(page, "newer\n", *marks).count("newer") == 1
    assert "new\n" not in put_between(page, "other\n", *marks)


def test_products_of_low_precision_are_compared_with_whole_ones(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On any device: one that cannot multiply in fp8 computes the same numbers."""
    monkeypatch.setitem(BUILTIN_DEFAULTS, "own_size", 96)  # a seventh of the tokens
    monkeypatch.setattr(QualityStudy, "ways", property(lambda study: [study.balanced]))
    path = tmp_path / "figures.json"
    options = ["--num", "1", "--steps", "2", "--device", "cpu", "--no-networks", "--quantization", "fp8"]
    assert main(["bench", "quality", "--photos", str(photos), *options, "--json", str(path)]) == 0
    methods = json.loads(path.read_text())["methods"]
    balanced = of_quality("balanced", 2).name
    assert list(methods) == [DENSE, balanced, f"{DENSE}, fp8 products", f"{balanced}, fp8 products"]
    [exact], [low] = (methods[name]["scores"]["ssim"] for name in (DENSE, f"{DENSE}, fp8 products"))
    assert exact == 1
    assert 0.9 < low < 1
    assert "fp8 products" in capsys.readouterr().out


def test_masked_photographs_of_a_folder_are_edited_beside(tmp_path: Path, flux: FluxModel) -> None:
    with pytest.raises(InstGenieError, match="holds no NAME_mask"):
        masked_samples(tmp_path, 256, flux, 2, seed=0)
    Image.new("RGB", (512, 384), "red").save(tmp_path / "beach.png")
    mask = Image.new("L", (512, 384))
    mask.paste(255, (0, 0, 256, 80))
    mask.save(tmp_path / "beach_mask.png")
    (sample,) = masked_samples(tmp_path, 256, flux, 2, seed=0)
    side = 256
    assert sample.edit.picture.shape == (side, side, 3)
    assert sample.edit.mask[: side // 6, : side // 2].all()
    assert not sample.edit.mask[side // 4 :].any()
    assert sample.ratio == min(RATIOS, key=lambda ratio: abs(ratio - 0.1))
    assert sample.edit.prompt == "background"


def test_one_table_compares_schedules_strides_bits_and_padding(tmp_path: Path) -> None:
    figures = made_figures(0.96, [10.0] * 4)
    names = ["own, 0 4", "own, 0 4, padding read", "kv, int4, every 4 steps", "kv, int4, every 4 steps, padding read"]
    kept = figures.methods["kv"]
    for name in names:
        figures.methods[name] = replace(
            kept, scores=kept.scores | {"bytes": [2e6] * 4} if "int4" in name else kept.scores
        )
    worse = {"ssim_box": [0.95] * 4}
    figures.methods[names[1]] = replace(kept, scores=kept.scores | worse)
    figures.run.update(pictures=4, steps=28)
    rows = {row[0]: row for row in table_rows(figures)}
    assert [rows[name][-1] for name in names] == ["yes", "no", "yes", "yes"]
    assert [rows[name][2] for name in names] == ["", "", "2.0", "2.0"]
    write_schedules(figures, [], tmp_path, "reuse")
    drawn = (tmp_path / "reuse.svg").read_text()
    assert all(about in drawn for about in ("registered template", "own, padding read", "template, padding read"))
    assert "padding read" in (tmp_path / "reuse.md").read_text()
