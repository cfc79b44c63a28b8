"""Table 2: quality against the dense edit of the same seed, and changes outside the mask."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from PIL import Image

from instgenie.bench.judge import Judge
from instgenie.bench.pictures import draw_mask, make_picture
from instgenie.bench.reproduce.lab import Lab
from instgenie.bench.reproduce.section import Row, Section, Table, row
from instgenie.bench.stock import stock_pipeline
from instgenie.bench.systems import DIFFUSERS
from instgenie.bench.variants import DENSE, NAIVE, SKIPPING, SMALL_CROP, Outcome, Reuse, Runner, Sample, of_quality
from instgenie.models.flux.model import FluxModel, as_flux
from instgenie.pictures.examples import EXAMPLES, read_examples
from instgenie.pictures.picture import open_picture
from instgenie.types import Edit, PixelMask, Pixels

NAME = "table2"
RATIO = 0.2


def run(lab: Lab) -> Section:
    model = as_flux(lab.model)
    samples = make_samples(lab)
    balanced = of_quality("balanced", lab.scale.steps)
    ways = list(dict.fromkeys([of_quality("fast", lab.scale.steps), balanced, replace(balanced, kind="y")]))
    outcomes = []
    for outcome in Runner(model, samples).run(ways, balanced, crops=False):
        lab.tell(f"quality: {outcome.name}")
        outcomes.append(outcome)
    lab.tell("quality: diffusers")
    stock = [edit_stock(sample.edit, model) for sample in samples]
    edits = [sample.edit for sample in samples]
    rows = [quality_row(outcome, outcomes[0], edits, balanced, lab) for outcome in outcomes]
    outside = [outside_row(outcome.name, outcome.pictures, edits) for outcome in outcomes]
    outside.append(outside_row(DIFFUSERS, stock, edits))
    return Section(
        name=NAME,
        title="Quality",
        paper="Edits keep the quality of edits that compute everything; other methods lose quality.",
        here=f"Edits of {len(samples)} pictures, {lab.scale.steps} steps, each method compared with the dense edit of "
        "the same seed, over the whole picture and in the mask's box. docs/quality.md has the study over photographs.",
        tables=[
            Table(
                "Against the dense edit", ("method", "operations", "SSIM in the box", "SSIM", "PSNR in the box"), rows
            ),
            Table("Outside the mask", ("method", "pixels changed", "largest change, of 255"), outside),
        ],
        findings=[finding(rows, balanced)],
    )


def make_samples(lab: Lab) -> list[Sample]:
    """Take the examples, or draw pictures if the package has none."""
    num, steps, guidance = lab.scale.num_pictures, lab.scale.steps, lab.model.guidance
    if EXAMPLES.is_dir():
        examples = [one.close_up(lab.size) for one in read_examples(EXAMPLES)[:num]]
        found = [(one.picture, one.mask, one.prompts[0], one.seed) for one in examples]
    else:
        found = [drawn(seed, lab.size) for seed in range(num)]
    return [
        Sample(Edit(picture, mask, prompt, seed, steps, guidance), "", "", "example", RATIO)
        for picture, mask, prompt, seed in found
    ]


def drawn(seed: int, size: tuple[int, int]) -> tuple[Pixels, PixelMask, str, int]:
    return open_picture(make_picture(seed, size)), draw_mask(RATIO, "blob", seed, size), "a flower", seed


def edit_stock(edit: Edit, model: FluxModel) -> Pixels:
    """Run the edit through diffusers' own pipeline."""
    pipeline = stock_pipeline(model)
    pipeline.set_progress_bar_config(disable=True)
    height, width = (max(side // model.size_multiple, 1) * model.size_multiple for side in edit.picture.shape[:2])
    [picture] = pipeline(
        prompt=edit.prompt,
        image=Image.fromarray(edit.picture),
        mask_image=Image.fromarray(edit.mask),
        height=height,
        width=width,
        num_inference_steps=edit.steps,
        guidance_scale=edit.guidance,
        max_sequence_length=model.num_text_tokens,
        output_type="pil",
    ).images
    return np.asarray(picture.resize(edit.picture.shape[1::-1]))


def quality_row(outcome: Outcome, dense: Outcome, edits: Sequence[Edit], balanced: Reuse, lab: Lab) -> Row:
    masks = [edit.mask for edit in edits]
    judge = Judge(lab.model.device, None, None)
    scores = judge.compare(outcome.pictures, dense.pictures, masks)
    figures = (float(np.mean(scores[name])) for name in ("ssim_box", "ssim", "psnr_box"))
    box, whole, psnr = figures
    name = {balanced.name: "balanced", DENSE: "dense"}.get(outcome.name, outcome.name)
    cells = (f"{np.mean(outcome.costs):.2f}", f"{box:.4f}", f"{whole:.4f}", f"{psnr:.1f}")
    return row(NAME, about(outcome.name, balanced), *cells, key=(name,))


def about(name: str, balanced: Reuse) -> str:
    known = {
        DENSE: "dense",
        balanced.name: f"cached {balanced.name} (balanced)",
        NAIVE: "unmasked tokens dropped",
        SKIPPING: "step skipping, equal cost",
        SMALL_CROP: "crop and stitch, equal cost",
    }
    return known.get(name, f"cached {name}")


def outside_row(name: str, pictures: Sequence[Pixels], edits: Sequence[Edit]) -> Row:
    changes = np.concatenate([
        np.abs(picture[~edit.mask].astype(int) - edit.picture[~edit.mask]).max(axis=1)
        for picture, edit in zip(pictures, edits, strict=True)
    ])  # fmt: skip
    share = float((changes > 0).mean()) if changes.size else 0.0
    return row(NAME, name, f"{share:.1%}", int(changes.max(initial=0)), key=("outside", name))


def finding(rows: Sequence[Row], balanced: Reuse) -> str:
    own = next(line for line in rows if line.anchor == f"{NAME}-balanced")
    _, cost, box, *_ = own.cells
    return f"The default quality has an SSIM of {box} in the mask's box with {cost} of the operations."
