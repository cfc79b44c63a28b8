"""The rows of the table of figures, each with the bar it has to pass."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from training.measure.bench import Values

Group = Literal["autoencoder", "removal", "text to image", "edits", "prompts", "cost"]
Verdict = Literal["pass", "miss", ""]
Groups = Mapping[str, Values]  # group -> its figures

DASH = "–"


@dataclass(frozen=True)
class Bar:
    """A range that a figure must lie in. With `of_old` its upper end is a share of the old model's figure, with
    `of_real` it is the figure of real photographs by that name."""

    low: float | None = None
    high: float | None = None
    of_old: float | None = None
    of_real: str | None = None

    def limit(self, old: float | None, real: Values) -> float | None:
        """The upper end; None if there is none, or none yet."""
        if self.of_old is not None:
            return None if old is None else self.of_old * old
        return real.get(self.of_real) if self.of_real else self.high

    def judge(self, value: float, old: float | None, real: Values) -> Verdict:
        limit = self.limit(old, real)
        if math.isnan(value) or (limit is None and self.low is None):
            return ""
        passes = (self.low is None or value >= self.low) and (limit is None or value <= limit)
        return "pass" if passes else "miss"


@dataclass(frozen=True)
class Row:
    group: Group
    name: str
    bar: Bar = Bar()
    places: int = 3  # after the point

    def text(self, value: float | None) -> str:
        return DASH if value is None or math.isnan(value) else f"{value:,.{self.places}f}"

    def bar_text(self, old: float | None, real: Values) -> str:
        bar, limit = self.bar, self.bar.limit(old, real)
        if bar.of_old is not None:
            share = "half of" if bar.of_old == 0.5 else f"{bar.of_old:g} ×"
            return f"≤ {share} old" + (f": {self.text(limit)}" if limit is not None else "")
        if bar.of_real:
            return "≤ real boxes" + (f": {self.text(limit)}" if limit is not None else "")
        if bar.low is not None and limit is not None:
            return f"{bar.low:g} to {limit:g}"
        return f"≥ {bar.low:g}" if bar.low is not None else f"≤ {limit:g}" if limit is not None else ""


HALF = Bar(of_old=0.5)
NO_ANIMAL = Bar(of_real="animal seen, real boxes")
SEAM = Bar(high=1.05)
SATURATION = Bar(low=0.9, high=1.1)

ROWS = (
    Row("autoencoder", "LPIPS at 192 px, photographs", Bar(high=0.08)),
    Row("autoencoder", "LPIPS at 192 px, scenes", Bar(high=0.08)),
    Row("autoencoder", "LPIPS at 256 px, photographs"),
    Row("autoencoder", "LPIPS at 256 px, scenes"),
    Row("autoencoder", "PSNR, photographs", Bar(low=28.5), 2),
    Row("autoencoder", "PSNR, scenes", Bar(low=28.5), 2),
    Row("autoencoder", "SSIM, photographs"),
    Row("autoencoder", "SSIM, scenes"),
    Row("autoencoder", "KID of reconstructions", places=4),
    Row("removal", "LPIPS", HALF),
    Row("removal", "LPIPS, tight", HALF),
    Row("removal", "LPIPS, grown", HALF),
    Row("removal", "LPIPS, loose", HALF),
    Row("removal", "KID", HALF, 4),
    Row("removal", "KID, tight", HALF, 4),
    Row("removal", "KID, grown", HALF, 4),
    Row("removal", "KID, loose", HALF, 4),
    Row("removal", "animal seen", NO_ANIMAL),
    Row("removal", "animal seen, tight"),
    Row("removal", "animal seen, grown"),
    Row("removal", "animal seen, loose"),
    Row("removal", "LPIPS, from surroundings"),
    Row("removal", "KID, from surroundings", places=4),
    Row("removal", "animal seen, from surroundings", NO_ANIMAL),
    Row("text to image", "KID", Bar(high=0.008), 4),
    Row("text to image", "probe accuracy"),
    Row("text to image", "nearest training photograph, median"),
    Row("edits", "KID", HALF, 4),
    *(Row("edits", f"KID, {kind}", places=4) for kind in ("outline", "box", "content box", "ellipse", "scribble")),
    *(Row("edits", f"border jump, {kind}", SEAM) for kind in ("outline", "box", "content box", "ellipse", "scribble")),
    Row("edits", "saturation", SATURATION),
    *(Row("edits", f"LPIPS, {kind}") for kind in ("outline", "box", "content box")),
    *(Row("edits", f"probe accuracy, {kind}") for kind in ("outline", "box", "content box")),
    Row("prompts", "outline, another breed", Bar(low=0.8), 2),
    Row("prompts", "outline, another species", Bar(low=0.8), 2),
    Row("prompts", "box, another flower", Bar(low=0.65), 2),
    Row("prompts", "box, another garment", Bar(low=0.4), 2),
    Row("cost", "decoder, thousand FLOPs a pixel", Bar(of_old=1.01), 1),
    Row("cost", "decoder, milliseconds", Bar(of_old=1.05), 1),
    Row("cost", "dense edit, seconds", Bar(high=4), 2),
    Row("cost", "parameters of the transformer, million", Bar(high=48), 1),
    Row("cost", "parameters, million", places=1),
    Row("cost", "package, MiB", Bar(high=112), 1),
    Row("cost", "largest file, MiB", Bar(high=16), 1),
)
GROUPS: tuple[Group, ...] = tuple(dict.fromkeys(row.group for row in ROWS))
