"""Claims about performance: the page shows what the JSON says, and measurements become rows of it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from instgenie.bench.claims import Claim, edit_claims, merge_claims, read_claims, render_claims, write_claims
from instgenie.cli import main

DOCS = Path(__file__).parent.parent.parent / "docs"
CLAIM = Claim(
    id="step",
    what="one step",
    model="m",
    ours=2.0,
    against="diffusers",
    theirs=5.0,
    ratio=2.5,
    unit="ms",
    device="d",
    versions="v",
    command="c",
)


def row(system: str, step_ms: float, batch: int = 1, tier: str | None = None) -> dict[str, object]:
    kept = {"kind": "kv", "cache_dtype": "model", "tier": tier, "policy": "cached"} if tier else {}
    return {"system": system, "mask_ratio": 0.11, "batch": batch, "step_ms": step_ms, "edit_ms": 28 * step_ms} | kept


REPORT = {
    "command": "instgenie bench edit",
    "model": "dummy:flux.1-dev",
    "steps": 28,
    "machine": {"device": "H", "dtype": "bfloat16", "python": "3", "torch": "2", "cuda": "13", "diffusers": "0"},
    "rows": [
        row("diffusers", 178.04),
        row("compiled", 134.8),
        row("cached", 35.06, tier="host"),
        row("cached", 9.0, batch=2, tier="gpu"),  # without a row of diffusers to compare with
    ],
}


def test_the_page_shows_the_claims() -> None:
    assert (
        main(["bench", "table", str(DOCS / "performance.json"), "--into", str(DOCS / "performance.md"), "--check"]) == 0
    )


def test_sources_are_rows_of_the_report_that_hold_the_figure() -> None:
    parts = json.loads((DOCS / "report" / "figures.json").read_text())["parts"].values()
    tables = [table for part in parts for table in part["tables"]]
    cells = {line["anchor"]: line["cells"] for table in tables for line in table["rows"]}
    sources = {
        claim.source.partition("#")[2]: claim.ours for claim in read_claims(DOCS / "performance.json") if claim.source
    }
    assert sources
    for anchor, figure in sources.items():
        assert any(cell.replace(".", "").isdigit() and float(cell) == figure for cell in cells[anchor])


def test_an_old_page_is_found_and_renewed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    claims, page = tmp_path / "claims.json", tmp_path / "page.md"
    write_claims([CLAIM], claims)
    page.write_text("# Title\n<!-- claims:begin -->\nold\n<!-- claims:end -->\nkept\n")
    arguments = ["bench", "table", str(claims), "--into", str(page)]
    assert main([*arguments, "--check"]) == 2
    assert "is older than its claims" in capsys.readouterr().err
    assert "old" in page.read_text()
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0
    text = page.read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("\nkept\n")
    assert "2 ms" in text
    assert main(["bench", "table", str(claims)]) == 0
    assert capsys.readouterr().out in text


def test_rows_of_bench_edit_become_claims(tmp_path: Path) -> None:
    claims, edits = tmp_path / "claims.json", tmp_path / "edits.json"
    shutil.copy(DOCS / "performance.json", claims)
    edits.write_text(json.dumps(REPORT))
    assert main(["bench", "table", str(claims), "--add", str(edits)]) == 0
    added = read_claims(claims)[-1]
    assert (added.model, added.mask, added.activations) == ("flux.1-dev", "0.11", "main memory, kv bfloat16")
    assert (added.ours, added.theirs, added.compiled, added.ratio) == (35.1, 178.0, 134.8, 5.08)
    assert len(list(edit_claims(REPORT))) == 1


def test_new_pictures_and_kept_steps_are_named() -> None:
    rows = [row("diffusers", 178.0), row("cached", 35.6, tier="host"), row("own", 44.5, tier="gpu")]
    told = {"cache_stride": 7, "text_padding": "reused", "command": "bench edit --json /tmp/x --batch 1", "rows": rows}
    cached, new = edit_claims(REPORT | told)
    assert cached.activations == "main memory, kv bfloat16, every 7th step, padding"
    assert (new.what, new.activations) == (
        "a whole edit of a new picture, 28 steps",
        "GPU memory, kv bfloat16, padding",
    )
    assert (new.ours, new.theirs, new.ratio) == (1246.0, 4984.0, 4.0)
    assert new.command == "bench edit --batch 1"


def test_a_check_adds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--check"], ["--check", "--into", "page.md", "--add", "edits.json"]):
        with pytest.raises(SystemExit, match="2"):
            main(["bench", "table", str(DOCS / "performance.json"), *wrong])
        assert "--check goes with --into" in capsys.readouterr().err


def test_newer_claims_replace_older_ones() -> None:
    newer, other = replace(CLAIM, ours=1.0, ratio=5.0), replace(CLAIM, id="other")
    assert merge_claims([CLAIM, other], [newer]) == [newer, other]
    assert merge_claims([other], [newer]) == [other, newer]


def test_a_table_for_each_device() -> None:
    shown = render_claims([CLAIM, replace(CLAIM, id="b", device="e", source="report#x")])
    assert shown.count("| --- |") == 2
    assert "[2 ms](report#x)" in shown


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ([replace(CLAIM, ratio=3.0)], "its figures give 2.50"),
        ([CLAIM, CLAIM], "the same claim twice: step"),
        ([replace(CLAIM, unit="steps/s")], "its figures give 0.40"),
    ],
)
def test_wrong_claims_are_refused(
    claims: list[Claim], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_claims(claims, tmp_path / "claims.json")
    assert main(["bench", "table", str(tmp_path / "claims.json")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", '{"claims": [{"id": "x"}]}', '{"claims": [{"colour": "red"}]}'])
def test_files_that_are_no_claims(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "claims.json").write_text(text)
    assert main(["bench", "table", str(tmp_path / "claims.json")]) == 2
    assert "is not a list of claims" in capsys.readouterr().err
