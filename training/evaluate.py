"""Measures a pipeline folder on photographs and scenes kept out of training, with another model beside it.

    python -m training.evaluate --photos DIR --scenes DIR/scenes --out OUT [--pipeline NEW] [--against OLD]

Prints one table of every figure, its bar and whether it is passed, and writes figures.json, figures.md, samples.png,
removal.jpg and blind.jpg into OUT. removal.jpg shows scenes of the given folder; samples.png and blind.jpg show only
what the model made and the photographs that ship with the package. With `--parts` the figures of the other parts stay
as they are in OUT.
"""

import argparse
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

import instgenie
from instgenie.machine.model_folders import BUILTIN
from instgenie.models.loading.folder import BUILTIN_DEFAULTS
from training.measure import removal
from training.measure.autoencoder import autoencoder_figures
from training.measure.bars import GROUPS
from training.measure.bench import Bench, Candidate, Values
from training.measure.cost import cost_figures
from training.measure.edits import edit_figures, prompt_figures, text_figures
from training.measure.pasting import KINDS, Removals, load_removals
from training.measure.photographs import Holdout, prepare, where
from training.measure.report import NEW, OLD, FigureReport, Measured, digest, markdown, terminal_table, write_page
from training.measure.sheets import compared_sheet, random_edits, sample_sheet
from training.pipeline import wait_for
from training.scenes import load_scenes

EXAMPLES = Path(instgenie.__file__).parent / "examples"
BLIND = "blind"  # a part without figures
PARTS = (*GROUPS, BLIND)
PER_SPECIES = {"cat": 6, "dog": 10, "flower": 5, "clothing": 11}  # prompts of the sample sheet
NUM_SHOWN = 24  # edits of a sheet


