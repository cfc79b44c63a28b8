"""Measurements of real servers under load."""

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.serving import ALICE, Running

from instgenie.bench.serve import EditAnswer, make_row
from instgenie.cli import main


def test_a_row_counts_what_came_in_time() -> None:
    answers = [EditAnswer(latency, 0.1, "") for latency in (1.0, 2.0, 3.0, 4.0)] + [EditAnswer(9.0, 0.6, "500 no")]
    row = make_row("x", answers, duration=2.0, alone=1.0, slo_scale=2.0)
    assert (row.num_finished, row.num_failed, row.throughput, row.mean_s) == (4, 1, 2.0, 2.5)
    assert (row.slo_attainment, row.mask_ratio) == (0.4, 0.2)
    assert row.p90_s <= row.p95_s <= row.p99_s <= 4.0


def test_a_load_on_a_real_server(server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "figures.json"
    arguments = ["--base-url", server.url, "--api-key", ALICE, "--num-prompts", "6", "--request-rate", "20"]
    arguments += ["--steps", "2", "--num-templates", "2", "--size", "48x32", "--json", str(target)]
    assert main(["bench", "serve", *arguments]) == 0
    [row] = json.loads(target.read_text())["rows"]
    assert (row["num_finished"], row["num_failed"], row["num_interruptions"]) == (6, 0, 0)
    printed = capsys.readouterr().out
    assert "SLO" in printed
    assert "interrupted" in printed


def test_each_system_says_how_often_its_steps_were_interrupted(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server that prepares and finishes between steps interrupts them; ours does not."""
    target = tmp_path / "figures.json"
    arguments = [
        "--compare",
        "--model",
        str(folders["sd_fill"]),
        "--device",
        "cpu",
        "--num-prompts",
        "8",
        "--request-rate",
        "inf",
    ]
    arguments += ["--steps", "20", "--steps", "4", "--num-templates", "1", "--size", "48x32", "--json", str(target)]
    assert main(["bench", "serve", *arguments]) == 0
    ours, static, naive = json.loads(target.read_text())["rows"]
    assert ours["num_interruptions"] == static["num_interruptions"] == 0
    assert naive["num_interruptions"] > 0
    assert "interrupted" in capsys.readouterr().out


def test_new_pictures_are_not_registered(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every edit, those on the idle server included, has a picture of its own; servers get the flags."""
    sent: list[tuple[str, object]] = []
    commands: list[list[str]] = []
    post, popen = httpx.AsyncClient.post, subprocess.Popen

    async def spy(client: httpx.AsyncClient, url: str, **content: Any) -> httpx.Response:
        sent.append((url, content["files"]["image"]))
        return await post(client, url, **content)

    def start(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return popen(command, **options)

    monkeypatch.setattr(httpx.AsyncClient, "post", spy)
    monkeypatch.setattr(subprocess, "Popen", start)
    target = tmp_path / "figures.json"
    arguments = ["--compare", "--against", "static", "--model", str(folders["sd_fill"]), "--device", "cpu"]
    arguments += ["--new-pictures", "--num-prompts", "3", "--steps", "2", "--size", "48x32", "--json", str(target)]
    assert main(["bench", "serve", *arguments, "--server-flags", "--max-batch-size 2"]) == 0
    assert [row["system"] for row in json.loads(target.read_text())["rows"]] == ["instgenie", "static batches, dense"]
    assert {url for url, _ in sent} == {"/v1/images/edits"}
    assert len(sent) == 2 * 7
    assert len({picture for _, picture in sent}) == 7
    assert all("--max-batch-size" in command for command in commands)


def test_a_workload_is_saved_and_sent_again(server: Running, tmp_path: Path) -> None:
    saved, target = tmp_path / "workload.jsonl", tmp_path / "figures.json"
    common = ["bench", "serve", "--base-url", server.url, "--api-key", ALICE]
    drawn = ["--num-prompts", "3", "--size", "48x32", "--steps", "2", "--steps", "3", "--save-workload", str(saved)]
    assert main([*common, *drawn]) == 0
    assert len(saved.read_text().splitlines()) == 3
    assert main([*common, "--workload", str(saved), "--json", str(target)]) == 0
    content = json.loads(target.read_text())
    assert content["rows"][0]["num_finished"] == 3
    assert content["plan"]["workload"] == str(saved)


def test_no_server_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9", "--num-prompts", "1"]) == 2
    assert "cannot be reached" in capsys.readouterr().err
