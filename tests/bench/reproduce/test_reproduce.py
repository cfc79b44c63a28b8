"""Every part of the report runs, on a tiny model, and the report has every anchor that is linked to."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from instgenie.bench.engine import EngineStudy, measure_engine
from instgenie.bench.reproduce import run as run_module
from instgenie.bench.reproduce.axes import at_values, decades, doubling, linear
from instgenie.bench.reproduce.lab import Lab, Scale
from instgenie.bench.reproduce.page import themed, write_page
from instgenie.bench.reproduce.run import BUDGETS, PARTS, PATCHED_PARTS, SWIFT_PARTS, as_json, print_section
from instgenie.bench.reproduce.section import Section, Table, row
from instgenie.bench.systems import FLUX_ONLY, NAMES, suiting
from instgenie.cli import main
from instgenie.cli.evaluate import PART_NAMES, PATCHED_NAMES, SWIFT_NAMES, SYSTEM_NAMES
from instgenie.models.loading.load import load
from instgenie.models.model import Model

SIDE = 48
SERVED = ("fig4", "fig12", "fig16", "simulator")  # parts that start clusters
ROOT = Path(__file__).parent.parent.parent.parent
TINY = Scale(
    steps=3,
    engine_steps=2,
    mask_ratios=(0.1, 1.0),
    batches=(1, 2),
    serve_steps=2,
    serve_edits=4,
    num_burst=4,
    load=0.7,
    num_templates=2,
    checked=(1,),
    calibration_seconds=0.0,
    edits_per_worker=1,
    min_edits=60,
    num_pictures=1,
    compiled=False,
    repeats=1,
    workers=(2, 70),
    loads=(0.5,),
)


@pytest.fixture(scope="module")
def labs(folders: dict[str, Path]) -> dict[str, Lab]:
    """One lab with a Flux and one with a UNet, whose workers run at a small size."""
    flux, unet = str(folders["fill"]), str(folders["sd"])
    return {
        "flux": Lab(flux, replace(load(flux, "cpu"), own_size=SIDE), TINY),
        "unet": Lab(unet, load(unet, "cpu"), TINY),
    }


@pytest.fixture(scope="module")
def sections() -> dict[str, Section]:
    """The sections that have run in this process, by name."""
    return {}


def section_of(name: str, labs: dict[str, Lab], sections: dict[str, Section]) -> Section:
    if name not in sections:
        sections[name] = PARTS[name](labs["unet" if name in SERVED else "flux"])
    return sections[name]


class Page(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.cells: dict[str, list[str]] = {}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.ids += [found["id"] or ""] if "id" in found else []
        self.links += [found["href"] or ""] if tag == "a" else []
        if tag == "tr":
            self.cells[self.ids[-1] if "id" in found else ""] = []

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[next(reversed(self.cells))].append(data.strip())


@pytest.mark.parametrize("name", PARTS)
def test_a_part_runs(
    name: str, labs: dict[str, Lab], sections: dict[str, Section], capsys: pytest.CaptureFixture[str]
) -> None:
    section = section_of(name, labs, sections)
    assert section.name == name
    assert section.tables
    assert section.findings
    assert len(set(section.anchors)) == len(section.anchors)
    for table in section.tables:
        assert table.rows
        assert all(len(line.cells) == len(table.columns) for line in table.rows)
    assert all("<svg" in chart.svg() for chart in section.charts)
    print_section(section)
    assert name in capsys.readouterr().out


def test_the_report_is_one_page_with_an_anchor_for_every_row(
    sections: dict[str, Section], labs: dict[str, Lab], tmp_path: Path
) -> None:
    machine = labs["flux"].machine
    measured = [(section_of(name, labs, sections), 1.0) for name in PARTS]
    write_page(measured, machine, tmp_path / "report" / "index.html")
    page = Page(tmp_path / "report" / "index.html")
    assert set(page.ids) == {anchor for section in sections.values() for anchor in section.anchors}
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    text = (tmp_path / "report" / "index.html").read_text()
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"<script|src=|url\(|https?://(?!www\.w3\.org)", text)
    found = json.loads(as_json(measured, machine))
    assert set(found["parts"]) == set(PARTS)
    assert found["parts"]["fig14"]["tables"][0]["rows"][0]["anchor"] in page.ids


def test_every_part_has_a_budget_and_all_of_them_fit() -> None:
    assert BUDGETS.keys() == PARTS.keys() | SWIFT_PARTS.keys() | PATCHED_PARTS.keys()
    assert tuple(PARTS) == PART_NAMES
    assert tuple(SWIFT_PARTS) == SWIFT_NAMES
    assert tuple(PATCHED_PARTS) == PATCHED_NAMES
    assert NAMES == SYSTEM_NAMES
    assert sum(BUDGETS[name] for name in PARTS) < 15 * 60


def wrong_claims(text: str, root: Path) -> list[str]:
    """Return the figures that link to a row of a report which does not exist or does not hold the figure."""
    wrong = []
    for figure, path, anchor in re.findall(r"\[([^\]]+)\]\((docs/report/[^)#]+)#([^)]+)\)", text):
        found = Page(root / path).cells.get(anchor, []) if (root / path).is_file() else []
        if figure not in found:
            wrong.append(f"{figure}: {path}#{anchor} has {found}")
    return wrong


def test_what_the_readme_claims_is_in_the_report() -> None:
    assert wrong_claims((ROOT / "README.md").read_text(), ROOT) == []


def test_claims_are_held_against_their_rows(tmp_path: Path) -> None:
    section = Section("fig1", "t", "p", "h", [Table("t", ("a", "b"), [row("fig1", "ours", "2.50×")])])
    write_page([(section, 1.0)], {"model": "tiny"}, tmp_path / "docs" / "report" / "index.html")
    link = "[{}](docs/report/{}#{})"
    assert wrong_claims(link.format("2.50×", "index.html", "fig1-ours"), tmp_path) == []
    for wrong in (
        ("2.60×", "index.html", "fig1-ours"),
        ("2.50×", "index.html", "fig1"),
        ("2.50×", "no.html", "fig1-ours"),
    ):
        assert len(wrong_claims(link.format(*wrong), tmp_path)) == 1


def test_parts_from_the_command_line(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "SCALES", {"cpu": TINY})
    target = tmp_path / "figures.json"
    arguments = ["--model", str(folders["sd"]), "--device", "cpu", "--out", str(tmp_path), "--json", str(target)]
    assert main(["bench", "reproduce", "fig11", *arguments]) == 0
    assert "R²" in capsys.readouterr().out
    assert "fig11-compute" in Page(tmp_path / "fig11.html").ids
    assert set(json.loads(target.read_text())["parts"]) == {"fig11"}
    assert main(["bench", "reproduce", "overheads", "fig11", *arguments]) == 0
    assert {"fig11", "overheads"} <= set(Page(tmp_path / "index.html").ids)
    assert list(json.loads(target.read_text())["parts"]) == ["fig11", "overheads"]
    assert main(["bench", "reproduce", "fig11", "fig99", *arguments]) == 2
    assert "unknown part 'fig99': the parts are all, fig4" in capsys.readouterr().err
    assert main(["bench", "reproduce", "fig6", "--model", str(folders["sd"]), "--device", "cpu"]) == 2
    assert "need a Flux model" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["blend", "sd"])
def test_every_system_runs_and_is_compared_with_diffusers(family: str, models: dict[str, Model]) -> None:
    model = replace(models[family], own_size=64)
    names = [name for name in NAMES if name != "diffusers compiled"]
    study = EngineStudy(steps=2, repeats=1, batches=(1, 2), systems=tuple(names))
    told: list[tuple[int, int]] = []
    rows = measure_engine(model, (64, 64), study, lambda *done: told.append(done))
    assert {one.system for one in rows} == set(suiting(names, model))
    assert (set(names) - {one.system for one in rows}) == (set(FLUX_ONLY) if family == "sd" else set())
    assert {(one.system, one.batch): one.faster for one in rows}["diffusers", 2] == 1.0
    assert told[-1][0] == told[-1][1] == len(rows) * 3 // 2  # the first batch warms up


def test_engine_from_the_command_line(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "figures.json"
    arguments = ["--model", str(folders["fill"]), "--device", "cpu", "--size", "32x32", "--steps", "2"]
    arguments += ["--repeats", "1", "--batch", "2"]
    arguments += ["--system", "diffusers", "--system", "cached", "--json", str(target)]
    assert main(["bench", "engine", *arguments]) == 0
    assert [one["system"] for one in json.loads(target.read_text())["rows"]] == ["diffusers", "cached"]
    assert "faster than diffusers" in capsys.readouterr().out


def test_a_simulated_cluster_from_the_command_line(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "figures.json"
    arguments = ["--model", str(folders["fill"]), "--workers", "3", "--num-prompts", "20", "--request-rate", "50"]
    arguments += ["--size", "64x64"]
    arguments += ["--templates-in-memory", "2", "--plan", "greedy", "--json", str(target)]
    arguments += ["--finish", "1", "--finish-token", "0.5", "--finish-thread", "9"]
    assert main(["bench", "simulate", *arguments]) == 0
    content = json.loads(target.read_text())
    assert [one["policy"] for one in content["rows"]] == ["mask_aware", "tokens", "requests", "round_robin"]
    assert content["shape"]["num_workers"] == 3
    assert all(10 < one["median_s"] <= one["p95_s"] <= one["p99_s"] for one in content["rows"])
    assert "3 workers" in capsys.readouterr().out


def test_charts_wear_the_colours_of_the_page() -> None:
    svg = "<text fill='#1f2328'/><rect fill='#ffffff'/><line stroke='#0b6bcb'/>"
    assert themed(svg) == "<text fill='var(--ink)'/><rect fill='var(--paper)'/><line stroke='var(--c0)'/>"


def test_anchors_and_cells() -> None:
    line = row("fig1", "crop and stitch", 0.123456, 3, key=("crop and stitch", 0.11))
    assert (line.anchor, line.cells) == ("fig1-crop-and-stitch-0.11", ["crop and stitch", "0.123", "3"])
    section = Section("fig1", "t", "p", "h", [Table("t", ("a",), [line])])
    assert section.anchors == ["fig1", line.anchor]


@pytest.mark.parametrize("make", [linear, at_values, doubling, decades])
@pytest.mark.parametrize("values", [[1.0], [0.02, 3.0, 700.0], [5.0, 5.0]])
def test_axes_hold_their_values(make: object, values: list[float]) -> None:
    axis = make("x", values)  # type: ignore[operator]
    assert axis.low <= min(values) <= max(values) <= axis.high
    assert axis.low < axis.high
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks)