class Evaluation:
    """Measures the parts one after the other, each with all models, so that photographs and probes are made once."""

    def __init__(self, bench: Bench, args: argparse.Namespace) -> None:
        self.bench, self.args, self.path = bench, args, args.out / "figures.json"
        self.num_shown = args.num_scenes if args.quick else NUM_SHOWN
        self.candidates: list[Candidate] = []
        self.report = FigureReport()

    def run(self) -> FigureReport:
        parts = set(self.args.parts)
        if parts == {"cost"}:
            self.load()
        else:
            holdout = prepare(self.bench, self.args.photos, self.args.num_train, self.args.num_val)
            self.log(f"{len(holdout.train)} training and {len(holdout.val)} validation photographs are embedded")
            self.pictures(holdout, parts)
        if "cost" in parts:
            costs = cost_figures(self.candidates, self.bench.steps, 1 if self.args.quick else 3)
            for candidate in self.candidates:
                self.keep("cost", candidate, costs[candidate.name])
        return self.report

    def load(self) -> None:
        """Load the models, once the new one is there."""
        if self.args.wait:
            torch.cuda.empty_cache()  # what others train meanwhile needs the memory
            wait_for(self.args.pipeline)
        folders = {NEW: self.args.pipeline, OLD: self.args.against}
        self.candidates = [Candidate.load(name, at, self.bench.device) for name, at in folders.items() if at]
        self.report.models = {one.name: Measured(digest(one.folder)) for one in self.candidates}
        if self.path.exists():
            self.report.keep_from(FigureReport.load(self.path))

    def pictures(self, holdout: Holdout, parts: set[str]) -> None:
        bench, scenes = self.bench, self.args.scenes
        if "removal" in parts:
            removals = load_removals(holdout.val, scenes, "val", self.args.num_scenes)
            probe = removal.fit_probe(bench, holdout, scenes, self.args.num_scenes)
            starts = removal.starts(bench, removals)
        self.load()
        self.report.real["edits"] = holdout.ceilings
        if "autoencoder" in parts:
            crops = load_scenes(scenes, "val", self.args.num_scenes)
            for candidate in self.candidates:
                self.keep("autoencoder", candidate, autoencoder_figures(bench, holdout, crops, candidate))
        if "removal" in parts:
            self.removals(removals, probe, starts)
        if "text to image" in parts:
            for candidate in self.candidates:
                self.keep("text to image", candidate, text_figures(bench, holdout, candidate))
            prompts = sheet_prompts(holdout, self.num_shown + 8)
            samples = bench.generate(self.candidates[0], prompts, salt=40)
            sample_sheet(samples, prompts).save(self.args.out / "samples.png")
        for name, measure in (("edits", edit_figures), ("prompts", prompt_figures)):
            for candidate in self.candidates if name in parts else ():
                self.keep(name, candidate, measure(bench, holdout, candidate))
        if BLIND in parts:
            self.blind(sorted(set(holdout.val.captions)))

    def removals(self, removals: Removals, probe: removal.Probe, starts: removal.Starts) -> None:
        self.report.real["removal"] = removal.real_figures(self.bench, removals, probe)
        rows = range(min(self.num_shown, len(removals)))
        cases = [(i, KINDS[i % 3], removal.CAPTIONS[i // 3 % 3]) for i in rows]  # each mask with each caption
        shown = {}
        for candidate in self.candidates:
            figures: Values = {}
            for start, contents in starts.items():
                filled = removal.fill_all(self.bench, removals, candidate, contents)
                found = removal.removal_figures(self.bench, removals, probe, filled)
                figures |= {f"{name}{start}": value for name, value in found.items()}
                filled_cases = [filled[kind, caption][i] for i, kind, caption in cases]
                shown[f"{candidate.name}{start}"] = torch.stack(filled_cases)
            self.keep("removal", candidate, figures)
        masks = torch.stack([removals.masks[kind][i] for i, kind, _ in cases])
        captions = [caption for _, _, caption in cases]
        made = compared_sheet(removals.pasted[: len(cases)], masks, captions, shown)
        made.save(self.args.out / "removal.jpg", quality=90)

    def blind(self, captions: Sequence[str]) -> None:
        """Random edits of the photographs that ship with the package, none of them picked."""
        edits = random_edits(EXAMPLES, captions, self.num_shown, self.bench.seed)
        made = {
            one.name: self.bench.edit(one, edits.pictures, edits.masks, edits.prompts, salt=50)
            for one in reversed(self.candidates)  # the old model stands left
        }
        compared = compared_sheet(edits.pictures, edits.masks, edits.prompts, made, with_input=False)
        compared.save(self.args.out / "blind.jpg", quality=90)
        self.log("random edits are drawn")

    def keep(self, group: str, candidate: Candidate, values: Values) -> None:
        self.report.models[candidate.name].figures[group] = values
        self.report.runs[group] = {
            "device": "a CPU, two threads" if group == "cost" else device_name(self.bench.device),
            "steps": self.bench.steps,
            "guidance": self.bench.guidance,
            "seed": self.bench.seed,
        }
        self.report.save(self.path)  # an evaluation that is interrupted leaves the figures it has
        self.log(f"{group} of the {candidate.name} model")

    def log(self, line: str) -> None:
        self.bench.console.log(line)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else f"a CPU ({platform.machine()})"


def sheet_prompts(holdout: Holdout, limit: int) -> list[str]:
    prompts = []
    for species, count in PER_SPECIES.items():
        captions = sorted({holdout.val.captions[i] for i in where(holdout.val, species)})
        picks = torch.linspace(0, len(captions) - 1, min(count, len(captions))).round().long().tolist()
        prompts += [captions[i] for i in picks]
    return prompts[:limit]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", required=True, type=Path, help="folder with captions.csv and the shards")
    parser.add_argument("--scenes", type=Path, help="folder with scenes.csv and the shards (default: PHOTOS/scenes)")
    parser.add_argument("--pipeline", type=Path, default=BUILTIN, help="the new model (default: the built-in one)")
    parser.add_argument("--wait", action="store_true", help="read the photographs first, then wait for --pipeline")
    parser.add_argument("--against", type=Path, help="the old model, to compare with")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="measure these alone")
    parser.add_argument("--card", type=Path, help="a Markdown page whose part between two marks gets the tables")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=BUILTIN_DEFAULTS["steps"])
    parser.add_argument("--guidance", type=float, default=BUILTIN_DEFAULTS["guidance"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-val", type=int, help="validation photographs (default: all)")
    parser.add_argument("--num-train", type=int, help="training photographs, for the probes (default: all)")
    parser.add_argument("--num-scenes", type=int, help="validation scenes (default: all)")
    parser.add_argument("--quick", action="store_true", help="every figure on few pictures with few steps")
    args = parser.parse_args(arguments)
    args.scenes = args.scenes or args.photos / "scenes"
    if {"autoencoder", "removal"} & set(args.parts) and not (args.scenes / "scenes.csv").is_file():
        parser.error(f"{args.scenes} holds no scenes.csv: pass --scenes, or --parts without autoencoder and removal")
    for folder in filter(None, (None if args.wait else args.pipeline, args.against)):
        if not (folder / "model_index.json").is_file():
            parser.error(f"{folder} holds no model_index.json: a pipeline folder is expected")
    if args.quick:
        args.steps = min(args.steps, 2)
        args.num_val, args.num_train = args.num_val or 8, args.num_train or 120
        args.num_scenes = args.num_scenes or 2
    return args


def main(arguments: Sequence[str] | None = None, bench: Bench | None = None) -> FigureReport:
    """`bench` brings networks of its own to judge with."""
    args = parse(arguments)
    start = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    bench = bench or Bench.load(args.device, args.steps, args.guidance, args.seed)
    report = Evaluation(bench, args).run()
    (args.out / "figures.md").write_text(markdown(report))
    if args.card:
        write_page(report, args.card)
    Console(width=120).print(terminal_table(report))
    bench.console.log(f"{time.monotonic() - start:.0f} s")
    return report


if __name__ == "__main__":
    main()
