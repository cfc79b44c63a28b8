"""`python -m instgenie.cli.demo`: edits the example pictures into one contact sheet."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from instgenie.cli import EXIT_BAD_INPUT, EXIT_INTERRUPTED
from instgenie.cli.arguments import add_model
from instgenie.cli.screen import hide_loading_bars, quiet_libraries
from instgenie.errors import EditError, InstGenieError
from instgenie.pictures.examples import EXAMPLES, read_examples
from instgenie.pictures.picture import check_edit, check_target, save_picture
from instgenie.pictures.sheet import SheetRow, draw_sheet
from instgenie.telemetry.progress import Progress, show_status

OUTPUT = Path("out/demo.png")


def make_sheet(options: argparse.Namespace, console: Console) -> None:
    examples = read_examples(options.examples)
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
    rows = []
    with Progress(console) as progress:
        for example in examples:
            task = progress.add(example.name)
            results = editor.edit_many(example.edits(steps=options.steps, size=options.size), task.update)
            rows.append(SheetRow(example, [result.picture for result in results]))
    num_edits = sum(len(row.pictures) for row in rows)
    subtitle = f"{num_edits} edits, {options.steps} steps each, model {Path(options.model).name}"
    save_picture(draw_sheet(rows, subtitle), options.output)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m instgenie.cli.demo", description="Edit the example pictures into one contact sheet."
    )
    parser.add_argument("--examples", type=Path, default=EXAMPLES, help="folder with edits.toml and its pictures")
    parser.add_argument(
        "-o", "--output", type=Path, default=OUTPUT, help="file of the contact sheet (default out/demo.png)"
    )
    parser.add_argument("--steps", type=int, default=28, help="number of denoising steps (default 28)")
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
    print(f"contact sheet: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
