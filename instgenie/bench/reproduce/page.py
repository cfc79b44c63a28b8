"""Renders sections as one HTML page without scripts or other files, light and dark. Every table row has an anchor."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from instgenie.bench.files import write_text
from instgenie.bench.machine import Machine, machine_text
from instgenie.bench.plots import COLOURS, GRID, INK, PALE
from instgenie.bench.reproduce.section import Section, Table
from instgenie.errors import InstGenieError

PAPER = "#ffffff"
DARK_COLOURS = ("#58a6ff", "#ff7b72", "#56d364", "#bc8cff", "#ffa657", "#39c5cf", "#f778ba", "#b1bac4", "#e3b341")
STYLE = """
:root { color-scheme: light dark; --ink: %(INK)s; --pale: %(PALE)s; --grid: %(GRID)s; --paper: #ffffff;
  --mark: #fff8c5; --link: #0b6bcb; %(LIGHT)s }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --pale: #9198a1; --grid: #30363d; --paper: #0d1117;
  --mark: #3b2e0a; --link: #58a6ff; %(DARK)s } }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 60rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
h1 { font-size: 1.9rem; margin: 0 0 .25rem } h2 { font-size: 1.35rem; margin: 3rem 0 .5rem }
h2 a, td a { color: inherit; text-decoration: none } a { color: var(--link) }
h3 { font-size: 1rem; margin: 1.5rem 0 .4rem }
.pale, caption { color: var(--pale) } .found { font-weight: 600 }
nav ul { columns: 2; padding-left: 1.1rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap }
th { font-weight: 600; color: var(--pale) } th:first-child, td:first-child { text-align: left }
tr:target { background: var(--mark) }
figure { margin: 1.2rem 0 } svg { max-width: 100%%; height: auto; display: block }
details summary { cursor: pointer; color: var(--pale) }
"""


def write_page(sections: Sequence[tuple[Section, float]], machine: Machine, path: Path, names: str = "all") -> None:
    """Write sections, each with the seconds it took, as one page."""
    anchors = [anchor for section, _ in sections for anchor in section.anchors]
    twice = sorted({anchor for anchor in anchors if anchors.count(anchor) > 1})
    assert not twice, twice
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(render(sections, machine, names), path)
    except OSError as error:
        raise InstGenieError(f"{path} cannot be written: {error.strerror}") from None


def render(sections: Sequence[tuple[Section, float]], machine: Machine, names: str) -> str:
    facts = escape(machine_text(machine))
    links = "".join(f'<li><a href="#{section.name}">{escape(section.title)}</a></li>' for section, _ in sections)
    minutes = sum(seconds for _, seconds in sections) / 60
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>InstGenIE, measured</title>',
        f"<style>{style()}</style></head><body>",
        "<h1>InstGenIE, measured</h1>",
        '<p class="pale">The tables and figures of the paper, measured again with this software: '
        f"<code>instgenie bench reproduce {escape(names)}</code>. {facts}. It took {minutes:.1f} minutes.</p>",
        f"<nav><ul>{links}</ul></nav>",
        *(render_section(section, seconds) for section, seconds in sections),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def style() -> str:
    def names(colours: Sequence[str]) -> str:
        return " ".join(f"--c{index}: {colour};" for index, colour in enumerate(colours))

    return STYLE % {"INK": INK, "PALE": PALE, "GRID": GRID, "LIGHT": names(COLOURS), "DARK": names(DARK_COLOURS)}


def render_section(section: Section, seconds: float) -> str:
    findings = "".join(f'<p class="found">{escape(finding)}</p>' for finding in section.findings)
    charts = "".join(f"<figure>{themed(chart.svg())}</figure>" for chart in section.charts)
    return (
        f'<section id="{section.name}"><h2><a href="#{section.name}">{escape(section.title)}</a></h2>'
        f'<p><span class="pale">The paper ({escape(section.name)}):</span> {escape(section.paper)}</p>'
        f'<p><span class="pale">Here:</span> {escape(section.here)} <span class="pale">{seconds:.0f} s.</span></p>'
        f"{findings}{charts}{''.join(render_table(table) for table in section.tables)}</section>"
    )


def render_table(table: Table) -> str:
    heads = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join(
        f'<tr id="{row.anchor}">'
        + "".join(
            f'<td><a href="#{row.anchor}">{escape(cell)}</a></td>' if not place else f"<td>{escape(cell)}</td>"
            for place, cell in enumerate(row.cells)
        )
        + "</tr>"
        for row in table.rows
    )
    return (
        f'<h3>{escape(table.title)}</h3><div class="wide"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def themed(svg: str) -> str:
    """Replace the fixed colours of a chart by the page's own."""
    swaps = {INK: "--ink", PALE: "--pale", GRID: "--grid", PAPER: "--paper"}
    swaps |= {colour: f"--c{index}" for index, colour in enumerate(COLOURS)}
    for colour, name in swaps.items():
        svg = svg.replace(f"'{colour}'", f"'var({name})'")
    return svg
