"""PatchedServe's figures: computation that caching between steps saves, by the patch and by the whole picture (figures
4 and 15, tables 1 and 2), batches of several sizes (figures 5 and 14), and overheads."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from instgenie.bench.baselines import StepSkipping
from instgenie.bench.metrics import Features, Lpips, ssim
from instgenie.bench.plots import Axis, Chart, Series
from instgenie.bench.reproduce.axes import decades
from instgenie.bench.reproduce.lab import Lab
from instgenie.bench.reproduce.section import Row, Section, Table, ms, row, times
from instgenie.bench.reproduce.table2 import edit_stock
from instgenie.bench.systems import first_block_cache
from instgenie.cost.network import Demand, NetworkShape, block_flops, outside_flops, step_flops
from instgenie.engine.changed import NUM_LEADING, Changed
from instgenie.engine.finish import finish
from instgenie.engine.loop import Engine
from instgenie.engine.own import OwnActivations
from instgenie.engine.prepare import prepare
from instgenie.engine.reuse_predictor import FEATURES, ReusePredictor
from instgenie.engine.reuse_training import PROMPTS, ReuseSetting, fit, picture_from, record, replay, sample_blocks
from instgenie.jobs.blocks import BLOCK_FEATURES
from instgenie.jobs.job import Job
from instgenie.machine.clock import now
from instgenie.models.flux.model import as_flux, is_flux
from instgenie.types import Edit, OwnPixels

NAME = "patches"
SIDES = (0.75, 1.0, 1.25)  # of pictures in mixed batches, as shares of the model's own
MIXES = ((3, 0, 0), (0, 3, 0), (1, 1, 1), (2, 2, 2))  # pictures of each side
NUM_FITTED = 4
MAX_PICTURES = 2  # on a CPU
WHOLE, PATCHED = "blocks, whole picture", "blocks, tokens"
SETTINGS = {  # of the predictors: last predictions or what blocks added last, and predictions that are moved on
    "steps, last prediction": ReuseSetting(trust=0.0),
    "steps, moved on": ReuseSetting(),
    WHOLE: ReuseSetting(tolerance=0.04, trust=0.0, per_block=True, tile=0),
    PATCHED: ReuseSetting(tolerance=0.04, trust=0.0, per_block=True, tile=1),
    "blocks, tiles of 4 x 4": ReuseSetting(tolerance=0.04, trust=0.0, per_block=True, tile=4),
}
THRESHOLDS = {  # of the probability of a wrong guess, and of TeaCache's and the first block's change
    "steps, last prediction": (0.7, 0.9),
    "steps, moved on": (0.5, 0.9, 0.99),
    WHOLE: (0.5, 0.99),
    PATCHED: (0.05, 0.5),
    "blocks, tiles of 4 x 4": (0.5, 0.9),
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
    likeness: float  # cosine between the features that a probe of prompts reads
    seconds: float  # per step of all pictures


def run(lab: Lab) -> Section:
    outcomes = compare(lab) if is_flux(lab.model) else []  # whose FLOPs and rivals are known
    mixed = [mix_row(lab, mix) for mix in MIXES]
    pairs = [(PATCHED, WHOLE), (PATCHED, "steps, moved on"), ("steps, moved on", "steps, last prediction")]
    return Section(
        name=NAME,
        title="Caching between steps, by the patch and by the whole picture",
        paper="PatchedServe: patches whose input hardly changed are reused, so that more is saved than by skipping "
        "steps of whole pictures; batches of several sizes take one pass.",
        here=f"{num_pictures(lab)} pictures from prompts, {lab.model.steps} steps, against those that compute "
        "everything. Steps: a step computes all tokens or none. Blocks: before each block, the predictor looks at what "
        "goes into it, and the block computes the tokens that have changed, tiles with any such token, or the whole "
        "picture if there is one; K and V are those of this step. Moved on: a guess goes on as predictions moved, "
        "instead of taking the last one. The predictors were fitted to other pictures of this run. Features: the "
        "cosine between what a probe of prompts reads of both pictures.",
        tables=[
            *saved_tables(outcomes),
            Table("A step of mixed sizes, ms", ("pictures of each side", "passes per size", "one pass", "gain"), mixed),
            Table("The cost of choosing", ("method", "ms a step", "computed", "of a step"), overheads(lab)),
        ],
        charts=[chart(outcomes)] if outcomes else [],
        findings=[told for name, base in pairs if (told := tell_gain(outcomes, name, base))],
    )


def saved_tables(outcomes: Sequence[CachedOutcome]) -> list[Table]:
    columns = "method", "threshold", "saved", "SSIM", "LPIPS", "features", "ms a step"
    return [Table("Operations saved and fidelity", columns, list(map(outcome_row, outcomes)))] if outcomes else []


def num_pictures(lab: Lab) -> int:
    num = lab.scale.num_pictures
    return min(num, MAX_PICTURES) if lab.model.device.type == "cpu" else num


def compare(lab: Lab) -> list[CachedOutcome]:
    model = lab.model
    lab.tell("recording pictures")
    predictors = train_all(lab)
    edits = [picture_from(PROMPTS[-1 - k], k, model) for k in range(num_pictures(lab))]
    lab.tell("dense pictures")
    judge, features = Lpips().to(model.device), Features().to(model.device)
    dense, whole_flops = make(lab, edits, None, 0.0)
    stock = tensors([seeded(edit, lab) for edit in edits], lab)  # the noise of its pictures is its own
    outcomes = []
    for name, thresholds in THRESHOLDS.items():
        for threshold in thresholds:
            lab.tell(f"{name}, {threshold:g}")
            start = now(model.device)
            if name in predictors:
                pictures, flops = make(lab, edits, predictors[name], threshold)
                saved = 1 - flops / whole_flops
            else:
                pictures, saved = (skip if name == "TeaCache" else cache_first_block)(lab, edits, threshold)
            seconds = (now(model.device) - start) / model.steps
            aim = stock if name == "first-block cache" else dense
            likeness, distance = ssim(pictures, aim).mean(), judge(pictures, aim).mean()
            cosine = torch.cosine_similarity(features(pictures), features(aim)).mean()
            figures = float(likeness), float(distance), float(cosine)
            outcomes.append(CachedOutcome(name, threshold, saved, *figures, seconds=seconds))
    return outcomes


def train_all(lab: Lab) -> dict[str, ReusePredictor]:
    """Predictors by the names of methods, fitted to the same pictures. Those of blocks differ in their tiles alone."""
    model, generator = lab.model, torch.Generator().manual_seed(0)
    edits = [picture_from(PROMPTS[k], 100 + k, model) for k in range(NUM_FITTED)]
    recordings = [record(model, edit) for edit in edits]
    blocks = [sample_blocks(model, edit, SETTINGS[PATCHED], k) for k, edit in enumerate(edits)]
    found = {}
    for name, setting in SETTINGS.items():
        steps = [list(replay(one, setting.max_steps, setting.trust, generator)) for one in recordings]
        found[name] = fit(blocks if setting.per_block else steps, setting).predictor
    return found


def make(lab: Lab, edits: Sequence[Edit], predictor: ReusePredictor | None, threshold: float) -> tuple[Tensor, int]:
    """Make pictures together, and count the operations."""
    model, network = lab.model, lab.network
    changed = Changed(predictor, threshold, model) if predictor else None
    engine, jobs = Engine(model, own=OwnActivations(model, changed=changed)), [prepare(one, model) for one in edits]
    for job in jobs:
        engine.join(job)
    flops = 0
    while engine.jobs:
        before = [job.num_taken_tokens for job in jobs]
        engine.step()
        for job, taken in zip(jobs, before, strict=True):
            if job.num_taken_tokens > taken:
                flops += pass_flops(network, job)
    return stack(jobs, lab), flops


def pass_flops(network: NetworkShape, job: Job) -> int:
    """FLOPs of the pass that a job has just made, of all tokens or of those that blocks chose."""
    num_tokens, num_branches = len(job.masked), len(job.branches)
    whole = Demand(num_tokens, {1: num_tokens}, len(job.branches[0].text), num_branches, "kv")
    if not job.blocks:
        return step_flops(network, [whole], [True] * len(network.blocks))
    flops = outside_flops(network, whole)
    for number, shape in enumerate(network.blocks):
        if num := job.blocks.num_computed[number]:
            flops += block_flops(shape, replace(whole, num_masked={1: num // num_branches}), cached=True)
            flops += shape.per_rest * (job.blocks.num_units[number] - num)
    return flops


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


def saved_at(outcomes: Sequence[CachedOutcome], name: str, lpips: float) -> float | None:
    """What a method saves at an LPIPS, between its points; None beyond them."""
    points = sorted((one.lpips, one.saved) for one in outcomes if one.method == name)
    for (low, saved), (high, saved_more) in zip([(0.0, 0.0), *points], points, strict=False):
        if low <= lpips <= high:
            return saved + (saved_more - saved) * (lpips - low) / max(high - low, 1e-9)
    return None


def tell_gain(outcomes: Sequence[CachedOutcome], name: str, base: str) -> str:
    """How much more a method saves than another at an equal LPIPS: the largest that both reach."""
    if not outcomes:
        return ""
    most = min(max(one.lpips for one in outcomes if one.method == method) for method in (name, base))
    saved, other = (saved_at(outcomes, method, most) for method in (name, base))
    if not saved or not other:
        return ""
    return f"At an LPIPS of {most:.4f}, {name} save {saved:.1%}: {times(saved / other)} as much as {base}, {other:.1%}."


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
    """Steps that compute everything, with choices that find nothing to reuse and without, and steps of which blocks
    compute about half."""
    steps = ReusePredictor((0.0,) * len(FEATURES), bias=50.0, tolerance=0.05, max_steps=4)
    tile = 8 if lab.model.is_convolutional else 1
    blocks = replace(steps, weights=(0.0,) * len(BLOCK_FEATURES), trust=0.0, per_block=True, tile=tile)
    ways = {"none": None, "steps": steps, "blocks": blocks, "blocks, about half": halving(lab, blocks)}
    best = dict.fromkeys(ways, StepTime(float("inf"), 1.0))
    for _ in range(lab.scale.repeats):
        for name, predictor in ways.items():
            best[name] = min(best[name], time_steps(lab, predictor))
    return [
        row(NAME, name, ms(one.seconds), f"{one.share:.0%}", f"{one.seconds / best['none'].seconds - 1:+.1%}",
            key=("overhead", name))
        for name, one in best.items()
    ]  # fmt: skip


class StepTime(NamedTuple):
    seconds: float
    share: float  # of tokens or tiles that are computed


def time_steps(lab: Lab, predictor: ReusePredictor | None) -> StepTime:
    """The median of the steps behind the leading ones."""
    engine, job = begin(lab, predictor)
    found = []
    while engine.jobs:
        start, step = now(lab.model.device), job.step
        engine.step()
        if step > NUM_LEADING:
            found.append(StepTime(now(lab.model.device) - start, job.blocks.share if job.blocks else 1.0))
    return StepTime(*(statistics.median(column) for column in zip(*found, strict=True)))


def begin(lab: Lab, predictor: ReusePredictor | None) -> tuple[Engine, Job]:
    changed = Changed(predictor, 0.5, lab.model) if predictor else None
    engine = Engine(lab.model, own=OwnActivations(lab.model, changed=changed))
    job = prepare(replace(picture_from(PROMPTS[0], 0, lab.model), steps=12), lab.model)
    engine.join(job)
    return engine, job


def halving(lab: Lab, blocks: ReusePredictor) -> ReusePredictor:
    """A predictor that reuses about the half of which the last guesses were better."""
    engine, job = begin(lab, blocks)
    for _ in range(NUM_LEADING):
        engine.step()
    assert job.blocks
    assert job.blocks.packed
    histories = job.blocks.packed.blocks
    median = torch.cat([one.errors for block, one in histories.items() if isinstance(block, int)]).median()
    weights = tuple(float(name == "last error") for name in BLOCK_FEATURES)
    return replace(blocks, weights=weights, bias=-float(median.log()))


def outcome_row(one: CachedOutcome) -> Row:
    figures = f"{one.ssim:.4f}", f"{one.lpips:.4f}", f"{one.likeness:.4f}", ms(one.seconds)
    return row(NAME, one.method, f"{one.threshold:g}", f"{one.saved:.1%}", *figures, key=(one.method, one.threshold))


def chart(outcomes: Sequence[CachedOutcome]) -> Chart:
    apart = [one for one in outcomes if one.lpips > 0]
    series = [
        Series(name, sorted((one.saved, one.lpips) for one in apart if one.method == name)) for name in THRESHOLDS
    ]
    x = Axis("share of the operations saved", (0, 0.2, 0.4, 0.6, 0.8), 0, 0.8)
    return Chart("Saved, and how far from dense", x, decades("LPIPS", [one.lpips for one in apart]), series)
