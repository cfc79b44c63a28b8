"""Figure 6: how similar unmasked tokens are across edits of one template, and where attention goes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from instgenie.bench.plots import Axis, Chart, Series
from instgenie.bench.reproduce.axes import at_values
from instgenie.bench.reproduce.lab import Lab
from instgenie.bench.reproduce.section import Section, Table, row
from instgenie.engine.prepare import prepare
from instgenie.engine.register import at_step, template_job
from instgenie.jobs.job import Job
from instgenie.models.flux.model import FluxModel, as_flux
from instgenie.models.joint.batch import pack
from instgenie.models.joint.modulation import Modulation
from instgenie.models.joint.network import velocity, walk
from instgenie.pictures.examples import EXAMPLES, read_examples
from instgenie.pictures.samples import MIDDLE, mask_around
from instgenie.types import Edit

NAME = "fig6"
PLACES = (0.25, 0.5, 0.75)  # shares of the steps after which tokens are compared
PROMPTS = "a photo of a tulip", "a photo of a pug dog"
RATIO = 0.2
SHARES = ("masked on masked", "masked on unmasked", "unmasked on masked", "unmasked on unmasked")


@dataclass(frozen=True)
class Look:
    """The similarity of tokens and the shares of attention at one step, per block."""

    step: int
    masked: list[float]  # cosine between two edits, masked tokens
    unmasked: list[float]  # the same, unmasked tokens
    registered: list[float]  # cosine between an edit and the registration, unmasked tokens
    shares: list[list[float]]  # of the attention on image tokens, in the order of `SHARES`


def run(lab: Lab) -> Section:
    lab.tell("two edits of one picture")
    looks = list(look_at(lab))
    mean = [
        sum(values) / len(values) for values in zip(*(share for look in looks for share in look.shares), strict=True)
    ]
    masked, unmasked = (
        sum(value for look in looks for value in getattr(look, name)) / sum(len(look.masked) for look in looks)
        for name in ("masked", "unmasked")
    )
    return Section(
        name=NAME,
        title="Why reuse works: similarity and attention",
        paper="Activations of unmasked tokens are similar in all edits of a template, those of masked tokens are not; "
        "masked and unmasked tokens attend mostly to their own kind.",
        here="Two dense edits of one picture with one mask and different prompts and seeds: the cosine similarity of "
        "the inputs of each block, averaged over tokens. Attention: the shares of the attention on image tokens that "
        f"fall on masked and on unmasked ones, with {RATIO:g} of the tokens masked.",
        tables=[similarity_table(looks), attention_table(looks)],
        charts=[similarity_chart(looks), attention_chart(looks)],
        findings=[
            f"Mean cosine similarity of two edits: {unmasked:.3f} for unmasked tokens, {masked:.3f} for masked ones.",
            f"Masked tokens spend {mean[0]:.0%} of their attention on masked ones, unmasked tokens {mean[2]:.0%}.",
        ],
    )


@torch.inference_mode()
def look_at(lab: Lab) -> Iterator[Look]:
    model = as_flux(lab.model)
    edits = [replace(edit_of(lab), prompt=prompt, seed=seed) for seed, prompt in enumerate(PROMPTS)]
    jobs = [prepare(edit, model) for edit in edits]
    template = template_job(replace(edits[0], size=lab.size), model)
    steps = sorted({int(place * jobs[0].num_steps) for place in PLACES})
    while not jobs[0].done:
        step = jobs[0].step
        if step in steps:
            lab.tell(f"looking at step {step}")
            yield look(model, jobs, at_step(template, step))
        for job in jobs:
            job.advance(model.predict([job])[0])


def edit_of(lab: Lab) -> Edit:
    edit = replace(lab.edit(RATIO), dense_steps=0)
    if not EXAMPLES.is_dir():
        return edit
    example = read_examples(EXAMPLES)[0].close_up(lab.size)
    mask = mask_around(MIDDLE, example.picture.shape[:2], lab.model.patch, RATIO)
    return replace(edit, picture=example.picture, mask=mask)


def look(model: FluxModel, jobs: Sequence[Job], template: Job) -> Look:
    one, other, registered = ([rows for _, rows in walked(model, job)] for job in (*jobs, template))
    inside, outside = jobs[0].inside, jobs[0].outside
    return Look(
        step=jobs[0].step,
        masked=[alike(a[inside], b[inside]) for a, b in zip(one, other, strict=True)],
        unmasked=[alike(a[outside], b[outside]) for a, b in zip(one, other, strict=True)],
        registered=[alike(a[outside], b[outside]) for a, b in zip(one, registered, strict=True)],
        shares=attention(model, jobs[0]),
    )


def walked(model: FluxModel, job: Job) -> Iterator[tuple[object, Tensor]]:
    batch = pack([job])
    steps = walk(model.joint_network, batch, Modulation(model.joint_network.embed_time(batch)))
    return ((block, image) for block, _, image in steps)


def alike(a: Tensor, b: Tensor) -> float:
    return float(F.cosine_similarity(a.float(), b.float(), dim=1).mean())


class AttentionRecorder(TorchFunctionMode):
    """Records the attention weights of every attention call."""

    def __init__(self, num_text: int, masked: Tensor) -> None:
        super().__init__()
        self.num_text, self.masked = num_text, masked
        self.shares: list[list[float]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.record(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def record(self, q: Tensor, k: Tensor) -> None:  # [1, heads, tokens, head channels]
        scores = (q.float() @ k.float().transpose(2, 3)) / q.shape[3] ** 0.5
        weights = scores.softmax(3)[0, :, self.num_text :, self.num_text :].mean(0)  # image tokens on image tokens
        weights = weights / weights.sum(1, keepdim=True)
        kinds = self.masked, ~self.masked
        self.shares.append([float(weights[a][:, b].sum(1).mean()) for a in kinds for b in kinds])


def attention(model: FluxModel, job: Job) -> list[list[float]]:
    batch = pack([job])
    recorder = AttentionRecorder(len(job.branches[0].text), job.masked[:, 0])
    with recorder:
        velocity(model.joint_network, batch)
    return recorder.shares


def similarity_table(looks: Sequence[Look]) -> Table:
    rows = [
        row(
            NAME,
            f"step {look.step}",
            f"{sum(look.unmasked) / len(look.unmasked):.4f}",
            f"{min(look.unmasked):.4f}",
            f"{sum(look.registered) / len(look.registered):.4f}",
            f"{sum(look.masked) / len(look.masked):.4f}",
            key=("similarity", look.step),
        )
        for look in looks
    ]
    columns = ("at", "unmasked", "unmasked, worst block", "unmasked, with the registration", "masked")
    return Table("Cosine similarity of two edits", columns, rows)


def attention_table(looks: Sequence[Look]) -> Table:
    rows = []
    for look in looks:
        means = [sum(values) / len(values) for values in zip(*look.shares, strict=True)]
        rows.append(row(NAME, f"step {look.step}", *(f"{mean:.0%}" for mean in means), key=("attention", look.step)))
    return Table("Attention on image tokens", ("at", *SHARES), rows)


def similarity_chart(looks: Sequence[Look]) -> Chart:
    middle = looks[len(looks) // 2]
    lines = {"unmasked": middle.unmasked, "unmasked, with registration": middle.registered, "masked": middle.masked}
    series = [Series(name, list(enumerate(values))) for name, values in lines.items()]
    low = min(0.0, *(value for values in lines.values() for value in values))
    ticks = [tick / 4 for tick in range(int(4 * low) - (low < 0), 5)]
    x = at_values("block", range(len(middle.masked)))
    return Chart(
        f"Cosine similarity of two edits, step {middle.step}", x, Axis("cosine", ticks, ticks[0], 1.02), series
    )


def attention_chart(looks: Sequence[Look]) -> Chart:
    middle = looks[len(looks) // 2]
    series = [
        Series(name, [(block, shares[place]) for block, shares in enumerate(middle.shares)])
        for place, name in enumerate(SHARES)
    ]
    x = at_values("block", range(len(middle.shares)))
    y = Axis("share of attention on image tokens", (0, 0.25, 0.5, 0.75, 1), 0, 1)
    return Chart(f"Attention, step {middle.step}", x, y, series)
