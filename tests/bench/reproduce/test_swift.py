"""The figures of SwiftDiffusion run on tiny models; mixes of adapters, those that are kept, the baseline."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.edits import make_edit

from instgenie.bench.adapted import AdaptedEngine, with_adapters
from instgenie.bench.adapter_files import write_controlnets, write_loras
from instgenie.bench.adapter_mix import draw_adapters, hit_ratio, read_adapters
from instgenie.bench.reproduce import adapters
from instgenie.bench.reproduce.lab import SCALES, Lab
from instgenie.bench.reproduce.run import SWIFT_PARTS, choose_parts
from instgenie.bench.stock_adapters import inline, merged
from instgenie.engine.lora_shelf import LoraShelf
from instgenie.engine.prepare import prepare
from instgenie.errors import WorkloadError
from instgenie.models.model import Model

SCALE = replace(SCALES["cpu"], steps=2, batches=(1, 2), repeats=1)
TRACE = """predict_type,lora_args
a,[]
b,"[{'modelVersionId': 'one', 'scale': 0.5}]"
c,"[{'modelVersionId': 'two', 'scale': 1.0}, {'modelVersionId': 'one', 'scale': 0.7}]"
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


@pytest.mark.parametrize(("name", "family"), [("optimisations", "fill"), ("adapters", "fill"), ("switching", "sd")])
def test_a_part_runs(name: str, family: str, models: dict[str, Model], trace: Path) -> None:
    model = models[family]
    lab = Lab(family, replace(model, own_size=32 if family == "fill" else model.own_size), SCALE, adapter_trace=trace)
    section = SWIFT_PARTS[name](lab)
    assert section.name == name
    assert len(set(section.anchors)) == len(section.anchors)
    for table in section.tables:
        assert table.rows
        assert all(len(line.cells) == len(table.columns) for line in table.rows)
    assert all("<svg" in chart.svg() for chart in section.charts)
    if name != "optimisations":  # which has no adapters
        assert f"{name}-mix-trace" in section.anchors


def test_groups_of_parts() -> None:
    assert choose_parts(["swift"]) == list(SWIFT_PARTS)
    assert set(choose_parts(["all"])).isdisjoint(SWIFT_PARTS)
    assert choose_parts(["switching", "fig11"]) == ["fig11", "switching"]


def test_a_mix_has_the_shares_of_the_paper() -> None:
    mix = draw_adapters(4000)
    assert mix == draw_adapters(4000)
    controls, loras = (np.array([len(one) for one in column]) for column in zip(*map(vars_of, mix), strict=True))
    assert abs((controls == 2).mean() - 0.7) < 0.03
    assert (controls > 0).mean() > 0.95
    assert abs((loras > 0).mean() - 0.9) < 0.02
    names = [name for one in mix for name, _ in one.loras]
    assert hit_ratio(names, 10) < hit_ratio(names, 300) < hit_ratio(names, 10_000)
    assert all(len(set(one.controlnets)) == len(one.controlnets) for one in mix)


def vars_of(request: object) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return vars(request)["controlnets"], vars(request)["loras"]


def test_those_used_last_are_kept() -> None:
    assert hit_ratio(list("abab"), 2) == 0.5
    assert hit_ratio(list("abcabc"), 2) == 0
    assert hit_ratio(list("aabacada"), 2) == 0.5  # a is used again before it would go
    assert hit_ratio([], 3) == 0


def test_a_trace_is_read_and_bad_ones_are_told(trace: Path, tmp_path: Path) -> None:
    found = read_adapters(trace)
    assert [one.loras for one in found] == [(), (("one", 0.5),), (("two", 1.0), ("one", 0.7))]
    for text, message in (("a,b\n1,2\n", "no column 'lora_args'"), ("lora_args\n[1]\n", "row 2: lora_args is")):
        (tmp_path / "bad.csv").write_text(text)
        with pytest.raises(WorkloadError, match=message):
            read_adapters(tmp_path / "bad.csv")
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_adapters(tmp_path / "nowhere.csv")


@pytest.mark.parametrize("family", ["fill", "sd"])
def test_the_baseline_sees_its_adapters_and_leaves_the_weights(
    family: str, models: dict[str, Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models[family]
    [path], [folder] = write_loras(tmp_path, model, 2, 1), write_controlnets(tmp_path, model, 1)
    before = {name: weight.clone() for name, weight in model.network.named_parameters()}
    with merged(model.network, model, [path]):
        changed = {name for name, weight in model.network.named_parameters() if not torch.equal(weight, before[name])}
    assert changed
    assert all(torch.equal(weight, before[name]) for name, weight in model.network.named_parameters())
    edit = with_adapters(make_edit(steps=2), [], [folder])
    engine, calls = AdaptedEngine(model), []
    net = engine.controls.shelf.take(edit.controls[0])
    net.network.register_forward_hook(lambda *_: calls.append(1))
    hint = prepare(edit, model).controls[0].hint
    with inline(model.network, model, [net], hint):
        adapters.StockAdapters(model).system.run([make_edit(steps=2)])
    assert calls
    run, passes = net.run, []
    monkeypatch.setattr(net, "run", lambda batch: passes.append(batch) or run(batch))
    engine.run([edit], LoraShelf(model), reuses=False)
    assert len(passes) == 2
