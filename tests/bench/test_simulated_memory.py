"""Templates that fit into the memory of a simulated worker."""

import json
from pathlib import Path

import pytest

from instgenie.cli import main


def simulated(path: Path, *options: str) -> dict:
    common = ["--workers", "1", "--num-prompts", "40", "--num-templates", "30", "--policy", "mask_aware"]
    assert (
        main(["bench", "simulate", "--model", "builtin", "--cache-gib", "1", *common, *options, "--json", str(path)])
        == 0
    )
    return json.loads(path.read_text())


def test_fewer_steps_in_fewer_bits_leave_room_for_more_templates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = simulated(tmp_path / "whole.json")
    small = simulated(tmp_path / "small.json", "--cache-dtype", "int4", "--cache-stride", "4")
    assert small["template_bytes"] * 12 < whole["template_bytes"]
    assert small["shape"]["max_templates"] > 12 * whole["shape"]["max_templates"]
    assert small["shape"]["fetch"] < whole["shape"]["fetch"]
    assert small["rows"][0]["hit_rate"] >= whole["rows"][0]["hit_rate"]
    with_text = simulated(tmp_path / "text.json", "--text-padding", "reused")
    assert whole["template_bytes"] < with_text["template_bytes"] < 1.5 * whole["template_bytes"]
    assert "a template" in capsys.readouterr().out.replace("\n", " ")
