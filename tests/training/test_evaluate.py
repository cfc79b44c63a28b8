"""The figures of a model end to end on tiny pipelines and made-up photographs, and the parts whose mistakes would go
unnoticed: what is pasted and masked, bars, kept figures, the generated part of the model card."""

import csv
import json
import tarfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.fill_pipelines import save_pipeline
from helpers.photos import add_file, encode, write_photos
from PIL import Image
from torch import Tensor, nn

from instgenie.bench.metrics import Probe
from instgenie.bench.photos import is_validation, load_photos
from training import evaluate
from training.measure import guidance
from training.measure.bars import GROUPS, ROWS, Bar, Row
from training.measure.bench import Bench, Candidate, as_pictures, stacked
from training.measure.edits import contradict
from training.measure.masks import box_masks, ellipse_masks, scribble_masks
from training.measure.painting import paint_one
from training.measure.pasting import CutOuts, load_removals, paste
from training.measure.photographs import MaskedPhotos
from training.measure.report import END, NEW, OLD, START, FigureReport, Measured, markdown, write_page
from training.scenes import load_scenes

ROOT = Path(__file__).parent.parent.parent
AUTOENCODER = next(row for row in ROWS if row.group == "autoencoder")


class SmallFeatures(nn.Module):
    """Colours of a coarse grid: enough to tell pictures apart, without the packages of the real networks."""

    def forward(self, pictures: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(pictures, 4).flatten(1)


class SmallDistance(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (a - b).abs().mean((1, 2, 3))


def write_scenes(folder: Path, num: int) -> None:
    generator = np.random.default_rng(1)
    folder.mkdir()
    names = [f"photo {number}" for number in range(40 * num)]
    chosen = [name for name in names if is_validation(name)][:num] + names[:num]
    with tarfile.open(folder / "scenes-00.tar", "w") as tar:
        for name in chosen:
            small = Image.fromarray(generator.integers(0, 256, (5, 5, 3), dtype=np.uint8))
            add_file(tar, f"{name} a.webp", encode(np.array(small.resize((256, 256))), "WEBP"))
    with open(folder / "scenes.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("id", "photo"), *((f"{name} a", name) for name in chosen)])


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    write_photos(folder, num_val=4, num_train=6)
    write_scenes(folder / "scenes", 3)
    return folder


def run(photos: Path, out: Path, new: Path, *options: str) -> FigureReport:
    bench = Bench("cpu", 1, 3.5, 0, SmallFeatures(), SmallDistance())
    return evaluate.main(
        ["--photos", str(photos), "--pipeline", str(new), "--out", str(out), "--quick", *options], bench
    )


def test_rules_of_guidance_are_compared_by_one_command(photos: Path, tmp_path: Path) -> None:
    bench = Bench("cpu", 2, 3.5, 0, SmallFeatures(), SmallDistance())
    options = ["--photos", str(photos), "--pipeline", str(save_pipeline(tmp_path / "new", 3, 20)), "--rules"]
    figures = guidance.main([*options, "all", "below-.8"], bench)
    assert list(figures) == ["all", "below-.8"]
    assert all(set(guidance.COLUMNS) <= set(values) for values in figures.values())
    assert figures["all"]["saturation"] != figures["below-.8"]["saturation"]


def test_every_figure_of_two_models_by_one_command(photos: Path, tmp_path: Path) -> None:
    card, out = tmp_path / "card.md", tmp_path / "out"
    card.write_text(f"# Model\n{START}\nold\n{END}\nkept\n")
    new, old = save_pipeline(tmp_path / "new", 3, 20), save_pipeline(tmp_path / "old", 2, 12)
    report = run(photos, out, new, "--against", str(old), "--card", str(card), "--num-scenes", "2")
    for name in (NEW, OLD):
        assert {(row.group, row.name) for row in ROWS} <= {
            (group, figure) for group, values in report.models[name].figures.items() for figure in values
        }
    assert report.value(NEW, AUTOENCODER) != report.value(OLD, AUTOENCODER)
    table = (out / "figures.md").read_text()
    assert "| LPIPS, tight |" in table
    assert "miss" in table
    assert card.read_text() == f"# Model\n{START}\n{table}{END}\nkept\n"
    for name, columns in (("removal.jpg", 4), ("blind.jpg", 3), ("samples.png", 2)):
        with Image.open(out / name) as image:
            assert image.width > 100 * columns

    before = json.loads((out / "figures.json").read_text())
    again = run(photos, out, new, "--num-scenes", "2", "--parts", "autoencoder")
    assert set(again.models[NEW].figures) == set(GROUPS)  # the same model: its other figures stay
    assert json.loads((out / "figures.json").read_text())["models"] == before["models"]  # and both are deterministic


@pytest.mark.parametrize(("option", "missing"), [("--against", "model_index.json"), ("--scenes", "scenes.csv")])
def test_what_is_missing_is_said_first(
    photos: Path, tmp_path: Path, option: str, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        evaluate.main(["--photos", str(photos), "--out", str(tmp_path / "out"), option, str(tmp_path)])
    assert f"holds no {missing}" in capsys.readouterr().err


def test_a_contradicting_prompt_is_another_label_of_the_same_species(photos: Path) -> None:
    bench = Bench("cpu", 1, 3.5, 0, SmallFeatures(), SmallDistance())
    val = load_photos(photos, "val")
    val.labels = ["Siamese", "rose", "Bengal", "tulip"]
    masks = torch.ones(4, 256, 256, dtype=torch.bool)
    probe = Probe().fit(bench.embed(val.pictures), val.labels)
    pool = {"cat": ["Bengal", "Siamese"], "flower": ["rose", "tulip"]}
    asked: list[str] = []

    def edit(candidate: Candidate, pictures: Tensor, masks: Tensor, prompts: list[str], salt: int) -> Tensor:
        asked.extend(prompts)
        return pictures  # nothing changes, so that the original is seen

    bench.edit = edit  # type: ignore[method-assign]
    captions = {name: f"a {name}" for names in pool.values() for name in names}
    holdout = SimpleNamespace(captions=captions)
    figures = contradict(bench, None, holdout, MaskedPhotos(val, masks, probe), pool, 0)  # type: ignore[arg-type]
    assert asked == ["a Bengal", "a tulip", "a Siamese", "a rose"]
    assert figures == (0.0, 1.0)


def test_figures_of_another_model_are_not_kept() -> None:
    now = FigureReport({NEW: Measured("b", {"edits": {"KID": 1.0}})})
    now.keep_from(FigureReport({NEW: Measured("a", {"prompts": {"x": 1.0}})}))
    assert set(now.models[NEW].figures) == {"edits"}


def test_things_are_pasted_inside_their_masks(photos: Path) -> None:
    removals = load_removals(load_photos(photos, "val"), photos / "scenes", "val", None)
    assert len(removals) == 3
    changed = (removals.pasted != removals.scenes).any(1)
    assert changed.flatten(1).any(1).all()
    for masks in removals.masks.values():
        assert not (changed & ~masks).any()
        assert masks.float().mean((1, 2)).max() < 0.6
    assert removals.masks["tight"].sum() < removals.masks["grown"].sum()
    assert removals.masks["tight"].sum() < removals.masks["loose"].sum()
    again = load_removals(load_photos(photos, "val"), photos / "scenes", "val", 2)
    assert torch.equal(again.pasted, removals.pasted[:2])


def test_animals_and_garments_take_turns() -> None:
    things = [Image.new("RGBA", (40, 60), (200, 30, value, 255)) for value in (0, 90, 180)]
    removals = paste(torch.zeros(4, 3, 256, 256, dtype=torch.uint8), CutOuts(things, ["cat", "clothing", "dog"]))
    assert [name == "clothing" for name in removals.species] == [False, True, False, True]


def test_scenes_keep_photographs_apart(photos: Path) -> None:
    assert len(load_scenes(photos / "scenes", "val")) == 3
    assert torch.equal(load_scenes(photos / "scenes", "val", 2), load_scenes(photos / "scenes", "val")[:2])


def test_masks_have_the_area_they_promise() -> None:
    for make in (box_masks, ellipse_masks):
        shares = make(64, torch.Generator().manual_seed(0)).float().mean((1, 2))
        assert 0.2 < shares.min() < shares.max() < 0.65
    scribbles = scribble_masks(16, torch.Generator().manual_seed(0))
    assert scribbles.flatten(1).any(1).all()
    assert torch.equal(scribbles, scribble_masks(16, torch.Generator().manual_seed(0)))


def test_bars() -> None:
    assert Bar(low=0.8).judge(0.8, None, {}) == "pass"
    assert Bar(low=0.9, high=1.1).judge(1.2, None, {}) == "miss"
    assert Bar(of_old=0.5).judge(0.1, 0.3, {}) == "pass"
    assert Bar(of_old=0.5).judge(0.1, 0.1, {}) == "miss"
    assert Bar(of_old=0.5).judge(0.1, None, {}) == ""
    assert Bar(of_real="x").judge(0.1, None, {"x": 0.05}) == "miss"
    assert Row("edits", "KID", Bar(of_old=0.5), 2).bar_text(0.4, {}) == "≤ half of old: 0.20"


def test_the_card_shows_the_figures_of_its_file(tmp_path: Path) -> None:
    card = (ROOT / "MODEL_CARD.md").read_text()
    assert START in card
    figures = ROOT / "docs" / "figures.json"
    if "models" not in json.loads(figures.read_text()):
        pytest.skip("the model's figures are older than the tables")
    page = tmp_path / "card.md"
    page.write_text(card)
    write_page(FigureReport.load(figures), page)
    assert page.read_text() == card


def test_an_empty_report_is_an_empty_page() -> None:
    assert markdown(FigureReport()) == ""


def test_processes_make_what_threads_make(photos: Path) -> None:
    pictures, masks = load_photos(photos, "val").pictures, torch.zeros(4, 256, 256, dtype=torch.bool)
    masks[:, 80:160, 80:160] = True
    made = []
    for workers in (ThreadPoolExecutor(1), ProcessPoolExecutor(1, get_context("spawn"))):
        with workers:
            bench = Bench("cpu", 1, 3.5, 0, SmallFeatures(), SmallDistance(), workers)
            painted = bench.work(paint_one, as_pictures(pictures), as_pictures(pictures.flip(3)), masks.numpy())
            made.append([bench.surroundings(pictures, masks), stacked(painted)])
    for by_threads, by_processes in zip(*made, strict=True):
        assert torch.equal(by_threads, by_processes)
        assert not torch.equal(by_threads, pictures)
