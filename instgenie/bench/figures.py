"""Figures of the quality study, and the bars that the default quality has to meet. Knows numbers and names."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from instgenie.bench.judge import Scores
from instgenie.bench.variants import DENSE, NAIVE, SKIPPING, SMALL_CROP

RATIOS = (0.05, 0.11, 0.2, 0.35, 0.5)
MAX_BAR_RATIO = 0.35  # the bars are about mask ratios up to this one
BOX_BAR, PICTURE_BAR, JUMP_BAR, JUMP_SHARE_BAR = 0.95, 0.985, 1.15, 0.95
NOISE = 2.0  # standard errors


@dataclass(frozen=True)
class Picture:
    mask_kind: str
    ratio: float
    masked: float  # share of the tokens that is masked


@dataclass(frozen=True)
class Method:
    scores: Scores
    step_ms: dict[float, float]  # by ratio
    sets: dict[str, float]  # KID over all its pictures


@dataclass(frozen=True)
class Figures:
    run: dict[str, str | int | float]
    pictures: list[Picture]
    methods: dict[str, Method]
    qualities: dict[str, str]  # quality -> name of its method
    ceiling: dict[str, float]  # the probe's accuracy on real photographs

    def as_json(self) -> dict[str, Any]:
        """Return every figure of every picture, to five digits."""
        figures: dict[str, Any] = rounded(asdict(self))
        return figures

    def rows(self, ratios: Iterable[float]) -> list[int]:
        chosen = set(ratios)
        return [row for row, picture in enumerate(self.pictures) if picture.ratio in chosen]

    def values(self, name: str, figure: str, ratios: Iterable[float]) -> list[float]:
        """Return a score of one method for every picture of some ratios; pictures without a border have no jump."""
        scores = self.methods[name].scores.get(figure, [])
        found = [scores[row] for row in self.rows(ratios)] if scores else []
        return [value for value in found if not math.isnan(value)]

    def jumps(self, name: str, ratios: Iterable[float]) -> list[float]:
        """Return the jump across the mask's border per picture, as a multiple of the dense edit's."""
        own, dense = (self.methods[which].scores["jump"] for which in (name, DENSE))
        pairs = [(own[row], dense[row]) for row in self.rows(ratios)]
        return [jump / base for jump, base in pairs if base > 0 and not math.isnan(jump)]

    def time(self, name: str, ratios: Iterable[float]) -> float:
        """Return the time of a step, as a share of the dense edit's in the same run."""
        own, dense = self.methods[name].step_ms, self.methods[DENSE].step_ms
        return mean([own[ratio] / dense[ratio] for ratio in ratios if ratio in own])


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits) if hits else math.nan


def bar_ratios(figures: Figures) -> list[float]:
    return [r for r in RATIOS if r <= MAX_BAR_RATIO and figures.rows([r])]


# Methods


def shown_methods(figures: Figures) -> dict[str, str]:
    """Return the competing methods and the names they are shown under."""
    fast, balanced = figures.qualities["fast"], figures.qualities["balanced"]
    cached_y = "y" + balanced.removeprefix("kv")
    shown = {
        DENSE: "dense (`exact`)",
        balanced: f"cached {balanced} (`balanced`)",
        fast: f"cached {fast} (`fast`)",
        cached_y: f"cached {cached_y}",
        NAIVE: "naive: unmasked tokens dropped",
        SKIPPING: "step skipping, equal cost",
        SMALL_CROP: "crop and stitch, margin 32, equal cost",
        "crop, margin 32": "crop and stitch, margin 32",
        "crop, margin 128": "crop and stitch, margin 128",
    }
    return {name: text for name, text in shown.items() if name in figures.methods}


def knob_methods(figures: Figures) -> dict[str, str]:
    """Return every way of reusing K and V."""
    return {name: name for name in figures.methods if name.split(",")[0] == "kv"}


def kept_methods(figures: Figures) -> dict[str, str]:
    """Return the ways to keep the activations of `balanced`: every so many steps, in a format."""
    *_, dense_steps = figures.qualities["balanced"].split(", ")
    names = [name for name in knob_methods(figures) if set(name.split(", ")[1:]) >= {dense_steps} - {"kv"}]
    return {name: name for name in names if not {"caption", "isolated"} & set(name.split(", ")) and "halo" not in name}


# Bars


def bars(figures: Figures) -> list[tuple[str, str, str, bool]]:
    """Return the bars of the balanced quality: name, bar, measured figure, and whether it is met."""
    name, ratios = figures.qualities["balanced"], bar_ratios(figures)
    boxes = [mean(figures.values(name, "ssim_box", [ratio])) for ratio in ratios]
    wholes = [mean(figures.values(name, "ssim", [ratio])) for ratio in ratios]
    quiet = share([jump <= JUMP_BAR for jump in figures.jumps(name, ratios)])
    found = [
        ("SSIM in the box, worst ratio", f"≥ {BOX_BAR}", f"{min(boxes):.4f}", min(boxes) >= BOX_BAR),
        ("SSIM, worst ratio", f"≥ {PICTURE_BAR}", f"{min(wholes):.4f}", min(wholes) >= PICTURE_BAR),
        (
            f"pictures whose jump is at most {JUMP_BAR} of dense",
            f"≥ {JUMP_SHARE_BAR:.0%}",
            f"{quiet:.1%}",
            quiet >= JUMP_SHARE_BAR,
        ),
    ]
    if figures.ceiling:
        found += [against(figures, name, DENSE, "no worse than dense")]
        rivals = {SKIPPING: "better than step skipping", SMALL_CROP: "better than crop and stitch, equal cost"}
        found += [against(figures, name, rival, about) for rival, about in rivals.items()]
    return found


def against(figures: Figures, name: str, rival: str, about: str) -> tuple[str, str, str, bool]:
    """Compare KID and probe of two methods over the same pictures. 'Better' means a better mean, 'no worse' a
    difference within noise."""
    own, other = figures.methods[name], figures.methods[rival]
    kid_gap = own.sets["kid"] - other.sets["kid"]
    rows = figures.rows(bar_ratios(figures))
    gaps = [own.scores["right"][row] - other.scores["right"][row] for row in rows]
    probe_gap = mean(gaps)
    noise = statistics.pstdev(gaps) / math.sqrt(len(gaps))
    slack = 0.0 if rival != DENSE else 1.0
    enough = kid_gap <= slack * NOISE * other.sets["kid_spread"] and probe_gap >= -slack * NOISE * noise
    measured = f"KID × 1000 {1000 * kid_gap:+.1f}, probe {probe_gap:+.3f} ± {noise:.3f}"
    return about, "KID lower, probe higher" if rival != DENSE else "within noise", measured, enough
