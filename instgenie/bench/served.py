"""What a comparison of policies on real servers records, and its file: every edit with its latency, and every step with
the jobs in it, so that the simulator can be compared with it later."""

import statistics
from pathlib import Path

import msgspec
import numpy as np

from instgenie.bench.files import write_text
from instgenie.bench.workload import Arrival, WorkloadRecipe
from instgenie.errors import WorkloadError


class ServedStudy(msgspec.Struct, frozen=True):
    """What is the same for every server."""

    model: str
    device: str
    recipe: WorkloadRecipe  # its rate and number of edits follow from the load
    seconds: float = 60.0  # of each load
    slo_scale: float = 5.0  # deadline, as a multiple of what the edit takes alone
    flags: tuple[str, ...] = ()  # of every server


class ServedEdit(msgspec.Struct, frozen=True):
    at: float
    template: int
    steps: int | None  # None: the model's own
    deadline: float  # seconds
    latency: float
    error: str = ""  # empty: none
    num_tokens: int = 0
    num_masked_tokens: int = 0
    prepare: float = 0.0  # seconds
    finish: float = 0.0
    outside: float = 0.0  # seconds of its latency that the server's stages do not know: sending, decoding, encoding
    num_preemptions: int = 0
    predicted: float = 0.0  # seconds from acceptance to the picture, as the server said; 0: it said nothing

    @property
    def in_time(self) -> bool:
        return not self.error and self.latency <= self.deadline


class ServedJob(msgspec.Struct, frozen=True, array_like=True):
    """A job in one step."""

    num_tokens: int
    num_masked_tokens: int
    step: int
    num_steps: int
    is_cached: bool


class ServedStep(msgspec.Struct, frozen=True, array_like=True):
    seconds: float
    between: float  # since the step before; 0 after an idle time
    jobs: tuple[ServedJob, ...]


class ServedRun(msgspec.Struct, frozen=True):
    policy: str
    load: float  # share of what the server sustains
    rate: float  # edits per second
    edits: tuple[ServedEdit, ...]
    steps: tuple[ServedStep, ...]

    @property
    def attainment(self) -> float:
        return sum(edit.in_time for edit in self.edits) / len(self.edits)

    @property
    def prediction_error(self) -> float | None:
        """Mean relative error of the latencies that the server predicted at acceptance; None if it predicted none."""
        known = [edit for edit in self.edits if edit.predicted and not edit.error]
        return statistics.fmean(abs(edit.predicted / edit.latency - 1) for edit in known) if known else None

    @property
    def latencies(self) -> list[float]:
        return [edit.latency for edit in self.edits if not edit.error] or [float("nan")]


class AloneSeconds(msgspec.Struct, frozen=True):
    """Latencies of edits of one size and number of steps on the idle server, by mask ratio."""

    size: tuple[int, int]
    steps: int | None
    ratios: tuple[float, ...]  # ascending
    seconds: tuple[float, ...]


class ServedRecord(msgspec.Struct):
    study: ServedStudy
    machine: str
    num_workers: int
    max_batch_size: int
    capacity: float  # edits per second that the server sustains, measured by a burst
    alone: tuple[AloneSeconds, ...]
    runs: list[ServedRun] = []

    def deadline_of(self, arrival: Arrival) -> float:
        """Seconds, on the line between the two measured mask ratios next to its own."""
        [known] = [one for one in self.alone if (one.size, one.steps) == (arrival.size, arrival.steps)]
        return self.study.slo_scale * float(np.interp(arrival.mask_ratio, known.ratios, known.seconds))

    def has(self, policy: str, load: float) -> bool:
        return any((run.policy, run.load) == (policy, load) for run in self.runs)

    def write(self, path: Path) -> None:
        write_text(msgspec.json.encode(self).decode() + "\n", path)


def read_record(path: Path) -> ServedRecord:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ServedRecord)
    except (OSError, msgspec.DecodeError) as error:
        raise WorkloadError(f"{path} cannot be read as a comparison of policies: {error}") from None
