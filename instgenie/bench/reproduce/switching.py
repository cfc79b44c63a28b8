"""SwiftDiffusion's figures on switching adapters: what is found in memory, and what loading costs."""

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from instgenie.adapters.registry import SHARED, LoraRegistry
from instgenie.bench.adapter_files import write_loras
from instgenie.bench.adapter_mix import NUM_REQUESTS, RequestAdapters, hit_ratio, read_mixes
from instgenie.bench.plots import Chart, Series
from instgenie.bench.reproduce.axes import decades, linear
from instgenie.bench.reproduce.lab import Lab
from instgenie.bench.reproduce.section import Row, Section, Table, ms, row
from instgenie.engine.adapting import make_tiers
from instgenie.types import LoraUse

NAME = "switching"
SIZES = (10, 30, 100, 300, 1000, 3000)  # LoRAs that are kept
CONTROL_SIZES = (1, 2, 5, 10, 20)
RANK = 16


def run(lab: Lab) -> Section:
    lab.tell("drawing requests")
    mixes = read_mixes(lab.adapter_trace)
    lab.tell("loading LoRAs")
    num_bytes, seconds = measure_load(lab)
    hits = {name: [hit_ratio(lora_ids(mix), size) for size in SIZES] for name, mix in mixes.items()}
    at = SIZES.index(300)
    first = hits["Table 1"][at]
    return Section(
        name=NAME,
        title="Switching LoRAs and ControlNets",
        paper="SwiftDiffusion: requests name 7,500 LoRAs, few of them often, and nearly all name ControlNets; an LRU "
        "keeps popular ones in memory.",
        here=f"The adapters of {NUM_REQUESTS:,} requests drawn as Table 1 of that paper describes them"
        + (" and of a trace" if lab.adapter_trace else "")
        + f". Those used last are kept. A LoRA of rank {RANK} of this model has {num_bytes / 1e6:.1f} MB, and comes "
        f"from disk to the device in {ms(seconds)} ms (median).",
        tables=[
            Table("Requests", ("mix", "requests", "LoRAs each", "ControlNets each", "different LoRAs"),
                  [mix_row(name, mix) for name, mix in mixes.items()]),
            Table("LoRAs found in memory, and the mean loading of a request",
                  ("LoRAs kept", "GB", *(f"{name}, {what}" for name in mixes for what in ("found", "ms"))),
                  [size_row(size, number, num_bytes, seconds, mixes, hits) for number, size in enumerate(SIZES)]),
            Table("ControlNets found in memory", ("ControlNets kept", *mixes),
                  [control_row(size, mixes) for size in CONTROL_SIZES]),
        ],
        charts=[chart(hits)],
        findings=[
            f"With {SIZES[at]} LoRAs in memory {first:.0%} of those that requests name are found there, and a request "
            f"loads for {ms((1 - first) * seconds * mean_loras(mixes['Table 1']))} ms on average."
        ],
    )  # fmt: skip


def measure_load(lab: Lab) -> tuple[int, float]:
    """Bytes of a LoRA, and median seconds from a file to the device."""
    with tempfile.TemporaryDirectory(prefix="instgenie-bench-") as name:
        paths = write_loras(Path(name), lab.model, RANK, 1 + 4)
        registry = LoraRegistry({path.stem: str(path) for path in paths})
        uses = registry.resolve([LoraUse(path.stem) for path in paths], SHARED)
        tiers = make_tiers(lab.model, 2**40, 2**40)
        seconds = []
        for use in uses:
            start = time.perf_counter()
            tiers.fetch([use]).result()
            seconds.append(time.perf_counter() - start)
        tiers.close()
    return uses[0].num_bytes, statistics.median(seconds[1:])  # the first warms up


def lora_ids(mix: Sequence[RequestAdapters]) -> Iterator[str]:
    for request in mix:
        yield from (name for name, _ in request.loras)


def mean_loras(mix: Sequence[RequestAdapters]) -> float:
    return statistics.fmean(len(request.loras) for request in mix)


def mix_row(name: str, mix: Sequence[RequestAdapters]) -> Row:
    controls = statistics.fmean(len(request.controlnets) for request in mix)
    different = len(set(lora_ids(mix)))
    cells = f"{len(mix):,}", f"{mean_loras(mix):.2f}", f"{controls:.2f}", f"{different:,}"
    return row(NAME, name, *cells, key=("mix", name))


def size_row(
    size: int,
    number: int,
    num_bytes: int,
    seconds: float,
    mixes: dict[str, list[RequestAdapters]],
    hits: dict[str, list[float]],
) -> Row:
    cells: list[str] = []
    for name, mix in mixes.items():
        found = hits[name][number]
        cells += [f"{found:.1%}", ms((1 - found) * seconds * mean_loras(mix))]
    return row(NAME, f"{size:,}", f"{size * num_bytes / 1e9:.2f}", *cells, key=("loras", size))


def control_row(size: int, mixes: dict[str, list[RequestAdapters]]) -> Row:
    cells = (
        f"{hit_ratio((one for request in mix for one in request.controlnets), size):.1%}" for mix in mixes.values()
    )
    return row(NAME, str(size), *cells, key=("controlnets", size))


def chart(hits: dict[str, list[float]]) -> Chart:
    series = [
        Series(name, [(size, 100 * ratio) for size, ratio in zip(SIZES, found, strict=True)])
        for name, found in hits.items()
    ]
    return Chart("LoRAs found in memory", decades("LoRAs kept", SIZES), linear("percent", [100.0]), series)
