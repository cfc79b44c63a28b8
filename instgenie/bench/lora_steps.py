"""What LoRAs cost a step: a batch of edits without any, with another for each, and with one for all, which is merged.

    python -m instgenie.bench.lora_steps --model dummy:flux.1-dev --batch 8 --ranks 16,64

The LoRAs patch every linear layer of the blocks. Their numbers are the same everywhere, which makes no difference to
the time. A step is measured from its beginning until the device is done with it. Of each way a few steps are taken: the
first ones warm up, are captured and merged. Rows are printed as they are found.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from instgenie.adapters.applied import AppliedLoras, apply_loras
from instgenie.adapters.fitting import fit
from instgenie.adapters.header import read_header
from instgenie.adapters.keys import NETWORK
from instgenie.adapters.lora import Lora, read_lora
from instgenie.adapters.plan import make_plan
from instgenie.bench.adapter_files import write_loras
from instgenie.bench.markdown import markdown_table
from instgenie.engine.graphs import make_graphs
from instgenie.engine.loop import Engine
from instgenie.engine.merging import MIN_STEPS_LEFT, MIN_STEPS_TOGETHER, Merging
from instgenie.engine.register import make_activations, name_key, observe_span, reuse
from instgenie.engine.warm import blank_job, sample_edit
from instgenie.jobs.job import Job
from instgenie.machine.clock import now
from instgenie.models.family import PartKind
from instgenie.models.loading.load import load
from instgenie.models.model import Model

NUM_WARM_UPS = MIN_STEPS_TOGETHER + 1  # one runs uncaptured, one is captured, and LoRAs are merged
NUM_MEASURED = 3
NUM_STEPS = max(NUM_WARM_UPS + NUM_MEASURED, MIN_STEPS_TOGETHER + MIN_STEPS_LEFT)
KINDS = ("dense", "cached")
NETWORK_ALONE: frozenset[PartKind] = frozenset({"network"})  # whose weights are needed


def make_loras(model: Model, rank: int, num: int) -> list[AppliedLoras]:
    """LoRAs in memory of their own each."""
    with tempfile.TemporaryDirectory(prefix="instgenie-bench-") as folder:
        [path] = write_loras(Path(folder), model, rank, 1)
        header = read_header(path)
        first = read_lora(path, make_plan(header, fit(header, model.layer_table))).to(model.device)
    others = [Lora(first.memory.clone(), first.pieces) for _ in range(num - 1)]
    return [apply_loras({NETWORK: model.network}, [(lora, 1.0)]) for lora in (first, *others)]


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


def step_seconds(model: Model, jobs: Sequence[Job], loras: Sequence[AppliedLoras | None], merges: bool) -> float:
    """The median step, of those behind the warm-ups."""
    engine = Engine(model, len(jobs), graphs=make_graphs(model), merging=Merging(merges))
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


def measure(model: Model, num_jobs: int, ranks: Sequence[int]) -> Iterator[list[str]]:
    """Yield a heading and a row per kind of edit, rank and way."""
    yield ["edits", "rank", "LoRAs", "ms per step", "against none"]
    loras = {rank: make_loras(model, rank, num_jobs) for rank in ranks}
    for kind, jobs in make_jobs(model, num_jobs).items():
        none = step_seconds(model, jobs, [None] * num_jobs, merges=False)
        yield [kind, "", "none", f"{1000 * none:.1f}", ""]
        for rank in ranks:
            each = loras[rank]
            ways = {"another for each edit": (each, False), "one for all, merged": (each[:1] * num_jobs, True)}
            for way, (own, merges) in ways.items():
                seconds = step_seconds(model, jobs, own, merges)
                yield [kind, str(rank), way, f"{1000 * seconds:.1f}", f"{seconds / none - 1:+.1%}"]


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
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    with torch.inference_mode():
        rows = measure(load(options.model, options.device, weights=NETWORK_ALONE), options.batch, options.ranks)
        print_rows(rows)
    print(f"{options.batch} edits, in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
