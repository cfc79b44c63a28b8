"""PatchedServe's figures: computation that caching between steps saves, by the patch and by the whole picture (figures
4 and 15, tables 1 and 2), batches of several sizes (figures 5 and 14), and overheads."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from instgenie.bench.baselines import StepSkipping
from instgenie.bench.metrics import Lpips, ssim
from instgenie.bench.plots import Axis, Chart, Series
from instgenie.bench.reproduce.axes import linear
from instgenie.bench.reproduce.lab import Lab
from instgenie.bench.reproduce.section import Row, Section, Table, ms, row, times
from instgenie.bench.reproduce.table2 import edit_stock
from instgenie.bench.systems import first_block_cache
from instgenie.cost.network import Demand, step_flops
from instgenie.engine.changed import ChangedTokens
from instgenie.engine.finish import finish
from instgenie.engine.loop import Engine
from instgenie.engine.own import OwnActivations
from instgenie.engine.prepare import prepare
from instgenie.engine.reuse_predictor import ReusePredictor
from instgenie.engine.reuse_training import PROMPTS, fit, picture_from, record
from instgenie.jobs.job import Job
from instgenie.machine.clock import now
from instgenie.models.flux.model import as_flux
from instgenie.types import Edit, OwnPixels

NAME = "patches"
SIDES = (0.75, 1.0, 1.25)  # of pictures in mixed batches, as shares of the model's own
MIXES = ((3, 0, 0), (0, 3, 0), (1, 1, 1), (2, 2, 2))  # pictures of each side
MAX_STEPS, TOLERANCE = 4, 0.05
NUM_FITTED = 4
THRESHOLDS = {  # of the probability of a wrong guess, and of TeaCache's and the first block's change
    "whole picture": (0.7, 0.9),
    "tiles": (0.05, 0.5),
    "whole picture, moved on": (0.5, 0.9, 0.99),
    "tiles, moved on": (0.5, 0.9),
    "TeaCache": (0.1, 0.25),
    "first-block cache": (0.05, 0.1),
}


@dataclass(frozen=True)
class CachedOutcome:
    """Pictures that were made with a method, against those that compute everything."""

    method: str
    threshold: float
    saved: float  # share of the operations
    ssim: float
    lpips: float


def run(lab: Lab) -> Section:
    outcomes = compare(lab)
    mixed = [mix_row(lab, mix) for mix in MIXES]
    gains = [
        (name, gain(outcomes, name, "whole picture")) for name in THRESHOLDS if name not in ("whole picture", "tiles")
    ]
    return Section(
        name=NAME,
        title="Caching between steps, by the patch and by the whole picture",
        paper="PatchedServe: patches whose input hardly changed are reused, so that more is saved than by skipping "
        "steps of whole pictures; batches of several sizes take one pass.",
        here=f"{lab.scale.num_pictures} pictures from prompts, {lab.model.steps} steps, against those that compute "
        "everything. Whole picture: a step is skipped if all tiles agree. Tiles: single tokens, that read the K and V "
        "of those that are reused. Moved on: a guess goes on as predictions moved, instead of taking the last one. The "
        "predictors were fitted to other pictures of this run.",
        tables=[
            Table(
                "Operations saved and fidelity",
                ("method", "threshold", "saved", "SSIM", "LPIPS"),
                [outcome_row(one) for one in outcomes],
            ),
            Table("A step of mixed sizes, ms", ("pictures of each side", "passes per size", "one pass", "gain"), mixed),
            Table("Overhead where nothing is reused", ("method", "ms a step", "of a step"), overheads(lab)),
        ],
        charts=[chart(outcomes)],
        findings=[
            f"At the LPIPS of the whole picture with a threshold of {THRESHOLDS['whole picture'][1]:g}, {name} saves "
            f"{times(found)} as much."
            for name, found in gains
            if found
        ],
    )


def compare(lab: Lab) -> list[CachedOutcome]:
    model = lab.model
    lab.tell("recording pictures")
    recordings = [record(model, picture_from(PROMPTS[k], 100 + k, model)) for k in range(NUM_FITTED)]
    last, moved = (fit(recordings, TOLERANCE, MAX_STEPS, trust).predictor for trust in (0.0, 0.8))
    predictors = {
        "whole picture": last,
        "tiles": replace(last, tile=1),
        "whole picture, moved on": moved,
        "tiles, moved on": replace(moved, tile=1, max_share=0.25),
    }
    edits = [picture_from(PROMPTS[-1 - k], k, model) for k in range(lab.scale.num_pictures)]
    lab.tell("dense pictures")
    judge = Lpips().to(model.device)
    dense, whole_flops = make(lab, edits, None, 0.0)
    stock = tensors([seeded(edit, lab) for edit in edits], lab)  # the noise of its pictures is its own
    outcomes = []
    for name, thresholds in THRESHOLDS.items():
        for threshold in thresholds:
            lab.tell(f"{name}, {threshold:g}")
            if name in predictors:
                pictures, flops = make(lab, edits, predictors[name], threshold)
                saved = 1 - flops / whole_flops
            else:
                pictures, saved = (skip if name == "TeaCache" else cache_first_block)(lab, edits, threshold)
            aim = stock if name == "first-block cache" else dense
            likeness, distance = ssim(pictures, aim).mean(), judge(pictures, aim).mean()
            outcomes.append(CachedOutcome(name, threshold, saved, float(likeness), float(distance)))
    return outcomes


def make(lab: Lab, edits: Sequence[Edit], predictor: ReusePredictor | None, threshold: float) -> tuple[Tensor, int]:
    """Make pictures together, and count the operations."""
    model, network = lab.model, lab.network
    changed = ChangedTokens(predictor, threshold, model.device) if predictor else None
    engine, jobs = Engine(model, own=OwnActivations(model, changed=changed)), [prepare(one, model) for one in edits]
    for job in jobs:
        engine.join(job)
    flops = 0
    while engine.jobs:
        before = [job.num_taken_tokens for job in jobs]
        engine.step()
        for job, taken in zip(jobs, before, strict=True):
            if num := job.num_taken_tokens - taken:
                branch = len(job.branches[0].text)
                demand = Demand(len(job.masked), dict.fromkeys(network.sides, num), branch, len(job.branches), "kv")
                flops += step_flops(network, [demand], [True] * len(network.blocks))
    return stack(jobs, lab), flops


def stack(jobs: Sequence[Job], lab: Lab) -> Tensor:  # [pictures, 3, height, width] in [0, 1]
    return tensors([finish(job, lab.model) for job in jobs], lab)


def seeded(edit: Edit, lab: Lab) -> OwnPixels:
    """The picture that diffusers' own pipeline makes, the same at every call."""
    torch.manual_seed(edit.seed)
    return edit_stock(edit, as_flux(lab.model))


