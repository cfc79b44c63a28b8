"""Mask ratios: three distributions measured in production, as quantiles, or a file of ratios.

`production`: 970 face-swap templates (mean .112). `inpaint`: 1,918 inpainting requests (mean .354). `retouch`: 1,870
retouching requests (mean .029). The data is behind figure 3 of the InstGenIE paper.
"""

import ast
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from instgenie.errors import WorkloadError

# percentiles
PLACES = (0, 1, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90, 95, 97, 98, 99, 99.5, 100)
QUANTILES: dict[str, tuple[float, ...]] = {
    "production": (
        0.0157, 0.0208, 0.0376, 0.0484, 0.0547, 0.0612, 0.0673, 0.0722, 0.0761, 0.0822, 0.0884, 0.0952, 0.1028,
        0.1103, 0.1192, 0.1278, 0.139, 0.1545, 0.1768, 0.2082, 0.2446, 0.2775, 0.3, 0.3203, 0.3424, 0.4209,
    ),
    "inpaint": (
        0.0, 0.0039, 0.0183, 0.0599, 0.1295, 0.1499, 0.1644, 0.1758, 0.186, 0.1952, 0.2073, 0.2206, 0.2333,
        0.2514, 0.2819, 0.3425, 0.6121, 0.7572, 0.8259, 0.8729, 0.9164, 0.9374, 0.9514, 0.9635, 0.9795, 0.9998,
    ),
    "retouch": (
        0.0016, 0.0027, 0.0031, 0.0088, 0.0121, 0.0134, 0.015, 0.0166, 0.0181, 0.0194, 0.0207, 0.0226, 0.0253,
        0.028, 0.0315, 0.0343, 0.0377, 0.0413, 0.0465, 0.0532, 0.0653, 0.0769, 0.0825, 0.1029, 0.1405, 0.386,
    ),
}  # fmt: skip


def draw_ratios(source: str, num: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """Draw ratios from a named distribution, interpolating its quantiles, or from the ratios in a file."""
    if source in QUANTILES:
        return np.interp(generator.random(num), np.array(PLACES) / 100, QUANTILES[source])
    return generator.choice(read_ratios(source), num)


def read_ratios(source: str) -> tuple[float, ...]:
    """Read a NumPy array, a list in brackets, or numbers separated by white space."""
    path = Path(source)
    try:
        if path.suffix == ".npy":
            values = np.load(path, allow_pickle=False).ravel().tolist()
        else:
            text = path.read_text()
            values = ast.literal_eval(text.strip()) if text.lstrip().startswith("[") else text.split()
        ratios = tuple(sorted(float(value) for value in values))
    except (OSError, ValueError, TypeError, SyntaxError):
        known = ", ".join(QUANTILES)
        raise WorkloadError(f"mask ratios {source!r}: {known}, or a file of numbers, is expected") from None
    if not ratios or not 0 <= ratios[0] <= ratios[-1] <= 1:
        raise WorkloadError(f"the mask ratios in {source} are not numbers from 0 to 1")
    return ratios
