"""Charts: well-formed, inside their frame, the right way up."""

import math
from xml.etree import ElementTree

import pytest

from instgenie.bench.plots import HEIGHT, WIDTH, Axis, Chart, Series, Strips


def numbers(svg: str, tag: str, name: str) -> list[float]:
    root = ElementTree.fromstring(svg)
    return [float(element.get(name, "nan")) for element in root.iter(f"{{http://www.w3.org/2000/svg}}{tag}")]


def test_axes_place_values_between_their_ends() -> None:
    assert Axis("x", (), 0, 4).place(1) == 0.25
    assert Axis("x", (), 0.01, 1, log=True).place(0.1) == pytest.approx(0.5)
    assert Axis("x", (), 0, 1).place(7) == 1


def test_a_chart_is_drawn_inside_its_frame() -> None:
    points = [(0.0, 0.2), (0.5, 0.1), (1.0, 0.9)]
    chart = Chart(
        "a < b & c", Axis("x", (0, 1), 0, 1), Axis("y", (0, 1), 0, 1), [Series("s", points, ["one"])], [(0.5, "bar")]
    )
    svg = chart.svg()
    x, y = numbers(svg, "circle", "cx")[:3], numbers(svg, "circle", "cy")[:3]
    assert x == sorted(x)
    assert y[2] < y[0] < y[1]  # up is more
    assert min(x + y) > 0
    assert max(x) < WIDTH
    assert max(y) < HEIGHT
    assert "a &lt; b &amp; c" in svg
    assert len(numbers(svg, "polyline", "x")) == 1


def test_strips_hold_every_point() -> None:
    rows = [("first", [0.9, 1.0, 5.0], "33% above"), ("second", [], "nan above")]
    svg = Strips("seams", Axis("x", (1, 2), 0.5, 3, log=True), rows, (1.15, "1.15")).svg()
    assert len(numbers(svg, "circle", "cx")) == 3
    assert not any(math.isnan(x) for x in numbers(svg, "circle", "cx"))
