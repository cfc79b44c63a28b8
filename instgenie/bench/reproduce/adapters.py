"""SwiftDiffusion's main figures: edits with ControlNets and LoRAs against diffusers, and LoRAs loaded behind steps."""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from instgenie.bench.adapted import AdaptedEngine, with_adapters
from instgenie.bench.adapter_files import write_controlnets, write_loras
from instgenie.bench.adapter_mix import RequestAdapters, read_mixes
from instgenie.bench.plots import Chart, Series
from instgenie.bench.reproduce.axes import at_values, linear
from instgenie.bench.reproduce.lab import Lab
from instgenie.bench.reproduce.section import Row, Section, Table, row, times
from instgenie.bench.stock_adapters import StockAdapters
from instgenie.engine.lora_shelf import LoraShelf
from instgenie.engine.prepare import prepare
from instgenie.models.controlnet import ControlNet
from instgenie.types import Edit

NAME = "adapters"
# ControlNets and LoRAs of an edit
COMBINATIONS = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (3, 2))
RANK, LARGE_RANK = 16, 64
RATIO = 0.2
MOST_CONTROLS, MOST_LORAS = (max(counts) for counts in zip(*COMBINATIONS, strict=True))
MAIN = (1, 2)


@dataclass(frozen=True)
class AdaptedTimes:
    """Seconds of one edit, and edits in a second."""

    diffusers: float
    dense: float
    masked: float
    diffusers_rate: float
    rate: float


@dataclass(eq=False)
class AdapterBench:
    """Systems over one model, with files for every edit of the largest batch."""

    lab: Lab
    loras: list[Path]
    large: list[Path]  # of a larger rank
    controlnets: list[Path]

    def __post_init__(self) -> None:
        self.ours, self.stock = AdaptedEngine(self.lab.model), StockAdapters(self.lab.model)

    def edits(self, num: int, num_controls: int, num_loras: int, ratio: float) -> list[Edit]:
        """Edits with LoRAs of their own each; they share ControlNets."""
        files = [self.loras[number * num_loras : (number + 1) * num_loras] for number in range(num)]
        return [with_adapters(self.lab.edit(ratio), own, self.controlnets[:num_controls]) for own in files]

    def best(self, run: Callable[[], float]) -> float:
        """The least of the repetitions. The first warms up; on a GPU the next one captures the passes that an edit
        makes once."""
        num = max(self.lab.scale.repeats, 1) + (self.lab.model.device.type == "cuda")
        return min(run() for _ in range(num))

    def run_ours(self, edits: Sequence[Edit], reuses: bool) -> float:
        """With LoRAs that are on disk at first."""
        return self.best(lambda: self.ours.run(edits, LoraShelf(self.lab.model), reuses))

    def run_stock(self, edits: Sequence[Edit]) -> float:
        first = edits[0]
        hint: Tensor | None = None
        nets: list[ControlNet] = []
        if first.controls:
            plain = with_adapters(self.lab.edit(1.0), [], self.controlnets[:1])
            hint = prepare(plain, self.lab.model).controls[0].hint
            nets = [self.ours.controls.shelf.take(use) for use in first.controls]
        loras = [Path(use.name) for use in first.loras]
        return self.best(lambda: self.stock.run(edits, loras, nets, hint))

    def measure(self, num_controls: int, num_loras: int) -> AdaptedTimes:
        num = self.lab.scale.batches[-1]
        [whole] = self.edits(1, num_controls, num_loras, 1.0)
        masked = self.edits(num, num_controls, num_loras, RATIO)
        stock = self.run_stock([whole])
        # a batch of diffusers has the same LoRAs for all, so edits with others run one after the other
        rate = 1 / stock if num_loras else num / self.run_stock(self.edits(num, num_controls, 0, 1.0))
        return AdaptedTimes(
            diffusers=stock,
            dense=self.run_ours([whole], reuses=False),
            masked=self.run_ours(masked[:1], reuses=True),
            diffusers_rate=max(rate, 1 / stock),
            rate=num / self.run_ours(masked, reuses=True),
        )

    def measure_mix(self, mix: Sequence[RequestAdapters]) -> float:
        """Edits in a second of a batch whose edits name what requests name; there are fewer files than names."""
        edits = []
        for number, request in enumerate(mix):
            first = number * MOST_LORAS
            loras = self.loras[first : first + len(request.loras)]
            scales = [scale for _, scale in request.loras]
            controls = self.controlnets[: len(request.controlnets)]
            edits.append(with_adapters(self.lab.edit(RATIO), loras, controls, scales))
        return len(edits) / self.run_ours(edits, reuses=True)

    def loading(self, path: Path) -> tuple[float, float, float]:
        """Median seconds of an edit whose LoRA is in memory, comes from disk behind its first steps, and comes from
        disk while it waits."""
        edit = with_adapters(self.lab.edit(RATIO), [path], [])
        kept = LoraShelf(self.lab.model)
        found: list[list[float]] = [[], [], []]
        for number in range(max(self.lab.scale.repeats, 1) + 1):
            near = self.ours.run([edit], kept, reuses=True)
            hidden = self.ours.run([edit], LoraShelf(self.lab.model), reuses=True)
            waiting = self.ours.run([edit], LoraShelf(self.lab.model), reuses=True, hides=False)
            if number:  # the first warms up
                for seconds, own in zip((near, hidden, waiting), found, strict=True):
                    own.append(seconds)
        near, hidden, waiting = (statistics.median(own) for own in found)
        return near, hidden, waiting


