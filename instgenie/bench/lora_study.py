"""How an edit with a LoRA fares over a template that the base model registered, over one of its own, and with a LoRA
that comes late, against the edit that computes every token with the LoRA from the first step. Prints a table:

    python -m instgenie.bench.lora_study --photos 2 --steps 8

The LoRAs are drawn at random, at strengths of a share of the weights' norm: they change pictures as much as trained
ones do, but towards nothing.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from instgenie.adapters.applied import AppliedLoras, apply_loras
from instgenie.adapters.keys import NETWORK
from instgenie.adapters.lora import pack_lora
from instgenie.bench.markdown import markdown_table
from instgenie.engine.finish import finish
from instgenie.engine.loop import Engine
from instgenie.engine.own import OwnActivations, reuse_own
from instgenie.engine.prepare import prepare
from instgenie.engine.register import make_activations, make_key, observe, reuse, template_edit
from instgenie.jobs.activations import Kind, join
from instgenie.jobs.job import Job
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.pictures.examples import EXAMPLES, read_examples
from instgenie.types import Edit, Pixels

RANK = 8
LATE = (0.1, 0.3, 0.5)  # shares of the steps before the LoRA comes
SHARES = (0.05, 0.15, 0.3)  # of the norm of the weights that a LoRA adds


def draw_loras(model: Model, share: float, seed: int) -> AppliedLoras:
    """A LoRA for the attention of every block, as trainers choose by default, with an update of this norm."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for name, layer in model.network.named_modules():
        if name.endswith(("to_q", "to_k", "to_v", "to_out.0")):
            weight = layer.get_parameter("weight")
            down = torch.randn(RANK, weight.shape[1], generator=generator)
            up = torch.randn(weight.shape[0], RANK, generator=generator)
            norm = torch.linalg.norm(up @ down)
            found.append((NETWORK, name, down, up, float(share * torch.linalg.norm(weight.float().cpu()) / norm)))
    lora = pack_lora(found, model.dtype).to(model.device)
    return apply_loras({NETWORK: model.network}, [(lora, 1.0)])


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


def psnr_inside(one: Pixels, other: Pixels, mask: NDArray[np.bool_]) -> float:
    error = float(np.mean((one[mask].astype(float) - other[mask]) ** 2))
    return float(10 * np.log10(255**2 / max(error, 1e-9)))


def study(model: Model, num_photos: int, steps: int) -> Iterator[list[str]]:
    """Yield a heading and a row per strength: PSNR inside the mask against the dense edit with the LoRA, in dB."""
    for share in SHARES:
        found: dict[str, list[float]] = {}
        for number, example in enumerate(read_examples(EXAMPLES)[:num_photos]):
            close_up = example.close_up((256, 256))
            edit = Edit(close_up.picture, close_up.mask, "a flower", steps=steps, guidance=model.guidance)
            edit = replace(edit, size=(256, 256))
            loras = draw_loras(model, share, number)
            job = replace(prepare(edit, model), loras=loras)
            truth = paint(model, replace(job))
            ways = {
                "no LoRA": replace(job, loras=None),
                "base template, K and V": register(model, edit, "kv", None, replace(job)),
                "base template, Y": register(model, edit, "y", None, replace(job)),
                "own template": register(model, edit, "kv", loras, replace(job)),
                "own dense steps": reuse_own(replace(job)),
            }
            painted = {way: paint(model, one) for way, one in ways.items()}
            for late in LATE:
                painted[f"from {late:.0%} of the steps"] = paint(model, replace(job), math.ceil(late * steps))
            for way, picture in painted.items():
                found.setdefault(way, []).append(psnr_inside(picture, truth, edit.mask))
        if share == SHARES[0]:
            yield ["strength", *found]
        yield [f"{share:.0%}", *(f"{np.mean(values):.1f}" for values in found.values())]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="edits with a LoRA over templates of the base model and of their own")
    parser.add_argument("--photos", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)
    torch.set_grad_enabled(False)
    lines = study(load(options.model, options.device), options.photos, options.steps)
    print(markdown_table([next(lines), next(lines)]), end="", flush=True)
    for line in lines:
        print(f"| {' | '.join(line)} |", flush=True)


if __name__ == "__main__":
    main()
