"""The table of what LoRAs cost a step."""

from pathlib import Path

import pytest

from instgenie.bench import lora_steps
from instgenie.models.layers import linear


def test_the_table_has_every_way(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "MIN_ROWS", 0)
    flags = ["--device", "cpu", "--batch", "2", "--ranks", "2", "--products"]
    lora_steps.main(["--model", str(folders["blend"]), *flags])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    ways = ["none", lora_steps.PRODUCTS, lora_steps.MERGED, lora_steps.OWN_WEIGHTS]
    assert [row[:3] for row in rows[2:10]] == [
        [kind, "" if way == "none" else "2", way] for kind in ("dense", "cached") for way in ways
    ]
    assert all(float(row[3]) > 0 for row in rows[2:10])
    assert [bool(row[-1]) for row in rows[2:10]] == 2 * [False, False, False, True]
    products = rows[13:-1]
    assert {row[0] for row in products} == {"dense", "cached"}
    assert all(int(number) > 0 for row in products for number in row[5:])
    assert [row[0] for row in products if row[1] == "all"] == ["dense", "cached"]
