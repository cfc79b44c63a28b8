"""Latency: predicts the seconds of a step from its FLOPs and bytes, by linear models fitted to one device.

    compute of a block    = block + flop * FLOPs
    outside of the blocks = flop_outside * FLOPs               (convolutions, embeddings)
    load of a block       = sum over jobs: load + byte * bytes (nothing for rows in GPU memory)

Convolutions that compute masked tiles alone have fewer FLOPs, and their rows are loaded with those of the blocks.

Knows numbers only, so that a process without torch can predict. Two streams run side by side, one loads and one
computes: `makespan` is the time at which the last compute ends.
"""

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from instgenie.cost.network import (
    BlockShape,
    Demand,
    NetworkShape,
    block_flops,
    convolution_bytes,
    count_passes,
    load_bytes,
    outside_flops,
    reads_tiles,
    step_flops,
)
from instgenie.errors import CalibrationError
from instgenie.machine.files import complete_file
from instgenie.types import Quantization

VERSION = 1
NO_LOADS = [0.0, 0.0], 0.0  # the fit if no load was measured


class BlockCost(NamedTuple):
    """Seconds of one block, for all jobs of a batch."""

    cached: float  # compute of the cached block, once its rows are loaded
    dense: float  # compute of the dense block
    load: float  # of the rows that the cached block reads


@dataclass(frozen=True)
class Latency:
    """The fitted coefficients, in seconds."""

    device: str  # its name
    model: str
    block: float  # fixed, per block
    flop: float  # per FLOP inside the blocks
    flop_outside: float  # per FLOP outside the blocks
    load: float  # fixed, per transfer
    byte: float  # per byte transferred
    r2_compute: float = 0.0  # R² of the fit; 0 if nothing was measured
    r2_load: float = 0.0

    def block_costs(
        self, network: NetworkShape, demands: Sequence[Demand], plan: Sequence[bool] = ()
    ) -> list[BlockCost]:
        """The cost of each block with a plan, or with every block cached. Blocks of one shape cost the same, unless
        some need no load. Each loads its share of what convolutions read."""
        far = [demand for demand in demands if reads_tiles(demand, plan) and not demand.in_gpu]
        extra = self.byte * sum(convolution_bytes(network, demand) for demand in far) / max(len(network.blocks), 1)
        seen: dict[object, BlockCost] = {}
        costs = []
        block = self.block * count_passes(network, demands)
        for index, shape in enumerate(network.blocks):
            loads = tuple(index not in demand.in_gpu for demand in demands)
            if (shape, loads) not in seen:
                cost = self.block_cost(shape, demands, loads, block)
                seen[shape, loads] = cost._replace(load=cost.load + extra)
            costs.append(seen[shape, loads])
        return costs

    def block_cost(
        self, shape: BlockShape, demands: Sequence[Demand], loads: Sequence[bool], block: float
    ) -> BlockCost:
        sizes = (load_bytes(shape, demand) for demand, has_load in zip(demands, loads, strict=True) if has_load)
        return BlockCost(
            cached=block + self.flop * sum(block_flops(shape, demand, True) for demand in demands),
            dense=block + self.flop * sum(block_flops(shape, demand, False) for demand in demands),
            load=sum(self.load + self.byte * size for size in sizes if size),
        )

    def outside(self, network: NetworkShape, demands: Sequence[Demand], plan: Sequence[bool] = ()) -> float:
        """Seconds outside the blocks, with a plan or with every block cached."""
        return self.flop_outside * sum(outside_flops(network, demand, plan) for demand in demands)

    def predict_step(
        self, network: NetworkShape, demands: Sequence[Demand], plan: Sequence[bool], lead: float = 0.0
    ) -> float:
        """Seconds of one step of these jobs with one plan; jobs without activations are dense in any plan."""
        costs = self.block_costs(network, demands, plan)
        return self.outside(network, demands, plan) + makespan(plan, costs, lead)


def makespan(plan: Sequence[bool], costs: Sequence[BlockCost], lead: float = 0.0) -> float:
    """The time at which the last compute ends, if computing starts at 0 and loading `lead` seconds earlier. Loads run
    back to back in the order of the blocks; a block starts to compute when the block before and its own load are done.
    """
    loaded, computed = -lead, 0.0
    for cached, cost in zip(plan, costs, strict=True):
        if cached:
            loaded += cost.load
            computed = max(computed, loaded) + cost.cached
        else:
            computed += cost.dense
    return computed


