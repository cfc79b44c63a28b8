"""P95 of simulated clusters as the rate of arrivals grows: the table and the chart of it."""

from instgenie.bench.plots import Chart, Series
from instgenie.bench.reproduce.axes import at_values, decades
from instgenie.bench.reproduce.section import Table, row
from instgenie.bench.reproduce.traffic import Latencies

Found = dict[tuple[str, float], Latencies]  # by name and rate


def sweep_table(part: str, title: str, about: str, found: Found) -> Table:
    rates = list(dict.fromkeys(rate for _, rate in found))
    names = dict.fromkeys(name for name, _ in found)
    rows = [row(part, name, *(f"{found[name, rate].p95:.2f}" for rate in rates), key=(about, name)) for name in names]
    return Table(title, (about, *(f"{rate:.2f}/s" for rate in rates)), rows)


def sweep_chart(title: str, found: Found) -> Chart:
    names = dict.fromkeys(name for name, _ in found)
    series = [Series(name, [(rate, one.p95) for (own, rate), one in found.items() if own == name]) for name in names]
    rates = [round(rate, 2) for _, rate in found]
    seconds = [one.p95 for one in found.values()]
    return Chart(title, at_values("edits a second", rates), decades("P95, seconds", seconds), series)