def run(lab: Lab) -> Section:
    num = lab.scale.batches[-1]
    mixes = {name: [shortened(one) for one in mix] for name, mix in read_mixes(lab.adapter_trace).items()}
    with tempfile.TemporaryDirectory(prefix="instgenie-bench-") as name:
        folder = Path(name)
        lab.tell("writing LoRAs and ControlNets")
        large = folder / "large"
        large.mkdir()
        bench = AdapterBench(
            lab,
            write_loras(folder, lab.model, RANK, num * MOST_LORAS),
            write_loras(large, lab.model, LARGE_RANK, 1),
            write_controlnets(folder, lab.model, MOST_CONTROLS),
        )
        found = {}
        for combination in COMBINATIONS:
            lab.tell(f"edits with {label(*combination)}")
            found[combination] = bench.measure(*combination)
        lab.tell("mixed batches")
        mixed = [mix_row(bench, name, mix, found) for name, mix in mixes.items()]
        lab.tell("loading LoRAs")
        loads = [load_row(bench, rank, path) for rank, path in ((RANK, bench.loras[0]), (LARGE_RANK, bench.large[0]))]
    main = found[MAIN]
    return Section(
        name=NAME,
        title="LoRAs and ControlNets",
        paper="SwiftDiffusion: with one ControlNet and two LoRAs an edit is up to 5 times as fast as with diffusers, "
        "on two to eight GPUs; loading a LoRA adds 0.1 s where it is hidden behind the first steps.",
        here=f"One device, {lab.scale.steps} steps, up to the final latents. LoRAs of rank {RANK} patch all linear "
        "layers of the blocks, lie on disk when an edit begins, and are read inside the measured time; ControlNets are "
        "in memory. diffusers merges its LoRAs before the edit and runs ControlNets in line; a batch of its edits has "
        f"one set of LoRAs, so edits with others follow each other. Ours are batches of {num} edits with LoRAs of "
        f"their own each. Masked edits change {RATIO:.0%} of the picture and reuse their own dense steps.",
        tables=[
            Table("One edit, seconds", ("adapters", "diffusers", "every token", "masked", "masked, times as fast"),
                  [latency_row(*one) for one in found.items()]),
            Table("Edits in a second", ("adapters", "diffusers", f"masked, batch of {num}", "times as many"),
                  [rate_row(*one) for one in found.items()]),
            Table(f"A batch of {num} with the adapters of requests, edits in a second",
                  ("requests", "diffusers, expected", "masked", "times as many"), mixed),
            Table("A LoRA that is loaded, seconds of an edit",
                  ("rank", "MB", "in memory", "from disk, hidden", "from disk, waiting"), loads),
        ],
        charts=[chart(found)],
        findings=[
            f"With {label(*MAIN)} a masked edit is {times(main.diffusers / main.masked)} as fast as diffusers, and a "
            f"batch with other LoRAs for each edit serves {times(main.rate / main.diffusers_rate)} as many edits."
        ],
    )  # fmt: skip


def label(num_controls: int, num_loras: int) -> str:
    return f"{num_controls}C/{num_loras}L"


def latency_row(combination: tuple[int, int], found: AdaptedTimes) -> Row:
    cells = (f"{seconds:.3f}" for seconds in (found.diffusers, found.dense, found.masked))
    name = label(*combination)
    return row(NAME, name, *cells, times(found.diffusers / found.masked), key=("edit", name))


def rate_row(combination: tuple[int, int], found: AdaptedTimes) -> Row:
    cells = (f"{rate:.3f}" for rate in (found.diffusers_rate, found.rate))
    name = label(*combination)
    return row(NAME, name, *cells, times(found.rate / found.diffusers_rate), key=("rate", name))


def shortened(request: RequestAdapters) -> RequestAdapters:
    """A request with no more adapters than were measured."""
    return RequestAdapters(request.loras[:MOST_LORAS], request.controlnets[:MOST_CONTROLS])


def mix_row(
    bench: AdapterBench, name: str, mix: Sequence[RequestAdapters], found: dict[tuple[int, int], AdaptedTimes]
) -> Row:
    """diffusers runs these edits one after the other, since their LoRAs differ."""
    seconds = statistics.fmean(found[len(one.controlnets), len(one.loras)].diffusers for one in mix)
    rate = bench.measure_mix(mix[: bench.lab.scale.batches[-1]])
    return row(NAME, name, f"{1 / seconds:.3f}", f"{rate:.3f}", times(rate * seconds), key=("mix", name))


def load_row(bench: AdapterBench, rank: int, path: Path) -> Row:
    seconds = (f"{one:.3f}" for one in bench.loading(path))
    return row(NAME, rank, f"{path.stat().st_size / 1e6:.1f}", *seconds, key=("loading", rank))


def chart(found: dict[tuple[int, int], AdaptedTimes]) -> Chart:
    """By the number of ControlNets, with two LoRAs."""
    most = max(num_loras for _, num_loras in found)
    chosen = {num_controls: one for (num_controls, num_loras), one in found.items() if num_loras == most}
    series = [
        Series("diffusers", [(num, one.diffusers) for num, one in chosen.items()]),
        Series("every token", [(num, one.dense) for num, one in chosen.items()]),
        Series("masked", [(num, one.masked) for num, one in chosen.items()]),
    ]
    values = [seconds for one in chosen.values() for seconds in (one.diffusers, one.dense, one.masked)]
    return Chart(f"One edit with {most} LoRAs", at_values("ControlNets", chosen), linear("seconds", values), series)
