"""Workloads: edits drawn from a seed, each with its arrival time, template, mask, size and steps. Knows no server.

The same recipe gives the same workload on every machine. A workload is saved as JSON lines, one per edit.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from instgenie.bench.arrivals import poisson, replayed
from instgenie.bench.pictures import MaskShape
from instgenie.bench.ratios import draw_ratios
from instgenie.errors import WorkloadError

SHAPES: tuple[MaskShape, ...] = get_args(MaskShape)
MOST = {"at": math.inf, "template": 2**31, "mask_ratio": 1.0, "seed": 2**31}


@dataclass(frozen=True)
class Arrival:
    at: float  # seconds after the first
    template: int
    mask_ratio: float
    mask_shape: MaskShape
    size: tuple[int, int]  # (height, width) of the picture
    steps: int | None  # None: the model's own
    seed: int


@dataclass(frozen=True)
class WorkloadRecipe:
    num_edits: int = 64
    rate: float = math.inf  # mean edits per second
    arrivals: str | None = None  # file of arrival times; None: Poisson arrivals
    mask_ratios: str = "production"  # the name of a distribution in `ratios`, or a file
    mask_shapes: tuple[MaskShape, ...] = SHAPES  # in equal shares
    num_templates: int = 970
    skew: float = 1.0  # the n-th most popular template is drawn in proportion to 1 / n**skew; 0: all equally
    sizes: tuple[tuple[int, int], ...] = ((256, 256),)  # in equal shares
    steps: tuple[int | None, ...] = (None,)  # in equal shares
    seed: int = 0


def draw_workload(recipe: WorkloadRecipe) -> list[Arrival]:
    """Draw each column with a generator of its own, so that changing one leaves the others unchanged."""
    times, ratios, shapes, templates, sizes, steps, seeds = np.random.default_rng(recipe.seed).spawn(7)
    num = recipe.num_edits
    columns = (
        replayed(recipe.arrivals, num, recipe.rate) if recipe.arrivals else poisson(num, recipe.rate, times),
        templates.choice(recipe.num_templates, num, p=popularity(recipe.num_templates, recipe.skew)),
        draw_ratios(recipe.mask_ratios, num, ratios),
        shapes.integers(len(recipe.mask_shapes), size=num),
        sizes.integers(len(recipe.sizes), size=num),
        steps.integers(len(recipe.steps), size=num),
        seeds.integers(0, 2**31, num),
    )
    return [
        Arrival(
            at=float(at),
            template=int(template),
            mask_ratio=float(ratio),
            mask_shape=recipe.mask_shapes[shape],
            size=recipe.sizes[size],
            steps=recipe.steps[num_steps],
            seed=int(seed),
        )
        for at, template, ratio, shape, size, num_steps, seed in zip(*columns, strict=True)
    ]


def popularity(num_templates: int, skew: float) -> NDArray[np.float64]:
    """Return the share of the edits that each template gets."""
    weights: NDArray[np.float64] = np.arange(1, num_templates + 1, dtype=np.float64) ** -skew
    weights /= weights.sum()
    return weights


def save_workload(workload: Sequence[Arrival], path: Path) -> None:
    path.write_text("".join(json.dumps(asdict(arrival)) + "\n" for arrival in workload))


def read_workload(path: Path) -> list[Arrival]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"the workload {path} cannot be read: {error}") from None
    workload = [read_arrival(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    if not workload:
        raise WorkloadError(f"the workload {path} has no edits")
    return sorted(workload, key=lambda arrival: arrival.at)


def read_arrival(line: str, where: str) -> Arrival:
    try:
        found: dict[str, Any] = json.loads(line)
        height, width = (int(side) for side in found.pop("size"))
        arrival = Arrival(size=(height, width), **found)
    except (ValueError, TypeError, KeyError, AttributeError):
        names = ", ".join(field.name for field in fields(Arrival))
        raise WorkloadError(f"{where} is not an edit: a JSON object with {names} is expected") from None
    for name, most in MOST.items():
        value = found[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise WorkloadError(f"{where} has {name}={value!r}: a number from 0 to {most:g} is expected")
    if arrival.mask_shape not in SHAPES or not (arrival.steps is None or int(arrival.steps) > 0):
        raise WorkloadError(f"{where} has a mask of the shape {arrival.mask_shape!r} and {arrival.steps!r} steps")
    return arrival
