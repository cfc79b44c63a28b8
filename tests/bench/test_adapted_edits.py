"""The table of whole edits with LoRAs and ControlNets."""

from pathlib import Path

import pytest

from instgenie.bench import adapted_edits


def test_the_table_has_every_way(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--controls", "1", "--loras", "1", "--batch", "2", "--steps", "4", "--repeats", "1"]
    adapted_edits.main(["--model", str(folders["sd"]), "--device", "cpu", *sizes])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    ways = [
        f"{edit}, {way}" for way in ("captured", "ControlNets uncaptured") for edit in ("every token", "mask ratio 0.2")
    ]
    assert [[row[0], row[1], row[3]] for row in rows[2:10]] == [
        [num, "1C/1L", way] for num in ("1", "2") for way in ways
    ]
    assert all(float(row[4]) > 0 for row in rows[2:10])