def tensors(pictures: Sequence[OwnPixels], lab: Lab) -> Tensor:
    return torch.stack([torch.tensor(one).permute(2, 0, 1).float() / 255 for one in pictures]).to(lab.model.device)


def skip(lab: Lab, edits: Sequence[Edit], threshold: float) -> tuple[Tensor, float]:
    jobs = [prepare(edit, lab.model) for edit in edits]
    states = StepSkipping(as_flux(lab.model).joint_network, threshold).run(jobs)
    return stack(jobs, lab), 1 - statistics.mean(state.num_computed for state in states) / jobs[0].num_steps


def cache_first_block(lab: Lab, edits: Sequence[Edit], threshold: float) -> tuple[Tensor, float]:
    """diffusers' own cache, in its own pipeline. The first block is computed at every step."""
    model = as_flux(lab.model)
    calls = {"all": 0, "last": 0}

    def count(name: str) -> None:
        calls[name] += 1

    last = model.transformer.single_transformer_blocks[-1].proj_mlp
    hooks = [
        model.transformer.register_forward_hook(lambda *_: count("all")),
        last.register_forward_hook(lambda *_: count("last")),
    ]
    try:
        pictures = []
        for edit in edits:
            with first_block_cache(model.transformer, threshold):
                pictures.append(seeded(edit, lab))
    finally:
        for hook in hooks:
            hook.remove()
    num_blocks = len(lab.network.blocks)
    saved = (1 - calls["last"] / calls["all"]) * (num_blocks - 1) / num_blocks
    return tensors(pictures, lab), saved


