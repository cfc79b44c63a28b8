"""The table of what LoRAs cost a step."""

from pathlib import Path

import pytest

from instgenie.bench import lora_steps


def test_the_table_has_every_way(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    lora_steps.main(["--model", str(folders["blend"]), "--device", "cpu", "--batch", "2", "--ranks", "2"])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    ways = ["none", "another for each edit", "one for all, merged"]
    assert [row[:3] for row in rows[2:8]] == [
        [kind, "" if way == "none" else "2", way] for kind in ("dense", "cached") for way in ways
    ]
    assert all(float(row[3]) > 0 for row in rows[2:8])
