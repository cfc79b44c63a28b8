"""Figure 14: throughput of the engine against batch size."""

from instgenie.bench.engine import SYSTEMS, EngineRow, EngineStudy, measure_engine
from instgenie.bench.plots import Chart, Series
from instgenie.bench.reproduce.axes import doubling, linear
from instgenie.bench.reproduce.lab import Lab
from instgenie.bench.reproduce.section import Section, Table, row, times
from instgenie.bench.systems import CACHED

NAME = "fig14"
DISTRIBUTIONS = ("production", "inpaint")


def run(lab: Lab) -> Section:
    rows: dict[str, list[EngineRow]] = {}
    for masks in DISTRIBUTIONS:
        study = EngineStudy(
            steps=lab.scale.engine_steps,
            repeats=lab.scale.repeats,
            batches=lab.scale.batches,
            mask_ratios=masks,
            systems=SYSTEMS if masks == DISTRIBUTIONS[0] else (CACHED,),
        )
        rows[masks] = measure_engine(
            lab.model, lab.size, study, lambda done, total: lab.tell(f"batches, {done} of {total} runs")
        )
    best = max((one for one in rows[DISTRIBUTIONS[0]] if one.system == CACHED), key=lambda one: one.faster)
    return Section(
        name=NAME,
        title="Engine throughput against batch size",
        paper="Up to three times the throughput of diffusers; FISEdit runs edits with different masks one by one.",
        here=f"Denoising alone, {lab.scale.engine_steps} steps; masks are drawn from a distribution, so that those of "
        "a batch differ. Steps of single jobs are counted: a step of a batch of four counts four times.",
        tables=[table(rows)],
        charts=[chart(rows)],
        findings=[f"{times(best.faster)} the throughput of diffusers at batch {best.batch} with production masks."],
    )


def table(rows: dict[str, list[EngineRow]]) -> Table:
    base = {one.batch: one.steps_per_second / one.faster for one in rows[DISTRIBUTIONS[0]] if one.faster}
    lines = [
        row(
            NAME,
            one.system,
            masks,
            one.batch,
            f"{one.step_ms:.1f}",
            f"{one.steps_per_second:.2f}",
            times(one.steps_per_second / base[one.batch]) if one.batch in base else "",
            key=(one.system, masks, one.batch),
        )
        for masks, own in rows.items()
        for one in own
    ]
    columns = ("system", "masks", "batch", "ms per step", "steps/s", "against diffusers")
    return Table("Steps of single jobs per second", columns, lines)


def chart(rows: dict[str, list[EngineRow]]) -> Chart:
    series = [
        Series(
            system if masks == DISTRIBUTIONS[0] else f"{system}, {masks}",
            [(one.batch, one.steps_per_second) for one in own if one.system == system],
        )
        for masks, own in rows.items()
        for system in dict.fromkeys(one.system for one in own)
    ]
    most = [y for one in series for _, y in one.points]
    batches = [x for one in series for x, _ in one.points]
    return Chart(
        "Throughput", doubling("jobs per batch", batches), linear("steps of single jobs per second", most), series
    )
