"""What a model costs on two CPU cores, in parameters and in bytes."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

import instgenie
from instgenie.editor import Editor
from instgenie.machine.model_folders import BUILTIN
from training.measure.bench import SIZE, Candidate, Values
from training.sampling import load_pipeline

NUM_THREADS = 2
MIB = 2**20


def cost_figures(candidates: Sequence[Candidate], steps: int, repeats: int) -> dict[str, Values]:
    """Timings of several models are taken in turn, so that a busy machine slows all of them alike."""
    decoders = {one.name: make_decoder(one.folder) for one in candidates}
    edits = {one.name: make_edit(one.folder, steps) for one in candidates}
    with threads(NUM_THREADS):
        decoding, editing = timed(decoders, 3 * repeats), timed(edits, repeats)
    return {
        one.name: {
            "decoder, thousand FLOPs a pixel": count_flops(decoders[one.name]) / SIZE**2 / 1000,
            "decoder, milliseconds": decoding[one.name] * 1000,
            "dense edit, seconds": editing[one.name],
            "parameters of the transformer, million": count_parameters([one.pipe.transformer]),
            "parameters, million": count_parameters(parts_of(one)),
            **sizes(one.folder),
        }
        for one in candidates
    }


def parts_of(candidate: Candidate) -> list[torch.nn.Module]:
    return [part for part in candidate.pipe.components.values() if isinstance(part, torch.nn.Module)]


def count_parameters(parts: Sequence[torch.nn.Module]) -> float:  # in millions
    return sum(parameter.numel() for part in parts for parameter in part.parameters()) / 1e6


def make_decoder(folder: Path) -> Callable[[], object]:
    """Decode the latents of one picture in float32."""
    vae = load_pipeline(str(folder), "cpu", torch.float32).vae
    with torch.inference_mode():
        latents = torch.zeros_like(vae.encode(torch.zeros(1, 3, SIZE, SIZE)).latents)

    def decode() -> object:
        with torch.inference_mode():
            return vae.decode(latents)

    return decode


def make_edit(folder: Path, steps: int) -> Callable[[], object]:
    """An edit as the engine runs it, with autoencoder and text encoders, that computes every token at every step."""
    editor = Editor(str(folder), device="cpu", dtype="float32")
    picture = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    mask = np.zeros((SIZE, SIZE), dtype=np.bool_)
    mask[80:176, 80:176] = True
    return lambda: editor.edit(picture, mask, "a photo of a Pug dog", steps=steps, reuse="off", size=(SIZE, SIZE))


def timed(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each, after a first run that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return {name: median(values[1:]) for name, values in seconds.items()}


def count_flops(function: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return int(counter.get_total_flops())


@contextmanager
def threads(num: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    yield
    torch.set_num_threads(before)


def sizes(folder: Path) -> Values:
    """Of the folder, and of the package with this folder as its built-in model."""
    package = Path(instgenie.__file__).parent
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    code = sum(path.stat().st_size for path in files if not path.is_relative_to(BUILTIN))
    model = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return {"package, MiB": (code + sum(model)) / MIB, "largest file, MiB": max(model) / MIB}
