"""Whole edits with LoRAs and ControlNets, beside diffusers, with passes of ControlNets captured and launch by launch.

    python -m instgenie.bench.adapted_edits --model dummy:sdxl-base-1.0 --controls 1 --loras 2 --batch 4

Everything up to the final latents is measured, with LoRAs read from disk; ControlNets are in memory. diffusers has the
same LoRAs for all edits of a batch, ours another set for each. Of all repetitions the fastest counts: the first ones
find and capture passes.
"""

import argparse
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from instgenie.bench.adapter_files import write_controlnets, write_loras
from instgenie.bench.lora_steps import print_rows
from instgenie.bench.reproduce.adapters import RANK, RATIO, AdapterBench, label
from instgenie.bench.reproduce.lab import SCALES, Lab
from instgenie.engine.controls import LocalControls
from instgenie.models.loading.load import load


def measure(bench: AdapterBench, sizes: Iterable[int], num_controls: int, num_loras: int) -> Iterator[list[str]]:
    """Yield a heading and the rows of each size of batches."""
    yield ["edits", "adapters", "diffusers, s", "ours", "s", "against diffusers"]
    for num in sizes:
        yield from measure_batch(bench, num, num_controls, num_loras)


def measure_batch(bench: AdapterBench, num: int, num_controls: int, num_loras: int) -> Iterator[list[str]]:
    """Every token and masked, with ControlNets captured and not."""
    whole, masked = (bench.edits(num, num_controls, num_loras, ratio) for ratio in (1.0, RATIO))
    stock = bench.run_stock(whole)
    captured = bench.ours.controls
    ways = {"captured": captured}
    if num_controls:
        ways["ControlNets uncaptured"] = LocalControls(bench.lab.model, captured.shelf)
    for way, controls in ways.items():
        bench.ours.controls = controls
        for name, edits, reuses in (("every token", whole, False), (f"mask ratio {RATIO:g}", masked, True)):
            seconds = bench.run_ours(edits, reuses)
            what = [str(num), label(num_controls, num_loras), f"{stock:.3f}", f"{name}, {way}"]
            yield [*what, f"{seconds:.3f}", f"{stock / seconds:.2f}"]
    bench.ours.controls = captured


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="whole edits with LoRAs and ControlNets, beside diffusers")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--controls", type=int, default=1)
    parser.add_argument("--loras", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="edits of the larger batch; one edit is measured, too")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    model = load(options.model, options.device)
    sizes = dict.fromkeys((1, options.batch))
    scale = replace(SCALES[model.device.type], steps=options.steps, repeats=options.repeats, batches=tuple(sizes))
    with tempfile.TemporaryDirectory(prefix="instgenie-bench-") as name:
        loras = write_loras(Path(name), model, RANK, max(options.batch * options.loras, 1))
        controlnets = write_controlnets(Path(name), model, max(options.controls, 1))
        bench = AdapterBench(Lab(options.model, model, scale), loras, loras[:1], controlnets)
        print_rows(measure(bench, sizes, options.controls, options.loras))
    print(f"{options.steps} steps, in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
