"""`python -m instgenie.cli.demo`: edits the example photographs into one sheet, with the time that edits take.

A photograph's edits are timed in three ways: *dense* computes every token, *cold* edits a photograph of which nothing
is kept yet, and *cached* a registered one. A time is the median of the photograph's prompts."""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from instgenie.cli import EXIT_BAD_INPUT, EXIT_INTERRUPTED
from instgenie.cli.arguments import add_model
from instgenie.cli.screen import hide_loading_bars, quiet_libraries
from instgenie.errors import EditError, InstGenieError
from instgenie.pictures.examples import EXAMPLES, Example, read_examples
from instgenie.pictures.fitting import crop
from instgenie.pictures.picture import check_edit, check_target, save_picture
from instgenie.pictures.sheet import SheetRow, draw_sheet
from instgenie.telemetry.progress import Progress, Task, show_status
from instgenie.types import Edit, Result

if TYPE_CHECKING:
    from instgenie.editor import Editor

OUTPUT = Path("out/demo.png")


def make_sheet(options: argparse.Namespace, console: Console) -> None:
    examples = read_examples(options.examples)[: options.rows]
    if not examples:
        raise EditError(f"{options.examples / 'edits.toml'} lists no edit: at least one is needed")
    for example in examples:
        for edit in example.edits(steps=options.steps, size=options.size):
            check_edit(edit)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    check_target(options.output)
    with show_status("loading the model", console):
        from instgenie.editor import Editor  # imports torch and diffusers

        hide_loading_bars()
        editor = Editor(model=options.model, device=options.device)
        editor.edit_many([replace(examples[0].edits(size=options.size)[0], steps=1)])  # the first edit is never timed
    with Progress(console) as progress:
        rows = [make_row(editor, example, options, progress.add(example.name)) for example in examples]
    save_picture(draw_sheet(rows, describe(rows, options)), options.output)


def make_row(editor: "Editor", example: Example, options: argparse.Namespace, task: Task) -> SheetRow:
    """Edit one photograph with each of its prompts, and time these edits in every way."""
    from instgenie.jobs.quality import DEFAULT, with_quality

    given = {"steps": options.steps, "size": options.size, "masked_content": example.masked_content}
    edits = [with_quality(edit, DEFAULT) for edit in example.edits(**editor.suited(given))]
    task.update(0, len(edits) * (3 if options.times else 1))
    seconds = {}
    if options.times:
        _, seconds["dense"] = timed(editor, [replace(edit, reuse="off") for edit in edits], task)
        [cold, *_], seconds["cold"] = timed(editor, edits, task)
        edited = crop(example.picture, cold.crop) if cold.crop else example.picture
        editor.register(edited, options.size, options.steps, editor.model.guidance)
    results, cached = timed(editor, edits, task)
    if options.times:
        seconds["cached"] = cached
    return SheetRow(example, [result.picture for result in results], seconds)


def timed(editor: "Editor", edits: Sequence[Edit], task: Task) -> tuple[list[Result], float]:
    """The results of edits, one after the other, and the median of their seconds."""
    results, seconds = [], []
    for edit in edits:
        start = time.perf_counter()
        results += editor.edit_many([edit])
        seconds.append(time.perf_counter() - start)
        task.advance()
    return results, statistics.median(seconds)


def describe(rows: Sequence[SheetRow], options: argparse.Namespace) -> str:
    num_edits = sum(len(row.pictures) for row in rows)
    words = (
        f"{num_edits} edits of {len(rows)} photographs, {options.steps} steps each, model {Path(options.model).name}"
    )
    if not options.times:
        return words
    import torch

    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    where = f"{torch.get_num_threads()} CPU cores" if device == "cpu" else torch.cuda.get_device_name()
    return f"{words}. Seconds of one edit on {where}: computing everything, of a new photograph, and cached"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m instgenie.cli.demo", description="Edit the example photographs into one sheet."
    )
    parser.add_argument("--examples", type=Path, default=EXAMPLES, help="folder with edits.toml and its pictures")
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT, help="file of the sheet (default out/demo.png)")
    parser.add_argument("--steps", type=int, default=12, help="number of denoising steps (default 12)")
    parser.add_argument("--rows", type=int, help="edit only so many photographs, the first ones (default: all)")
    parser.add_argument("--times", action="store_true", help="time the edits of each photograph dense, cold and cached")
    add_model(parser)
    options = parser.parse_args(arguments)
    quiet_libraries()
    try:
        make_sheet(options, Console(stderr=True))
    except InstGenieError as error:
        print(f"demo: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    print(f"sheet: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
