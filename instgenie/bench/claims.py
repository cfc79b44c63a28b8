"""Claims about performance: one JSON row each, and the Markdown table in docs/performance.md. Imports no torch.

A row says what was measured (`what`, `model`, `mask`, `batch`, `activations`), our figure and the figure of the system
it is compared with (`against`), both in `unit`, and how to measure again (`device`, `versions`, `command`). `compiled`
is diffusers with compiled blocks, if the same run measured it; `source` links to the row of a report with our figure.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from instgenie.bench.files import write_text
from instgenie.bench.markdown import markdown_table, put_between
from instgenie.bench.reproduce.section import slug
from instgenie.errors import InstGenieError

BEGIN, END = "<!-- claims:begin -->", "<!-- claims:end -->"
TIERS = {"gpu": "GPU memory", "host": "main memory"}
RATES = ("steps/s", "edits/s")  # units in which more is better
TOLERANCE = 0.02  # between a ratio and its two rounded figures
NONE = "–"
ORDINALS = {2: "nd", 3: "rd"}
HEADINGS = ["", "model", "mask ratio", "batch", "activations", "ours", "against", "theirs", "compiled", "ratio"]


@dataclass(frozen=True, kw_only=True)
class Claim:
    id: str
    what: str
    model: str
    mask: str = ""  # a ratio, or the name of a distribution
    batch: str = ""
    activations: str = ""  # where they lie and what they are kept as
    ours: float
    against: str
    theirs: float
    compiled: float | None = None
    ratio: float  # times faster than `against`
    unit: str
    device: str
    versions: str
    command: str
    source: str = ""


def read_claims(path: Path) -> list[Claim]:
    try:
        claims = [Claim(**row) for row in json.loads(path.read_text(encoding="utf-8"))["claims"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        names = ", ".join(field.name for field in fields(Claim))
        raise InstGenieError(f"{path} is not a list of claims with {names}: {error}") from None
    for claim in claims:
        check_ratio(claim)
    ids = [claim.id for claim in claims]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise InstGenieError(f"{path} makes the same claim twice: {', '.join(twice)}")
    return claims


def check_ratio(claim: Claim) -> None:
    expected = claim.ours / claim.theirs if claim.unit in RATES else claim.theirs / claim.ours
    if abs(claim.ratio / expected - 1) > TOLERANCE:
        raise InstGenieError(f"the claim {claim.id} has the ratio {claim.ratio:g}: its figures give {expected:.2f}")


def write_claims(claims: Sequence[Claim], path: Path) -> None:
    rows = [{name: value for name, value in asdict(claim).items() if value not in (None, "")} for claim in claims]
    write_text(json.dumps({"claims": rows}, indent=1, ensure_ascii=False) + "\n", path)


def merge_claims(old: Sequence[Claim], new: Sequence[Claim]) -> list[Claim]:
    """Replace claims by newer ones of the same id, in place, and append the others."""
    newer = {claim.id: claim for claim in new}
    merged = [newer.pop(claim.id, claim) for claim in old]
    return [*merged, *newer.values()]


def claims_of_edits(path: Path) -> list[Claim]:
    """Turn the rows of `instgenie bench edit --json` into claims: a step for each row of the cached system, and a
    whole edit for each row of a picture never seen before."""
    try:
        return list(edit_claims(json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InstGenieError(f"{path} is not a file of instgenie bench edit --json: {error}") from None


def edit_claims(report: Mapping[str, Any]) -> Iterator[Claim]:
    machine, rows = report["machine"], report["rows"]
    found = {(row["system"], row["mask_ratio"], row["batch"]): row for row in rows}
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "torch", "cuda", "diffusers"))
    model = report["model"].removeprefix("dummy:")
    measured = {
        "cached": ("one step", "step", "step_ms"),
        "own": (f"a whole edit of a new picture, {report['steps']} steps", "new picture", "edit_ms"),
    }
    for row in rows:
        case = row["mask_ratio"], row["batch"]
        stock, compiled = found.get(("diffusers", *case)), found.get(("compiled", *case))
        if row["system"] not in measured or stock is None:
            continue
        what, name, figure = measured[row["system"]]
        mask, kept = f"{row['mask_ratio']:.2f}", describe_activations(report, row)
        yield Claim(
            id=slug(f"{name} {model} {mask} batch {row['batch']} {row['tier']} {kept.partition(', ')[2]}"),
            what=what,
            model=model,
            mask=mask,
            batch=str(row["batch"]),
            activations=kept,
            ours=round(row[figure], 1),
            against="diffusers",
            theirs=round(stock[figure], 1),
            ratio=round(stock[figure] / row[figure], 2),
            unit="ms",
            device=machine["device"],
            versions=versions,
            command=re.sub(r" --json \S+", "", report["command"]),
            compiled=compiled and round(compiled[figure], 1),
        )


def describe_activations(report: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Where the activations lie, what is kept of them, and in which format."""
    dtype = report["machine"]["dtype"] if row["cache_dtype"] == "model" else row["cache_dtype"]
    stride = report.get("cache_stride", 1) if row["system"] == "cached" else 1
    steps = f", every {stride}{ORDINALS.get(stride, 'th')} step" if stride > 1 else ""
    padding = ", padding" if report.get("text_padding") == "reused" else ""
    return f"{TIERS[row['tier']]}, {row['kind']} {dtype}{steps}{padding}"


def render_claims(claims: Sequence[Claim]) -> str:
    """Make one table per device and versions."""
    groups = dict.fromkeys((claim.device, claim.versions) for claim in claims)
    parts = []
    for device, versions in groups:
        own = [claim for claim in claims if (claim.device, claim.versions) == (device, versions)]
        table = markdown_table([HEADINGS, *(cells(claim) for claim in own)], num_left=2)
        parts.append(f"\n**{device}**, {versions}:\n\n{table}")
    return "".join(parts) + "\n"


def cells(claim: Claim) -> list[str]:
    ours = f"{claim.ours:g} {claim.unit}"
    compiled = NONE if claim.compiled is None else f"{claim.compiled:g}"
    described = [claim.what, claim.model, claim.mask or NONE, claim.batch or NONE, claim.activations or NONE]
    linked = f"[{ours}]({claim.source})" if claim.source else ours
    return [*described, linked, claim.against, f"{claim.theirs:g}", compiled, f"**{claim.ratio:.2f}×**"]


def put_claims(claims: Sequence[Claim], page: Path, only_check: bool) -> None:
    """Write the table between the marks of a page, or only check that it is there."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise InstGenieError(f"{page} cannot be read: {error.strerror}") from None
    if BEGIN not in text or END not in text:
        raise InstGenieError(f"{page} has no place for the table: it needs {BEGIN} and {END}")
    new = put_between(text, render_claims(claims), BEGIN, END)
    if only_check and new != text:
        raise InstGenieError(f"{page} is older than its claims: run instgenie bench table again, without --check")
    if new != text:
        write_text(new, page)
