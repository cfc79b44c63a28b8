"""The scatter plot of measured against predicted times."""

import xml.etree.ElementTree as ElementTree

import pytest

from instgenie.bench.scatter import draw_scatter, ticks


def test_a_scatter_puts_equal_times_on_the_diagonal() -> None:
    root = ElementTree.fromstring(
        draw_scatter("a & b", "x", "y", {"one": [(1.0, 1.0), (2.0, 1.0)], "two": [(3.0, 3.0)]})
    )
    size = float(root.attrib["viewBox"].split()[2])
    dots = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in root.iter() if dot.tag.endswith("circle")]
    equal, unequal, _, last, _ = dots
    assert equal[0] + equal[1] == pytest.approx(size, abs=0.2)
    assert last[0] + last[1] == pytest.approx(size, abs=0.2)
    assert unequal[0] + unequal[1] > size  # below the diagonal


@pytest.mark.parametrize(
    ("most", "expected"), [(1.0, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0.037, [0, 0.005, 0.01]), (962.0, [0, 200, 400])]
)
def test_ticks_are_round(most: float, expected: list[float]) -> None:
    found = ticks(most)
    assert found[: len(expected)] == pytest.approx(expected)
    assert 4 <= len(found) <= 11
    assert max(found) <= most
