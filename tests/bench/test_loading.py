"""`instgenie bench load`: each way to load a folder, in a process of its own."""

import json
from pathlib import Path

import pytest

from instgenie.bench import loading
from instgenie.cli import EXIT_BAD_INPUT, main


def test_a_folder_is_loaded_in_every_way(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "COLD_WAYS", ("instgenie",))  # the others are the same but for the pages
    out = tmp_path / "load.json"
    assert main(["bench", "load", str(folders["fill"]), "--device", "cpu", "--cold", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [(row["way"], row["pages"]) for row in report["rows"]] == [
        *((way, "warm") for way in loading.WAYS),
        ("instgenie", "cold"),
    ]
    assert report["bytes"] == sum(path.stat().st_size for path in folders["fill"].rglob("*.safetensors"))
    assert all(row["seconds"] > 0 and row["peak_rss"] > 10**7 for row in report["rows"])
    shown = capsys.readouterr().out
    assert "floor: read the files" in shown
    assert "from_pretrained().to()" in shown


def test_a_folder_without_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "load", str(tmp_path)]) == EXIT_BAD_INPUT
    assert "holds no safetensors weights" in capsys.readouterr().err
