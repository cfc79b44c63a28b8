"""Gates: a pass waits for rows that set out with it just before it reads them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.cached import KINDS, register_for
from helpers.edits import apart, close, make_edit, prepare

from instgenie.bench.ours import move_to_host
from instgenie.cache.host import HostTier
from instgenie.engine.graphs import Graphs
from instgenie.engine.loading.gates import NUM_GATES, Gates, Passage, gate_of
from instgenie.engine.loading.staging import Staging
from instgenie.engine.register import reuse
from instgenie.jobs.activations import Kind
from instgenie.jobs.job import Job
from instgenie.models.loading.load import load
from instgenie.models.model import Model


class NotedGates(Gates):
    """Gates that note who opens them and who waits."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.opened: list[int] = []
        self.waited: list[int] = []

    def open(self, gate: int, stream: torch.cuda.Stream | None) -> None:
        self.opened.append(gate)

    def wait(self, gate: int) -> None:
        self.waited.append(gate)


@pytest.mark.parametrize("num_places", [1, 3, 8, 57, 70])
def test_every_place_has_a_gate_and_gates_are_met_in_order(num_places: int) -> None:
    gates = [gate_of(place, num_places) for place in range(num_places)]
    assert gates == sorted(gates)
    assert gates[0] == 0
    assert gates[-1] < NUM_GATES
    assert len(set(gates)) == min(num_places, NUM_GATES)


def test_a_pass_waits_once_at_each_gate_and_again_when_it_begins_again() -> None:
    gates = NotedGates()
    passage = Passage(gates, ranks=range(2 * NUM_GATES))
    for _ in range(2):
        for place in range(3, 2 * NUM_GATES):  # the first three places are computed
            passage.reach(place)
    assert gates.waited == 2 * list(range(1, NUM_GATES))


def test_a_pass_that_reads_one_place_waits_for_it_every_time() -> None:
    gates = NotedGates()
    passage = Passage(gates, ranks=range(57))
    for _ in range(3):
        passage.reach(56)
    assert gates.waited == 3 * [NUM_GATES - 1]


def make_far_job(model: Model, kind: Kind = "kv") -> Job:
    edit = make_edit(steps=3)
    near = register_for(model, edit, kind)
    return reuse(prepare(edit, model), move_to_host(near, HostTier(2**30), model))


@torch.inference_mode()
def test_only_rows_of_the_first_gate_set_out_before_the_mark(models: dict[str, Model]) -> None:
    job = make_far_job(models["blend"])
    staging = Staging(job.device, max_bytes=2**30)
    staging.gates = gates = NotedGates()
    staging.bring([job])
    assert gates.opened == [0]
    assert all(staging.addresses(job, 0))  # all have their places
    staging.mark()
    assert job.activations
    assert gates.opened == sorted(
        {gate_of(place, len(job.activations.rows)) for place in range(len(job.activations.rows))}
    )
    staging.look_ahead([job])
    job.step = 1
    staging.bring([job])
    staging.mark()
    assert len(gates.opened) == len(set(gates.opened))  # rows that came ahead open none


@torch.inference_mode()
@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["blend_guided", "sdxl", "sd3"])
def test_a_captured_pass_waits_for_slow_copies(family: str, kind: Kind, folders: dict[str, Path]) -> None:
    """Copies that begin long after the pass is launched change no number."""
    model = load(str(folders[family]), "cuda")
    job = make_far_job(model, kind)
    expected = model.predict([job])[0]
    graphs = Graphs(model)
    for _ in range(4):
        graphs.staging.staged.clear()
        with torch.cuda.stream(graphs.staging.stream):
            torch.cuda._sleep(20_000_000)  # about ten milliseconds
        found = graphs.predict([replace(job)])[0]
        torch.cuda.synchronize()
        for staged in graphs.staging.staged.values():
            for memory in staged.memory:
                memory.fill_(255)  # whoever reads them before they come again sees these
        assert max(map(apart, found, expected)) <= close(model)
    assert graphs.captured
