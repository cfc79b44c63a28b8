"""The bench of remote workers: both wires carry all messages, in order, and the figures are there."""

import json
from pathlib import Path

import pytest

from instgenie.cli import main


def test_bench_remote_prints_both_wires(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "remote", "--repeats", "3", "--json", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["wire"] for row in rows] == ["local", "remote"]
    assert all(value > 0 for row in rows for name, value in row.items() if name.endswith("_ms"))
    assert "TCP, encrypted" in capsys.readouterr().out