def gain(outcomes: Sequence[CachedOutcome], name: str, base: str) -> float | None:
    """How much more a method saves than another at the LPIPS of the other's second threshold, between its points."""
    aim = [one for one in outcomes if one.method == base][1]
    points = sorted((one.lpips, one.saved) for one in outcomes if one.method == name)
    for (low, saved), (high, saved_more) in zip([(0.0, 0.0), *points], points, strict=False):
        if low <= aim.lpips <= high and aim.saved:
            return (saved + (saved_more - saved) * (aim.lpips - low) / max(high - low, 1e-9)) / aim.saved
    return None


def mix_row(lab: Lab, mix: Sequence[int]) -> Row:
    model = lab.model
    jobs = [prepare(edit, model) for edit in mixed_edits(lab, mix)]
    parts = [[job for job in jobs if job.grid == grid] for grid in dict.fromkeys(job.grid for job in jobs)]
    apart = best_of(lab, lambda: [model.predict(part) for part in parts])
    together = best_of(lab, lambda: model.predict(jobs))
    return row(NAME, " + ".join(map(str, mix)), ms(apart), ms(together), times(apart / together), key=("mix", *mix))


def mixed_edits(lab: Lab, mix: Sequence[int]) -> list[Edit]:
    unit = lab.model.size_multiple
    sides = [round(share * lab.model.own_size / unit) * unit for share in SIDES]
    return [
        picture_from(PROMPTS[0], k, lab.model, (side, side))
        for side, num in zip(sides, mix, strict=True)
        for k in range(num)
    ]


def best_of(lab: Lab, work: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs, after one that is not counted."""
    found = []
    with torch.inference_mode():
        for _ in range(1 + 2 * lab.scale.repeats):
            start = now(lab.model.device)
            work()
            found.append(now(lab.model.device) - start)
    return min(found[1:])


def overheads(lab: Lab) -> list[Row]:
    """Steps that compute everything, with choices that find nothing to reuse and without."""
    weights = (0.0,) * 6
    whole = ReusePredictor(weights, bias=50.0, tolerance=TOLERANCE, max_steps=MAX_STEPS)
    ways = {"none": None, "whole picture": whole, "tiles": replace(whole, tile=1)}
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(lab.scale.repeats):
        for name, predictor in ways.items():
            best[name] = min(best[name], fastest_step(lab, predictor))
    return [
        row(NAME, name, ms(best[name]), f"{best[name] / best['none'] - 1:+.1%}", key=("none", name)) for name in ways
    ]


def fastest_step(lab: Lab, predictor: ReusePredictor | None) -> float:
    model = lab.model
    changed = ChangedTokens(predictor, 0.5, model.device) if predictor else None
    engine = Engine(model, own=OwnActivations(model, changed=changed))
    engine.join(prepare(replace(picture_from(PROMPTS[0], 0, model), steps=12), model))
    seconds = []
    while engine.jobs:
        start = now(model.device)
        engine.step()
        seconds.append(now(model.device) - start)
    return min(seconds[3:-1])


def outcome_row(one: CachedOutcome) -> Row:
    cells = one.method, f"{one.threshold:g}", f"{one.saved:.1%}", f"{one.ssim:.4f}", f"{one.lpips:.4f}"
    return row(NAME, *cells, key=(one.method, one.threshold))


def chart(outcomes: Sequence[CachedOutcome]) -> Chart:
    series = [
        Series(name, sorted((one.saved, one.lpips) for one in outcomes if one.method == name)) for name in THRESHOLDS
    ]
    x = Axis("share of the operations saved", (0, 0.2, 0.4, 0.6, 0.8), 0, 0.8)
    return Chart("Saved, and how far from dense", x, linear("LPIPS", [one.lpips for one in outcomes]), series)
