"""What LoRAs that are not in memory cost, measured with a tiny model."""

from pathlib import Path

import pytest

from instgenie.bench import lora_loads


def test_both_figures_are_printed(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--num-loras", "5", "--seconds", "0.5", "--repeats", "1"]
    lora_loads.main(["--model", str(folders["blend"]), *options])
    cold, rotation, _ = capsys.readouterr().out.splitlines()
    assert "28 steps" in cold
    assert "with 5 of" in rotation
    assert rotation.endswith("times")