@dataclass(frozen=True)
class StepSample:
    """A measured step that loads nothing."""

    demands: tuple[Demand, ...]
    plan: tuple[bool, ...]
    seconds: float


@dataclass(frozen=True)
class LoadSample:
    """A measured transfer."""

    num_bytes: int
    seconds: float


def fit_latency(
    device: str, model: str, network: NetworkShape, steps: Sequence[StepSample], loads: Sequence[LoadSample]
) -> Latency:
    outside = [sum(outside_flops(network, demand, step.plan) for demand in step.demands) for step in steps]
    inside = [step_flops(network, step.demands, step.plan) - other for step, other in zip(steps, outside, strict=True)]
    blocks = [len(network.blocks) * count_passes(network, step.demands) for step in steps]
    (block, flop, flop_outside), r2_compute = fit([blocks, inside, outside], [step.seconds for step in steps])
    sizes = [sample.num_bytes for sample in loads]
    (load, byte), r2_load = fit([[1] * len(loads), sizes], [sample.seconds for sample in loads]) if loads else NO_LOADS
    return Latency(device, model, block, flop, flop_outside, load, byte, r2_compute, r2_load)


def fit(columns: Sequence[Sequence[int]], seconds: Sequence[float]) -> tuple[list[float], float]:
    """Fit seconds as a sum of columns with coefficients of at least 0, by least squares of the relative errors; return
    the coefficients and R²."""
    table, measured = np.array(columns, float).T, np.array(seconds)  # [samples, columns], [samples]
    slopes = np.zeros(len(columns))
    used = [column for column in range(len(columns)) if table[:, column].any()]
    while used:
        scales = table[:, used].max(axis=0)
        found = np.linalg.lstsq(table[:, used] / scales / measured[:, None], np.ones(len(measured)), rcond=None)[0]
        if (found >= 0).all():
            slopes[used] = found / scales
            break
        del used[int(found.argmin())]
    left = ((measured - table @ slopes) ** 2).sum()
    spread = ((measured - measured.mean()) ** 2).sum()
    return slopes.tolist(), float(max(1 - left / spread, 0)) if spread else 0.0


def write_latency(latency: Latency, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with complete_file(path) as partial:
            partial.write_text(json.dumps({"version": VERSION} | asdict(latency), indent=2) + "\n")
    except OSError as error:
        raise CalibrationError(f"{path} cannot be written: {error.strerror}") from error


def read_latency(path: Path) -> Latency:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{path} cannot be read as a latency file: {error}") from error
    if not isinstance(found, dict) or found.pop("version", None) != VERSION:
        raise CalibrationError(f"{path} is not a latency file of version {VERSION}: run instgenie calibrate")
    kinds = {field.name: field.type for field in fields(Latency)}
    if found.keys() != kinds.keys():
        raise CalibrationError(
            f"{path} has the fields {', '.join(sorted(found))}, but {', '.join(sorted(kinds))} are expected"
        )
    for name, value in found.items():
        if not (isinstance(value, str) if kinds[name] is str else is_duration(value)):
            raise CalibrationError(f"{path} has {name}={value!r}, but {KINDS[kinds[name] is str]} is expected")
    return Latency(**found)


KINDS = {True: "a string", False: "a number of at least 0"}


def is_duration(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def find_latency(device: str, model: str, kind: str) -> Latency:
    """The latency measured for a device and a model, or else the default for the kind of device, cpu or cuda."""
    path = latency_path(device, model)
    return read_latency(path) if path.is_file() else replace(DEFAULTS[kind], device=device, model=model)


def calibrated_name(model: str, quantization: Quantization | None) -> str:
    """The name by which the latency of a model with such products is kept."""
    return f"{model} {quantization}" if quantization else model


def latency_path(device: str, model: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = "--".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-.") for part in (device, model))
    return cache / "instgenie" / "latency" / f"{name}.json"


DEFAULTS = {
    "cpu": Latency("cpu", "any", block=1e-3, flop=7e-12, flop_outside=7e-12, load=5e-6, byte=2e-10),
    "cuda": Latency("cuda", "any", block=2.5e-4, flop=2.2e-15, flop_outside=4e-15, load=1e-5, byte=1 / 55e9),
}
