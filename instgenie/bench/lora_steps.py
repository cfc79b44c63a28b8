"""What LoRAs cost a step: a batch of edits without any, with one for all, merged and not, and with another for each.

    python -m instgenie.bench.lora_steps --model dummy:flux.1-dev --batch 8 --ranks 16,64

The LoRAs patch every linear layer of the blocks. Their numbers are the same everywhere, which makes no difference to
the time. A step is measured from its beginning until the device is done with it.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from instgenie.adapters.applied import AppliedLoras, apply_loras
from instgenie.adapters.keys import NETWORK
from instgenie.adapters.lora import pack_lora
from instgenie.bench.markdown import markdown_table
from instgenie.engine.graphs import Graphs
from instgenie.engine.loop import Engine
from instgenie.engine.merging import MIN_STEPS_LEFT, MIN_STEPS_TOGETHER, Merging
from instgenie.engine.register import make_activations, name_key, observe_span, reuse
from instgenie.engine.warm import blank_job, sample_edit
from instgenie.jobs.job import Job
from instgenie.machine.clock import now
from instgenie.models.loading.load import load
from instgenie.models.model import Model

NUM_STEPS = MIN_STEPS_TOGETHER + MIN_STEPS_LEFT + 2  # so that merging pays, and some steps follow it
NUM_RUNS = 3  # the first warms up


def make_lora(model: Model, rank: int) -> AppliedLoras:
    found = []
    for name, layer in model.network.named_modules():
        if isinstance(layer, nn.Linear) and "blocks" in name:
            down, up = torch.full((rank, layer.in_features), 1e-3), torch.full((layer.out_features, rank), 1e-3)
            found.append((NETWORK, name, down, up, 1.0))
    return apply_loras({NETWORK: model.network}, [(pack_lora(found, model.dtype).to(model.device), 1.0)])


def make_jobs(model: Model, num_jobs: int) -> dict[str, list[Job]]:
    """Edits that compute every token, and edits that read a template."""
    edit = replace(sample_edit(model), steps=NUM_STEPS)
    job, key = blank_job(edit, model), name_key("", "", edit, model, "kv", "model")
    activations = make_activations(key, observe_span(job, model, key, key.slots), model)
    cached = reuse(replace(job), activations)
    return {name: [replace(one) for _ in range(num_jobs)] for name, one in (("dense", job), ("cached", cached))}


def step_seconds(model: Model, jobs: Sequence[Job], loras: Sequence[AppliedLoras | None], merges: bool) -> float:
    """The median step, of those that come late enough to be merged."""
    found: list[float] = []
    graphs = Graphs(model) if model.device.type == "cuda" else None
    for number in range(NUM_RUNS):
        engine = Engine(model, len(jobs), graphs=graphs, merging=Merging(merges))
        for job, own in zip(jobs, loras, strict=True):
            engine.join(replace(job, loras=own))
        for step in range(NUM_STEPS):
            start = now(model.device)
            engine.step()
            if number and step > MIN_STEPS_TOGETHER:
                found.append(now(model.device) - start)
        engine.merging.undo()
    return statistics.median(found)


def measure(model: Model, num_jobs: int, ranks: Sequence[int]) -> Iterator[list[str]]:
    """Yield a heading and a row per kind of edit, rank and way."""
    yield ["edits", "rank", "LoRAs", "ms per step", "against none"]
    for kind, jobs in make_jobs(model, num_jobs).items():
        none = step_seconds(model, jobs, [None] * num_jobs, merges=False)
        yield [kind, "", "none", f"{1000 * none:.1f}", ""]
        for rank in ranks:
            each = [make_lora(model, rank) for _ in jobs]
            ways = {
                "another for each edit": (each, False),
                "one for all": (each[:1] * num_jobs, False),
                "one for all, merged": (each[:1] * num_jobs, True),
            }
            for way, (loras, merges) in ways.items():
                seconds = step_seconds(model, jobs, loras, merges)
                yield [kind, str(rank), way, f"{1000 * seconds:.1f}", f"{seconds / none - 1:+.1%}"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="what LoRAs cost a step")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--ranks", type=lambda text: [int(one) for one in text.split(",")], default=[16, 64])
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    with torch.inference_mode():
        rows = list(measure(load(options.model, options.device), options.batch, options.ranks))
    print(markdown_table(rows), end="")
    print(f"{options.batch} edits, in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
