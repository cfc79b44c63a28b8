"""Makes a pipeline folder the built-in model: python -m training.ship FOLDER FIGURES

FOLDER is a trained pipeline with its adapters in `loras/` and `controlnets/`, and FIGURES the folder in which
`training.evaluate` has compared it with the present built-in model. A folder that is too large, that lacks an adapter
of the present model, that cannot edit with its adapters, or whose figures are incomplete or of another model, changes
nothing.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from instgenie.adapters.shipped import CONTROLNETS, LORAS, shipped_controlnets, shipped_loras
from instgenie.bench.markdown import markdown_table, put_between
from instgenie.editor import Editor
from instgenie.errors import InstGenieError, ModelError
from instgenie.machine.model_folders import BUILTIN
from instgenie.models.loading.folder import check_index, read_index, stored_tensors
from training.measure.bars import GROUPS, ROWS
from training.measure.cost import MIB, sizes
from training.measure.report import NEW, FigureReport, digest, write_page

ROOT = Path(__file__).parent.parent
CARD = "MODEL_CARD.md"
FIGURES = "figures.json"
SHOWN = FIGURES, "samples.png", "blind.jpg"  # what the documentation shows of an evaluation
PARTS = "<!-- parts -->", "<!-- end of parts -->"
SHEETS = "<!-- random edits -->", "<!-- end of random edits -->"
RANDOM_EDITS = "![Random edits, none picked: the earlier model and this one](docs/blind.jpg)\n"


def ship(folder: Path, figures: Path, root: Path = ROOT, builtin: Path = BUILTIN) -> None:
    """`root` is the repository whose card and docs show the model, `builtin` the folder that is replaced."""
    check(folder, builtin)
    report, parts = read_figures(figures, folder, root), describe(folder)
    replace(builtin, folder)
    for name in SHOWN:
        shutil.copy(figures / name, root / "docs")
    write_page(report, root / CARD)
    card = put_between((root / CARD).read_text(), parts, *PARTS)
    (root / CARD).write_text(put_between(card, RANDOM_EDITS, *SHEETS))


def check(folder: Path, builtin: Path) -> None:
    """Raise unless the folder can take the place of the built-in model."""
    if builtin.resolve() in (folder.resolve(), *folder.resolve().parents):
        raise ModelError(f"{folder} is the built-in model, or lies in it: another folder is expected")
    check_index(folder)
    for found in (shipped_loras, shipped_controlnets):
        if missing := found(str(builtin)).keys() - found(str(folder)).keys():
            raise ModelError(f"{folder} lacks the adapters {', '.join(sorted(missing))}: training/adapters makes them")
    limits = {row.name: row.bar.high for row in ROWS}
    for name, value in sizes(folder).items():
        if value > limits[name]:
            raise ModelError(f"{folder} is too large: {name} {value:.1f}, and {limits[name]:g} is the most")
    try_adapters(str(folder))


def read_figures(figures: Path, folder: Path, root: Path) -> FigureReport:
    if missing := [name for name in SHOWN if not (figures / name).is_file()]:
        raise ModelError(f"{figures} lacks {', '.join(missing)}: training.evaluate writes them")
    if figures.resolve() == (root / "docs").resolve():
        raise ModelError(f"{figures} is where the figures go: those of the new model are expected beside it")
    report = FigureReport.load(figures / FIGURES)
    measured = report.models[NEW]
    if measured.digest != digest(folder):
        raise ModelError(f"the new model of {figures} is not the one in {folder}: measure it again")
    if missing := [group for group in GROUPS if group not in measured.figures]:
        raise ModelError(f"{figures} lacks the figures of {', '.join(missing)}: measure these parts")
    return report


def try_adapters(folder: str) -> None:
    """Edit once with all adapters: one that does not fit the model raises."""
    editor = Editor(folder, device="cpu")
    picture, mask = np.full((64, 64, 3), 128, np.uint8), np.ones((64, 64), np.bool_)
    controls = [{"name": name, "image": "canny"} for name in shipped_controlnets(folder)]
    editor.edit(picture, mask, "", steps=1, size=(64, 64), loras=list(shipped_loras(folder)), controls=controls)


def replace(builtin: Path, folder: Path) -> None:
    """Put a model in the place of another; single files that the new one lacks stay, as the suggested prompts. The old
    one stays until the new one is there in full."""
    coming, going = (builtin.with_name(f"{builtin.name}.{name}") for name in ("coming", "going"))
    shutil.rmtree(coming, ignore_errors=True)
    try:
        coming.mkdir()
        for path in builtin.iterdir():
            if path.is_file():
                shutil.copy2(path, coming)
        shutil.copytree(folder, coming, dirs_exist_ok=True)
        builtin.rename(going)
        coming.rename(builtin)
    finally:
        shutil.rmtree(coming, ignore_errors=True)
    shutil.rmtree(going)


def describe(folder: Path) -> str:
    """The part of the card that tells what the model consists of."""
    network, vae, clip, t5 = (
        json.loads((folder / part / "config.json").read_text())
        for part in ("transformer", "vae", "text_encoder", "text_encoder_2")
    )
    index, scheduler = read_index(folder), json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    num_latents, num_tokens = network["out_channels"], num_text_tokens(folder)
    inputs = f"{num_latents} noisy latents, {num_latents} clean masked latents, "
    inputs += f"{network['in_channels'] - 2 * num_latents} mask pixels"
    blocks = f"{network['num_layers']} double and {network['num_single_layers']} single blocks"
    heads = f"{network['num_attention_heads']} heads of {network['attention_head_dim']}"
    shrunk = 2 ** (len(vae["encoder_block_out_channels"]) - 1)
    encoders = [
        f"`{class_of(index, part)}` ({num_layers} layers of {width})"
        for part, num_layers, width in (
            ("text_encoder", clip["num_hidden_layers"], clip["hidden_size"]),
            ("text_encoder_2", t5["num_layers"], t5["d_model"]),
        )
    ]
    rows = [
        ("part", "class", "parameters"),
        (
            "transformer",
            f"`{class_of(index, 'transformer')}`: {blocks}, {heads}, guidance embedding, {network['in_channels']} "
            f"input channels ({inputs})",
            millions(folder, "transformer"),
        ),
        (
            "autoencoder",
            f"`{class_of(index, 'vae')}`: {shrunk}× smaller, {vae['latent_channels']} channels",
            millions(folder, "vae"),
        ),
        (
            "text",
            f"{' and '.join(encoders)}, one token per word, {num_tokens} tokens",
            millions(folder, "text_encoder", "text_encoder_2"),
        ),
        ("scheduler", f"`{class_of(index, 'scheduler')}`, shift {scheduler['shift']:g}", ""),
    ]
    adapters = mebibytes(folder / LORAS) + mebibytes(folder / CONTROLNETS)
    weights = f"The weights are float16 safetensors of {mebibytes(folder) - adapters:.0f} MiB, "
    weights += f"and the adapters have another {adapters:.0f} MiB.\n"
    return f"{markdown_table(rows, num_left=2)}\n{weights}"


def class_of(index: dict[str, Any], part: str) -> str:
    return str(index[part][1])


def num_text_tokens(folder: Path) -> int:
    return int(json.loads((folder / "tokenizer_2" / "tokenizer_config.json").read_text())["model_max_length"])


def millions(folder: Path, *parts: str) -> str:
    count = sum(tensor.num_values for part in parts for tensor in stored_tensors(folder / part).values())
    return f"{count / 1e6:.1f} M"


def mebibytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors")) / MIB


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the pipeline folder, with loras/ and controlnets/")
    parser.add_argument("figures", type=Path, help="what training.evaluate wrote about it: --out")
    args = parser.parse_args(arguments)
    try:
        ship(args.folder, args.figures)
    except InstGenieError as error:
        parser.error(str(error))
    print(f"{args.folder} is the built-in model: see training/README.md for what follows")


if __name__ == "__main__":
    main()
