"""`instgenie calibrate`: measures a device, prints how well the latency model fits, and writes it with a plot."""

import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from instgenie.bench.files import write_text
from instgenie.bench.scatter import draw_scatter
from instgenie.cost.latency import Latency, calibrated_name, latency_path, write_latency
from instgenie.cost.network import NetworkShape
from instgenie.engine.calibrate import Calibration, Case, calibrate, predict
from instgenie.errors import CalibrationError
from instgenie.models.loading.load import load
from instgenie.telemetry.progress import Progress, show_status
from instgenie.types import Convolutions, Quantization


def calibrate_device(
    name: str,
    device: str,
    size: tuple[int, int] | None,
    out: Path | None,
    quantization: Quantization | None = None,
    convolutions: Convolutions = "dense",
) -> None:
    if out and not out.parent.is_dir():
        raise CalibrationError(f"{out} cannot be written: there is no folder {out.parent}")
    with show_status("loading the model"):
        model = load(name, device, quantization=quantization, convolutions=convolutions)
    name = calibrated_name(name, quantization)
    start = time.perf_counter()
    with Progress(transient=True) as progress:
        steps, loads = progress.add("steps"), progress.add("loads")
        measured = calibrate(
            model, name, size or (model.own_size, model.own_size), on_round=steps.update, on_load=loads.update
        )
    latency, network = measured.latency, model.describe()
    path = out or latency_path(latency.device, name)
    write_latency(latency, path)
    write_text(draw_steps(measured, network), path.with_suffix(".svg"))
    print_steps(measured, network)
    print_summary(latency, path, time.perf_counter() - start)


def compare_steps(measured: Calibration, network: NetworkShape) -> Iterator[tuple[Case, float, float]]:
    """Yield each case with its measured and its predicted seconds."""
    for case, step in zip(measured.cases, measured.steps, strict=True):
        yield case, step.seconds, predict(measured.latency, network, step)


def draw_steps(measured: Calibration, network: NetworkShape) -> str:
    latency = measured.latency
    points: dict[str, list[tuple[float, float]]] = {}
    for case, seconds, predicted in compare_steps(measured, network):
        points.setdefault(case.name, []).append((1000 * seconds, 1000 * predicted))
    title = f"{latency.model} on {latency.device}: R² {latency.r2_compute:.4f}"
    return draw_scatter(title, "measured, ms per step", "predicted, ms per step", points)


def print_steps(measured: Calibration, network: NetworkShape) -> None:
    table = Table(title=f"{measured.latency.model} on {measured.latency.device}")
    for heading in ("plan", "jobs", "masked", "measured ms", "predicted ms", "error"):
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    for case, seconds, predicted in compare_steps(measured, network):
        times = (f"{1000 * value:.2f}" for value in (seconds, predicted))
        table.add_row(
            case.name, str(len(case.jobs)), f"{case.mask_ratio:.2f}", *times, f"{predicted / seconds - 1:+.0%}"
        )
    Console().print(table)


def print_summary(latency: Latency, path: Path, seconds: float) -> None:
    lines = {
        "compute": f"{rate(latency.flop, 1e12)} TFLOP/s, {1e3 * latency.block:.3g} ms per block",
        "load": f"{rate(latency.byte, 1e9)} GB/s, {1e6 * latency.load:.3g} µs per transfer",
        "R²": f"compute {latency.r2_compute:.4f}, load {latency.r2_load:.4f}",
        "seconds": f"{seconds:.1f}",
        "plot": f"{path.with_suffix('.svg')}",
    }
    for name, value in lines.items():
        print(f"{name:<8} {value}")
    print(path)


def rate(seconds: float, per: float) -> str:
    return f"{1 / seconds / per:.3g}" if seconds else "unlimited"
