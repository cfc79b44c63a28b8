"""A scatter plot as SVG text, with a diagonal on which both values are equal."""

import math
from collections.abc import Mapping, Sequence
from html import escape

SIDE, MARGIN = 480, 70
COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8d5a97")

Points = Mapping[str, Sequence[tuple[float, float]]]  # name -> x and y per point


def draw_scatter(title: str, x_name: str, y_name: str, points: Points) -> str:
    most = 1.05 * max(value for series in points.values() for point in series for value in point)
    end = MARGIN + SIDE
    size = SIDE + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" font-family="sans-serif" font-size="13">',
        f'<rect width="{size}" height="{size}" fill="white"/>',
        label(title, size / 2, MARGIN / 2),
        label(x_name, size / 2, size - 15),
        f'<g transform="rotate(-90 18 {size / 2})">{label(y_name, 18, size / 2)}</g>',
        f'<rect x="{MARGIN}" y="{MARGIN}" width="{SIDE}" height="{SIDE}" fill="none" stroke="#888"/>',
        f'<line x1="{MARGIN}" y1="{end}" x2="{end}" y2="{MARGIN}" stroke="#bbb" stroke-dasharray="5 4"/>',
    ]
    for value in ticks(most):
        at = SIDE * value / most
        parts += [label(f"{value:g}", MARGIN + at, end + 20), label(f"{value:g}", MARGIN - 10, end - at + 4, "end")]
    for index, (name, series) in enumerate(points.items()):
        colour = COLOURS[index % len(COLOURS)]
        parts += [dot(MARGIN + SIDE * x / most, end - SIDE * y / most, colour) for x, y in series]
        row = MARGIN + 22 + 20 * index
        parts += [dot(MARGIN + 18, row - 4, colour), label(name, MARGIN + 30, row, "start")]
    return "\n".join([*parts, "</svg>\n"])


def ticks(most: float) -> list[float]:
    """Return at least four round numbers from 0 up to `most`."""
    power = 10 ** math.floor(math.log10(most))
    step = next(part * power for part in (2, 1, 0.5, 0.2) if most / (part * power) >= 4)
    return [round(count * step, 9) for count in range(int(most / step) + 1)]


def dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}" fill-opacity="0.75"/>'


def label(text: str, x: float, y: float, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#222">{escape(text)}</text>'
