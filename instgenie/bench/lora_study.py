"""How an edit with a LoRA fares over a template that the base model registered, over one of its own, and with a LoRA
that comes late, against the edit that computes every token with the LoRA from the first step. Prints a table, and draws
what late LoRAs still change:

    python -m instgenie.bench.lora_study --photos 3 --steps 12 --plot late.svg

The LoRAs are those that ship with the model. Two numbers tell how near a picture is, inside the mask: PSNR in dB, and
how much of the change that the LoRA makes is missed: the distance from the picture with the LoRA, as a share of the
distance of the picture without it.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from instgenie.adapters.applied import AppliedLoras
from instgenie.adapters.shipped import shipped_loras
from instgenie.bench.files import write_text
from instgenie.bench.markdown import markdown_table
from instgenie.bench.plots import Chart, Series
from instgenie.bench.reproduce.axes import at_values, linear
from instgenie.engine.finish import finish
from instgenie.engine.loop import Engine
from instgenie.engine.lora_shelf import LoraShelf
from instgenie.engine.own import OwnActivations, reuse_own
from instgenie.engine.prepare import prepare
from instgenie.engine.register import make_activations, make_key, observe, reuse, template_edit
from instgenie.errors import ModelError
from instgenie.jobs.activations import Kind, join
from instgenie.jobs.job import Job
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.pictures.examples import EXAMPLES, read_examples
from instgenie.types import Edit, LoraUse, Pixels

LATE = (0.1, 0.2, 0.3, 0.5, 0.7)  # shares of the steps before the LoRA comes
NO_LORA = "no LoRA"
Distances = dict[str, list[float]]  # by way, one per photo


def register(model: Model, edit: Edit, kind: Kind, loras: AppliedLoras | None, job: Job) -> Job:
    """The job over a template that saw these LoRAs."""
    plain = template_edit(edit.picture, model, edit.size, edit.steps, edit.guidance)
    key = make_key(plain, model, kind)
    span = join(key.num_kept, observe(plain, model, key, key.spans, loras), model.device)
    return reuse(job, make_activations(key, span, model))


def paint(model: Model, job: Job, from_step: int = 0) -> Pixels:
    """The result, with the job's LoRAs from a step on."""
    loras = job.loras
    engine = Engine(model, own=OwnActivations(model))
    engine.join(job)
    while engine.jobs:
        job.loras = loras if job.step >= from_step else None
        engine.step()
    return finish(job, model)


def rms_inside(one: Pixels, other: Pixels, mask: NDArray[np.bool_]) -> float:
    return float(np.sqrt(np.mean((one[mask].astype(float) - other[mask]) ** 2)))


def study(model: Model, name: str, shelf: LoraShelf, num_photos: int, steps: int) -> Distances:
    """Distances from the edit that computes every token with a LoRA, inside the mask, in values of 0 to 255."""
    found: Distances = {}
    for example in read_examples(EXAMPLES)[:num_photos]:
        close_up = example.close_up((256, 256))
        edit = Edit(close_up.picture, close_up.mask, "a flower", steps=steps, guidance=model.guidance)
        edit = shelf.resolve(replace(edit, size=(256, 256), loras=(LoraUse(name),)))
        loras = shelf.apply(edit.loras)
        job = replace(prepare(edit, model, prompt_loras=shelf.prompts), loras=loras)
        truth = paint(model, replace(job))
        ways = {
            NO_LORA: replace(job, loras=None),
            "base template, K and V": register(model, edit, "kv", None, replace(job)),
            "base template, Y": register(model, edit, "y", None, replace(job)),
            "own template": register(model, edit, "kv", loras, replace(job)),
            "own dense steps": reuse_own(replace(job)),
        }
        painted = {way: paint(model, one) for way, one in ways.items()}
        for late in LATE:
            painted[late_name(late)] = paint(model, replace(job), math.ceil(late * steps))
        for way, picture in painted.items():
            found.setdefault(way, []).append(rms_inside(picture, truth, edit.mask))
    return found


def late_name(share: float) -> str:
    return f"from {share:.0%} of the steps on"


def psnr(distances: Sequence[float]) -> float:
    return float(np.mean([20 * np.log10(255 / max(one, 1e-6)) for one in distances]))


def missed(found: Distances, way: str) -> float:
    """The share of the LoRA's change that a way misses."""
    return sum(found[way]) / sum(found[NO_LORA])


def table(found: dict[str, Distances]) -> Iterator[list[str]]:
    yield ["edit", *(f"{name}, {what}" for name in found for what in ("dB", "missed"))]
    for way in next(iter(found.values())):
        cells = [(f"{psnr(own[way]):.1f}", f"{missed(own, way):.0%}") for own in found.values()]
        yield [way, *(cell for pair in cells for cell in pair)]


def chart(found: dict[str, Distances]) -> Chart:
    series = [
        Series(name, [(100 * late, 100 * missed(own, late_name(late))) for late in LATE]) for name, own in found.items()
    ]
    x = at_values("percent of the steps before the LoRA comes", [100 * late for late in LATE])
    return Chart("What an edit misses of a late LoRA", x, linear("percent of its change", [100.0]), series)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="edits with a LoRA over templates of the base model and of their own")
    parser.add_argument("--photos", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--plot", type=Path, help="where the chart of late LoRAs goes")
    options = parser.parse_args(arguments)
    torch.set_grad_enabled(False)
    names = shipped_loras(options.model)
    if not names:
        raise ModelError(f"no LoRAs lie in the folder of the model {options.model!r}")
    model = load(options.model, options.device)
    shelf = LoraShelf(model, names)
    found = {name: study(model, name, shelf, options.photos, options.steps) for name in names}
    print(markdown_table(list(table(found))), end="")
    if options.plot:
        write_text(chart(found).svg(), options.plot)


if __name__ == "__main__":
    main()
