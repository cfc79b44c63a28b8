"""Small charts as SVG text: lines and points over two axes, and strips of points."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 76, 216, 52, 58  # the legend is on the right
INK, PALE, GRID = "#1f2328", "#6e7781", "#e4e7eb"
COLOURS = ("#0b6bcb", "#d1242f", "#1a7f37", "#8250df", "#bf5b04", "#0a7c86", "#b0409b", "#57606a", "#9a6700")
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """The range of an axis and its labelled ticks."""

    name: str
    ticks: Sequence[float]
    low: float
    high: float
    log: bool = False
    form: str = "{:g}"

    def place(self, value: float) -> float:
        """Return the position of a value along the axis, from 0 to 1."""
        scale: Callable[[float], float] = math.log10 if self.log else float
        value = min(max(value, self.low), self.high)
        return (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]
    labels: Sequence[str] = ()  # beside the points
    line: bool = True
    shape: str = "dot"  # or "cross"


@dataclass(frozen=True)
class Chart:
    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    rules: Sequence[tuple[float, str]] = field(default=())  # horizontal lines and their labels

    def svg(self) -> str:
        parts = [*self.frame(), *(part for height, text in self.rules for part in self.rule(height, text))]
        for series, colour in zip(self.series, COLOURS, strict=False):
            parts += self.draw(series, colour)
        return document(self.title, [*parts, *legend([(s.name, s.shape, s.line) for s in self.series])])

    def at(self, point: Point) -> Point:
        x = LEFT + self.x.place(point[0]) * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - self.y.place(point[1]) * (HEIGHT - TOP - BOTTOM)

    def frame(self) -> list[str]:
        parts = []
        for tick in self.y.ticks:
            _, y = self.at((self.x.low, tick))
            parts += [
                line((LEFT, y), (WIDTH - RIGHT, y), GRID),
                text((LEFT - 10, y + 4), self.y.form.format(tick), "end"),
            ]
        for tick in self.x.ticks:
            x, _ = self.at((tick, self.y.low))
            parts += [text((x, HEIGHT - BOTTOM + 20), self.x.form.format(tick), "middle")]
            parts += [line((x, HEIGHT - BOTTOM), (x, HEIGHT - BOTTOM + 5), PALE)]
        parts += [line((LEFT, HEIGHT - BOTTOM), (WIDTH - RIGHT, HEIGHT - BOTTOM), PALE)]
        middle = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
        parts += [text((middle[0], HEIGHT - 14), self.x.name, "middle", INK)]
        parts += [
            f"<text transform='translate(20 {middle[1]:.1f}) rotate(-90)' text-anchor='middle' fill='{INK}' "
            f"font-size='13'>{escape(self.y.name)}</text>"
        ]
        return parts

    def rule(self, height: float, about: str) -> list[str]:
        _, y = self.at((self.x.low, height))
        return [
            line((LEFT, y), (WIDTH - RIGHT, y), INK, dash="5 4"),
            text((WIDTH - RIGHT - 4, y - 5), about, "end", INK, 11),
        ]

    def draw(self, series: Series, colour: str) -> list[str]:
        places = [self.at(point) for point in series.points]
        parts = []
        if series.line and len(places) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'/>")
        parts += [mark(place, colour, series.shape) for place in places]
        parts += [
            text((x + 7, y - 7), label, "start", colour, 11)
            for (x, y), label in zip(places, series.labels, strict=False)
            if label
        ]
        return parts


@dataclass(frozen=True)
class Strips:
    """Rows of points along one axis, one row per name and one point per picture."""

    title: str
    x: Axis
    rows: Sequence[tuple[str, Sequence[float], str]]  # name, values, label at the end of the row
    rule: tuple[float, str]

    def svg(self) -> str:
        height = TOP + 34 * len(self.rows) + BOTTOM
        left, right = 190, 120

        def at(value: float) -> float:
            return left + self.x.place(value) * (WIDTH - left - right)

        bottom = height - BOTTOM
        parts = []
        for tick in self.x.ticks:
            parts += [line((at(tick), TOP), (at(tick), bottom), GRID)]
            parts += [text((at(tick), bottom + 20), self.x.form.format(tick), "middle")]
        parts += [line((at(self.rule[0]), TOP - 6), (at(self.rule[0]), bottom), INK, dash="5 4")]
        parts += [text((at(self.rule[0]) + 5, TOP - 8), self.rule[1], "start", INK, 11)]
        for index, (name, values, behind) in enumerate(self.rows):
            y = TOP + 34 * index + 17
            colour = COLOURS[index % len(COLOURS)]
            parts += [text((left - 14, y + 4), name, "end", INK)]
            for number, value in enumerate(values):
                around = y + ((number * 7) % 15 - 7)  # spread, so that points do not hide each other
                parts.append(f"<circle cx='{at(value):.1f}' cy='{around}' r='2.2' fill='{colour}' fill-opacity='.45'/>")
            parts += [text((WIDTH - right + 14, y + 4), behind, "start")]
        parts += [text(((left + WIDTH - right) / 2, height - 14), self.x.name, "middle", INK)]
        return document(self.title, parts, height)


def document(title: str, parts: Sequence[str], height: int = HEIGHT) -> str:
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}' "
        f"{FONT}>"
        f"<rect width='{WIDTH}' height='{height}' fill='#ffffff'/>"
        f"<text x='24' y='28' font-size='16' font-weight='600' fill='{INK}'>{escape(title)}</text>"
    )
    return "\n".join([head, *parts, "</svg>", ""])


def legend(names: Sequence[tuple[str, str, bool]]) -> list[str]:
    parts = []
    for index, ((name, shape, has_line), colour) in enumerate(zip(names, COLOURS, strict=False)):
        x, y = WIDTH - RIGHT + 18, TOP + 12 + 24 * index
        if has_line:
            parts.append(line((x, y), (x + 22, y), colour, wide=2))
        parts += [mark((x + 11, y), colour, shape), text((x + 30, y + 4), name, "start", INK)]
    return parts


def line(a: Point, b: Point, colour: str, dash: str = "", wide: float = 1) -> str:
    places = f"x1='{a[0]:.1f}' y1='{a[1]:.1f}' x2='{b[0]:.1f}' y2='{b[1]:.1f}'"
    dashes = f" stroke-dasharray='{dash}'" if dash else ""
    return f"<line {places} stroke='{colour}' stroke-width='{wide}'{dashes}/>"


def mark(place: Point, colour: str, shape: str) -> str:
    x, y = place
    if shape == "cross":
        path = f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10"
        return f"<path d='{path}' stroke='{colour}' stroke-width='2.4' fill='none'/>"
    return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4.5' fill='{colour}' stroke='#ffffff' stroke-width='1.2'/>"


def text(place: Point, words: str, anchor: str, colour: str = PALE, size: int = 12) -> str:
    x, y = place
    style = f"text-anchor='{anchor}' fill='{colour}' font-size='{size}'"
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{escape(words)}</text>"
