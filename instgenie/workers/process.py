"""The common part of a worker's processes: load parts of the model, connect to the cluster, say what became of that.
Each role knows what to do with messages."""

import logging
import os
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import torch

from instgenie.cluster.config import ProcessConfig
from instgenie.cluster.wire import Begin, Broken, JobFailed, Loaded, Loading, ModelFacts, Ready, Stop
from instgenie.engine.controls import control_shape
from instgenie.errors import (
    CacheError,
    CalibrationError,
    ConfigError,
    ControlError,
    EditError,
    InstGenieError,
    LoraError,
    LoraStoreError,
    MaskError,
    ModelError,
    OutOfMemoryError,
    PictureError,
)
from instgenie.machine.cores import switch_threads_soon
from instgenie.machine.device import choose_device, stay_near
from instgenie.machine.device_memory import is_out_of_memory
from instgenie.models.family import PartKind
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.scheduling.names import ONE_PROCESS
from instgenie.telemetry import traces
from instgenie.telemetry.logs import Named, log_to_stderr, names_of
from instgenie.workers.fronts import SharedLine
from instgenie.workers.line import Line

PARAMS: dict[type[InstGenieError], str] = {
    PictureError: "image",
    MaskError: "mask",
    LoraError: "loras",
    ControlError: "controls",
}

SECONDS_BETWEEN_REPORTS = 0.3  # of weights that are loading

log = logging.getLogger(__name__)


Serve = Callable[[ProcessConfig, Model, Line], None]


def run_process(encoded: str, serve: Serve, parts: frozenset[PartKind]) -> None:
    """Run a process with this configuration, from start to end; `parts` are the modules whose weights the role
    needs."""
    config = msgspec.json.decode(encoded, type=ProcessConfig)
    log_to_stderr(worker_process=config.name)
    torch.set_grad_enabled(False)
    line = SharedLine(config, pushes_load="network" in parts) if config.has_control else Line(config)
    try:
        stay_near(choose_device(config.device))
        switch_threads_soon()
        needed = None if config.batching in ONE_PROCESS else parts
        given = config.model, config.device, config.dtype, needed, config.quantization
        tell = LoadingReports(line)
        model = load(*given, convolutions=config.convolutions, weights_dtype=config.weights_dtype, on_bytes=tell)
        serve(config, model, line)
    except (ModelError, ConfigError, OutOfMemoryError, CacheError, CalibrationError) as error:
        log.error("cannot start", extra={"reason": str(error)})
        line.send(Broken(str(error)))
    finally:
        line.close()
        traces.close()
    os._exit(0)  # unloading torch would take seconds


class LoadingReports:
    """Tells the cluster how many bytes of weights are loaded, now and then and at the end."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.told_at = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - self.told_at > SECONDS_BETWEEN_REPORTS:
            self.told_at = now
            self.line.send(Loading(done, total))


def say_ready(
    line: Line, model: Model, peer_address: str = "", tells_layers: bool = False, tells_controls: bool = False
) -> None:
    layers = model.layer_table if tells_layers else None
    controls = control_shape(model) if tells_controls else None
    line.send(Ready(facts_of(model), model.digest, peer_address, layers, controls))


def await_begin(line: Line) -> Begin | None:
    """Say that the model is loaded, and wait until all processes on the device have loaded theirs. None: the process is
    told to stop instead."""
    line.send(Loaded())
    while True:
        match line.receive(wait=True):
            case Begin() as begin, _:
                return begin
            case Stop(), _:
                return None


def facts_of(model: Model) -> ModelFacts:
    return ModelFacts(
        name=model.name,
        family=model.family,
        is_fill=model.is_fill,
        own_size=model.own_size,
        steps=model.steps,
        guidance=model.guidance,
        embeds_guidance=model.embeds_guidance,
        whole_strength=round(model.whole_strength, 2),
        needs_true_guidance=model.needs_true_guidance,
        patch=model.patch,
        size_multiple=model.size_multiple,
        num_blocks=sum(model.run_lengths),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        sees_picture=model.sees_picture,
        max_references=model.max_references,
        max_side=model.max_side,
        removes=model.removes,
    )


class Attempt(Named, Protocol):
    """One attempt at a job or a registration."""

    @property
    def attempt(self) -> int: ...


def failure(work: Attempt, error: BaseException) -> JobFailed:
    """The failure to report. Clients get the details only of errors that they can fix; others are logged."""
    id, attempt = work.id, work.attempt
    if isinstance(error, OutOfMemoryError | CacheError) or is_out_of_memory(error):
        log.warning("out of memory", extra=names_of(work))
        return JobFailed(id, attempt, "out_of_memory", str(error).splitlines()[0])
    if isinstance(error, LoraStoreError):
        return JobFailed(id, attempt, "lora_unavailable", str(error))
    if isinstance(error, EditError | PictureError | MaskError | LoraError | ControlError):
        return JobFailed(id, attempt, "bad_input", str(error), PARAMS.get(type(error)))
    log.error("job failed", exc_info=error, extra=names_of(work))
    return JobFailed(id, attempt, "internal", f"the edit failed: {type(error).__name__}")
