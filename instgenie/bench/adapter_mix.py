"""Which LoRAs and ControlNets the requests of a workload name: as a paper tells it, or as a trace has it.

SwiftDiffusion's Table 1 tells of a production service: nearly every request has ControlNets, 70 % two of them; 90 %
have one or two LoRAs, out of 7,500, of which few are asked for often. What it leaves open is assumed here: 2 % of the
requests have no ControlNet, one and two LoRAs are equally frequent, scales are 0.4 to 1, there are 50 ControlNets, and
the n-th most popular adapter is drawn in proportion to 1 / n.
"""

import ast
import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from instgenie.bench.workload import popularity
from instgenie.errors import WorkloadError

NUM_REQUESTS = 20_000
NUM_LORAS, NUM_CONTROLNETS = 7500, 50
LORA_SHARES = (0.1, 0.45, 0.45)  # of requests with none, one and two
CONTROL_SHARES = (0.02, 0.28, 0.7)
SCALES = (0.4, 1.0)
COLUMN = "lora_args"  # of a trace: [{'modelVersionId': ..., 'scale': ...}, ...]


@dataclass(frozen=True)
class RequestAdapters:
    loras: tuple[tuple[str, float], ...]  # ids and scales
    controlnets: tuple[str, ...]


def draw_adapters(num: int, seed: int = 0) -> list[RequestAdapters]:
    """Requests as SwiftDiffusion's Table 1 describes them."""
    lora_counts, lora_ids, scales, controls = np.random.default_rng(seed).spawn(4)
    counts = lora_counts.choice(len(LORA_SHARES), num, p=LORA_SHARES)
    ids = lora_ids.choice(NUM_LORAS, (num, len(LORA_SHARES) - 1), p=popularity(NUM_LORAS, 1.0))
    strengths = scales.uniform(*SCALES, ids.shape).round(2)
    loras = [
        tuple((f"lora-{one}", float(scale)) for one, scale in zip(own[:count], strong[:count], strict=True))
        for count, own, strong in zip(counts, ids, strengths, strict=True)
    ]
    return with_controlnets(loras, controls)


def read_mixes(trace: Path | None) -> dict[str, list[RequestAdapters]]:
    """Requests by where they come from: Table 1, and a trace if there is one."""
    mixes = {"Table 1": draw_adapters(NUM_REQUESTS)}
    return mixes | {"trace": read_adapters(trace)} if trace else mixes


def with_controlnets(
    loras: Sequence[tuple[tuple[str, float], ...]], generator: np.random.Generator
) -> list[RequestAdapters]:
    counts = generator.choice(len(CONTROL_SHARES), len(loras), p=CONTROL_SHARES)
    chances = popularity(NUM_CONTROLNETS, 1.0)
    found = []
    for own, count in zip(loras, counts, strict=True):
        chosen = generator.choice(NUM_CONTROLNETS, count, replace=False, p=chances)
        found.append(RequestAdapters(own, tuple(f"controlnet-{one}" for one in chosen)))
    return found


def read_adapters(path: Path, seed: int = 0) -> list[RequestAdapters]:
    """The requests of a trace in their order, with its LoRAs and scales. It names no ControlNets: these are drawn."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if COLUMN not in (rows.fieldnames or ()):
                raise WorkloadError(f"{path} has no column {COLUMN!r}: its columns are {rows.fieldnames}")
            loras = [parse_loras(row[COLUMN] or "[]", f"{path}, row {number}") for number, row in enumerate(rows, 2)]
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror}") from None
    if not loras:
        raise WorkloadError(f"{path} holds no requests: at least one is expected")
    return with_controlnets(loras, np.random.default_rng(seed))


def parse_loras(text: str, where: str) -> tuple[tuple[str, float], ...]:
    try:
        return tuple((str(one["modelVersionId"]), float(one["scale"])) for one in ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError, KeyError):
        raise WorkloadError(f"{where}: {COLUMN} is {text[:80]!r}, a list of LoRAs is expected") from None


def hit_ratio(asked: Iterable[str], num_kept: int) -> float:
    """The share of asked adapters that is in memory, where the `num_kept` used last are kept."""
    kept: dict[str, None] = {}
    num_asked = num_hits = 0
    for one in asked:
        num_asked += 1
        if one in kept:
            num_hits += 1
            del kept[one]
        elif len(kept) >= num_kept:
            del kept[next(iter(kept))]
        kept[one] = None
    return num_hits / num_asked if num_asked else 0.0
