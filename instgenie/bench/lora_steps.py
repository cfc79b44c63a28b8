"""What LoRAs cost a step: a batch of edits without any, with another for each, added as products or in weights of their
own, and with one for all, which is merged.

    python -m instgenie.bench.lora_steps --model dummy:flux.1-dev --batch 8 --ranks 16,64

The LoRAs patch every linear layer of the blocks. Their numbers are the same everywhere, which makes no difference to
the time. A step is measured from its beginning until the device is done with it. Of each way a few steps are taken: the
first ones warm up, are captured, merged and copied. Rows are printed as they are found. `--products` compares the
products with weights of their own, one by one, with those of the layers.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from instgenie.adapters.applied import AppliedLoras, PatchableLayers, apply_loras
from instgenie.adapters.copies import WeightCopies
from instgenie.adapters.keys import NETWORK
from instgenie.adapters.lora import Lora
from instgenie.bench.adapter_files import write_loras
from instgenie.bench.markdown import markdown_table
from instgenie.engine.adapting import make_tiers
from instgenie.engine.captures import Captures
from instgenie.engine.copying import Copying
from instgenie.engine.graphs import make_graphs
from instgenie.engine.loop import Engine, free_memory
from instgenie.engine.merging import MIN_STEPS_LEFT, MIN_STEPS_TOGETHER, Merging
from instgenie.engine.register import make_activations, name_key, observe_span, reuse
from instgenie.engine.warm import blank_job, sample_edit
from instgenie.jobs.job import Job
from instgenie.kernels.grouped_linear import Blocks, grouped_linear, launch_grouped
from instgenie.kernels.low_rank import LowRankRows
from instgenie.kernels.switch import runs_fused
from instgenie.machine.clock import now
from instgenie.machine.device_memory import available_bytes
from instgenie.models.family import PartKind
from instgenie.models.layers import linear
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.types import LoraUse

NUM_WARM_UPS = MIN_STEPS_TOGETHER + 1  # one runs uncaptured, one is captured, and LoRAs are merged
NUM_MEASURED = 3
NUM_STEPS = max(NUM_WARM_UPS + NUM_MEASURED, MIN_STEPS_TOGETHER + MIN_STEPS_LEFT)
NUM_CALLS = 20  # of a product
OTHER_BLOCKS = (
    Blocks(64, 128, 64, num_warps=4, num_stages=4),
    Blocks(128, 128, 64, num_warps=4, num_stages=3),
    Blocks(128, 128, 64, num_warps=8, num_stages=3),
    Blocks(128, 128, 64, num_warps=8, num_stages=4),
    Blocks(128, 256, 64, num_warps=8, num_stages=3),
    Blocks(128, 256, 64, num_warps=8, num_stages=4),
    Blocks(256, 128, 64, num_warps=8, num_stages=3),
)
KINDS = ("dense", "cached")
PRODUCTS, MERGED = "another for each edit", "one for all, merged"
OWN_WEIGHTS = "another for each edit, weights of their own"
COPIES_SHARE = 0.7  # of the device's free memory, for weights of their own
NETWORK_ALONE: frozenset[PartKind] = frozenset({"network"})  # whose weights are needed


def make_loras(model: Model, rank: int, num: int) -> list[AppliedLoras]:
    """LoRAs in memory of their own each."""
    with tempfile.TemporaryDirectory(prefix="instgenie-bench-") as folder:
        [path] = write_loras(Path(folder), model, rank, 1)
        tiers = make_tiers(model, sys.maxsize, sys.maxsize)
        [(first, _)] = tiers.fetch([LoraUse(path.stem, 1.0, str(path), path.stem)]).result()
        tiers.close()
    others = [Lora(first.memory.clone(), first.pieces) for _ in range(num - 1)]
    layers = PatchableLayers({NETWORK: model.network})
    return [apply_loras(layers, [(lora, 1.0)]) for lora in (first, *others)]


def make_jobs(
    model: Model, num_jobs: int, kinds: Sequence[str] = KINDS, num_steps: int = NUM_STEPS
) -> dict[str, list[Job]]:
    """Edits that compute every token, and edits that read a template."""
    edit = replace(sample_edit(model), steps=num_steps)
    job = blank_job(edit, model)
    found = {"dense": job}
    if "cached" in kinds:
        key = name_key("", "", edit, model, "kv", "model")
        found["cached"] = reuse(replace(job), make_activations(key, observe_span(job, model, key, key.slots), model))
    return {kind: [replace(found[kind]) for _ in range(num_jobs)] for kind in kinds}


def step_seconds(
    model: Model,
    jobs: Sequence[Job],
    loras: Sequence[AppliedLoras | None],
    merges: bool,
    copying: Copying | None = None,
) -> float:
    """The median step, of those behind the warm-ups."""
    engine = Engine(model, len(jobs), graphs=make_graphs(model), merging=Merging(merges), copying=copying)
    for job, own in zip(jobs, loras, strict=True):
        engine.join(replace(job, loras=own))
    found: list[float] = []
    for _ in range(NUM_WARM_UPS + NUM_MEASURED):
        start = now(model.device)
        engine.step()
        found.append(now(model.device) - start)
    assert not merges or engine.merging.merged
    engine.merging.undo()
    return statistics.median(found[NUM_WARM_UPS:])


def copy_seconds(model: Model, loras: AppliedLoras) -> float:
    """The time to copy the weights for a set of LoRAs."""
    plan, found = Copying().plan(loras), 0.0
    for _ in range(2):  # the first one compiles
        start = now(model.device)
        WeightCopies(plan, loras.low_rank)
        found = now(model.device) - start
    return found


def make_copying(model: Model) -> Copying:
    """Copies in most of what is free on the device."""
    free_memory(model.device)
    return Copying(int(min(COPIES_SHARE * available_bytes(model.device), sys.maxsize)))


def measure(model: Model, num_jobs: int, ranks: Sequence[int]) -> Iterator[list[str]]:
    """Yield a heading and a row per kind of edit, rank and way."""
    yield ["edits", "rank", "LoRAs", "ms per step", "against none", "GiB of copies", "ms to copy a set"]
    loras = {rank: make_loras(model, rank, num_jobs) for rank in ranks}
    for kind, jobs in make_jobs(model, num_jobs).items():
        none = step_seconds(model, jobs, [None] * num_jobs, merges=False)
        yield [kind, "", "none", f"{1000 * none:.1f}", "", "", ""]
        for rank in ranks:
            each, copying = loras[rank], make_copying(model)
            num_bytes = num_jobs * copying.plan(each[0]).num_bytes
            ways: dict[str, tuple[list[AppliedLoras], bool, Copying | None]]
            ways = {PRODUCTS: (each, False, None), MERGED: (each[:1] * num_jobs, True, None)}
            if num_bytes <= copying.max_bytes:
                ways[OWN_WEIGHTS] = each, False, copying
            else:
                yield [kind, str(rank), OWN_WEIGHTS, "no room", "", f"{num_bytes / 2**30:.1f}", ""]
            for way, (own, merges, keeps) in ways.items():
                seconds = step_seconds(model, jobs, own, merges, keeps)
                found = [kind, str(rank), way, f"{1000 * seconds:.1f}", f"{seconds / none - 1:+.1%}", "", ""]
                if keeps:
                    found[-2:] = f"{keeps.num_bytes / 2**30:.1f}", f"{1000 * copy_seconds(model, each[0]):.1f}"
                yield found


@dataclass(frozen=True)
class ProductRecorder:
    """Stands in for products with weights of their own, and remembers one of each shape: rows, inputs, outputs."""

    calls: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor | None, LowRankRows, int]] = field(
        default_factory=dict
    )
    counts: Counter[tuple[int, int, int]] = field(default_factory=Counter)

    def __call__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, whose: LowRankRows, number: int) -> Tensor:
        shape = len(rows), rows.shape[1], len(weight)
        self.calls.setdefault(shape, (rows, weight, bias, whose, number))
        self.counts[shape] += 1
        return grouped_linear(rows, weight, bias, whose, number)


def measure_products(model: Model, num_jobs: int, rank: int) -> Iterator[list[str]]:
    """Yield a heading and a row per shape of the products of a step whose edits have weights of their own, in µs. On a
    GPU other blocks than those that are chosen are measured, too."""
    loras, edits = make_loras(model, rank, num_jobs), make_jobs(model, num_jobs)
    blocks = OTHER_BLOCKS if runs_fused(edits["dense"][0].latents) else ()
    heads = ["edits", "rows", "inputs", "outputs", "a step", "the model's weight", "weights of their own"]
    yield [*heads, *("×".join(map(str, one)) for one in blocks)]
    for kind, jobs in edits.items():
        engine, recorder = Engine(model, num_jobs, copying=make_copying(model)), ProductRecorder()
        for job, own in zip(jobs, loras, strict=True):
            engine.join(replace(job, loras=own))
        with patch.object(linear, "grouped_linear", recorder):
            engine.step()
        totals = [0.0] * (2 + len(blocks))
        for shape, args in recorder.calls.items():
            calls = [partial(F.linear, *args[:3]), partial(grouped_linear, *args)]
            calls += [partial(launch_grouped, *args, one) for one in blocks]
            found, count = [1e6 * call_seconds(model, call) for call in calls], recorder.counts[shape]
            totals = [total + count * one for total, one in zip(totals, found, strict=True)]
            yield [kind, *map(str, (*shape, count)), *(f"{one:.0f}" for one in found)]
        yield [kind, "all", "", "", str(recorder.counts.total()), *(f"{total:.0f}" for total in totals)]


def call_seconds(model: Model, call: Callable[[], Tensor]) -> float:
    """The time of one of several calls, which are captured, so that no launch is waited for."""

    def several() -> None:
        for _ in range(NUM_CALLS):
            call()

    repeat = Captures(model.device, 1).record(several).replay if model.device.type == "cuda" else several
    repeat()
    start = now(model.device)
    repeat()
    return (now(model.device) - start) / NUM_CALLS


def print_rows(rows: Iterator[list[str]]) -> None:
    """Print a table row by row."""
    print(markdown_table([next(rows), next(rows)]), end="", flush=True)
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="what LoRAs cost a step")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--ranks", type=lambda text: [int(one) for one in text.split(",")], default=[16, 64])
    parser.add_argument("--products", action="store_true", help="compare single products, too")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    with torch.inference_mode():
        model = load(options.model, options.device, weights=NETWORK_ALONE)
        print_rows(measure(model, options.batch, options.ranks))
        if options.products:
            print()
            print_rows(measure_products(model, options.batch, options.ranks[0]))
    print(f"{options.batch} edits, in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
