"""What LoRAs that are not in memory cost, measured with a tiny model."""

from pathlib import Path

import pytest

from instgenie.bench import lora_loads


def test_both_figures_are_printed(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_loads, "COLD_BYTES", 1e6)  # of a tiny model, 200 MB would be a LoRA of a huge rank
    options = ["--device", "cpu", "--num-loras", "5", "--seconds", "0.5", "--repeats", "1", "--lora-weights-gib", "1"]
    lora_loads.main(["--model", str(folders["blend"]), *options])
    cold, rotation, _ = capsys.readouterr().out.splitlines()
    assert "28 steps" in cold
    assert "with 5 of" in rotation
    assert rotation.endswith("times")
