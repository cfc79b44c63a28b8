"""The process of ControlNets and its clients, message by message: here the test turns the loop of the process."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
import zmq
from helpers.controlnets import controlled, save_controlnet
from helpers.edits import apart, close, make_edit, run

from instgenie.engine.control_graphs import ControlGraphs
from instgenie.engine.controls import ControlShelf, LocalControls
from instgenie.engine.loop import Engine
from instgenie.engine.prepare import prepare
from instgenie.errors import ControlError
from instgenie.jobs.job import Job
from instgenie.models.model import Model
from instgenie.types import ControlUse
from instgenie.workers.controlnet import ControlNetService
from instgenie.workers.controls import ControlsLostError, RemoteControls


class QuietLine:
    """The line of a process whose cluster never says anything."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def receive(self, wait: bool) -> None:
        return None

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def wake(self) -> None:
        pass


@pytest.fixture(params=["sd", "blend"])
def model(request: pytest.FixtureRequest, models: dict[str, Model]) -> Model:
    return models[request.param]


@pytest.fixture
def nets(model: Model, tmp_path: Path) -> list[Path]:
    return [save_controlnet(tmp_path / str(seed), model, seed) for seed in range(3)]


@pytest.fixture
def service(model: Model, tmp_path: Path) -> Iterator[ControlNetService]:
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(f"ipc://{tmp_path}/c")
    line: Any = QuietLine()
    graphs = ControlGraphs(model.device, max_branches=99)
    made = ControlNetService(ControlShelf(model.device, model.dtype), socket, line, graphs)
    yield made
    made.socket.close(linger=0)
    context.term()


@pytest.fixture
def clients(model: Model, tmp_path: Path, service: ControlNetService) -> Iterator[list[RemoteControls]]:
    made = [RemoteControls(model, [f"ipc://{tmp_path}/c"]) for _ in range(2)]
    yield made
    for client in made:
        client.stop()
        assert not any(link._thread.is_alive() for link in client.links)


def turn(service: ControlNetService, until: Callable[[], bool]) -> None:
    """Turn the loop of the process, without its work, until something has happened."""
    end = time.monotonic() + 60
    while not until():
        assert time.monotonic() < end
        service.hear(wait=False)
        service.settle()
        time.sleep(0.002)


def open_all(service: ControlNetService, clients: Sequence[RemoteControls], jobs: Sequence[Job]) -> None:
    for client, job in zip(clients, jobs, strict=True):
        client.open(job)
    turn(service, lambda: all(client.is_open(job) for client, job in zip(clients, jobs, strict=True)))


def make_jobs(model: Model, nets: Sequence[Path]) -> list[Job]:
    one, two = [(nets[0], {"scale": 0.8})], [(nets[0], {"scale": 0.3}), (nets[1], {"scale": 0.9, "end": 0.5})]
    edits = [make_edit(seed=seed, share=0.2, true_guidance=2.0) for seed in range(2)]
    return [prepare(controlled(edit, *uses), model) for edit, uses in zip(edits, (one, two), strict=True)]


def test_one_batch_has_the_steps_of_two_workers(
    model: Model, nets: list[Path], service: ControlNetService, clients: list[RemoteControls]
) -> None:
    jobs = make_jobs(model, nets)
    open_all(service, clients, jobs)
    for client, job in zip(clients, jobs, strict=True):
        client.begin([job])
    turn(service, lambda: len(service.pending) == 2)
    service.work()
    found = [job.residuals.result() for job in jobs if job.residuals]
    LocalControls(model, service.shelf).begin(jobs)
    for own, job in zip(found, jobs, strict=True):
        assert job.residuals
        assert max(map(apart, own, job.residuals.result())) <= close(model)
    [times] = clients[1].times
    assert times.num_jobs == 2
    assert times.asked <= times.started <= times.ended <= times.came


def test_each_ask_of_a_batch_that_fails_has_its_own_error(
    model: Model, nets: list[Path], service: ControlNetService, clients: list[RemoteControls]
) -> None:
    """Three asks in one batch; the texts of two of them fit no ControlNet, each in another way."""
    jobs, owners = [*make_jobs(model, nets), *make_jobs(model, nets)[:1]], [*clients, clients[0]]
    open_all(service, owners, jobs)
    for number, (client, job) in enumerate(zip(owners[:2], jobs[:2], strict=True), 1):
        remote = client._jobs[job.controls[0]].id
        [served] = [one for one in service.clients.values() if remote in one.jobs]
        opened = served.jobs[remote]
        served.jobs[remote] = replace(opened, texts=tuple(text[:, :-number] for text in opened.texts))
    for client, job in zip(owners, jobs, strict=True):
        client.begin([job])
    turn(service, lambda: len(service.pending) == 3)
    service.work()
    messages = []
    for job in jobs[:2]:
        assert job.residuals
        with pytest.raises(ControlsLostError) as caught:
            job.residuals.result()
        messages.append(str(caught.value))
    width = jobs[0].branches[0].text.shape[1]
    for number, message in enumerate(messages, 1):
        assert "RuntimeError: " in message
        assert str(width - number) in message
    assert messages[0] != messages[1]
    assert jobs[2].residuals
    assert len(jobs[2].residuals.result())


def test_residuals_come_in_frames_where_memory_cannot_be_shared(
    model: Model, nets: list[Path], service: ControlNetService, clients: list[RemoteControls]
) -> None:
    [client, _], [job, _] = clients, make_jobs(model, nets)
    open_all(service, [client], [job])
    found = []
    for shares in (True, False):
        client._shares = shares
        client.begin([job])
        turn(service, lambda: bool(service.pending))
        service.work()
        assert job.residuals
        found.append([residual.clone() for residual in job.residuals.result()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_process_that_has_forgotten_a_job_costs_a_step(
    model: Model, nets: list[Path], service: ControlNetService, clients: list[RemoteControls]
) -> None:
    """As a process that was started again: what it does not know is opened once more."""
    [client, _], [job, _] = clients, make_jobs(model, nets)
    open_all(service, [client], [job])
    service.clients.clear()
    client.begin([job])
    assert job.residuals
    turn(service, lambda: not client.links[0].replies)
    with pytest.raises(ControlsLostError, match="1 jobs are not open"):
        job.residuals.result()
    assert not client.is_open(job)
    turn(service, lambda: client.is_open(job))
    client.begin([job])
    turn(service, lambda: bool(service.pending))
    service.work()
    assert len(job.residuals.result())


def test_a_death_settles_everything_that_was_asked(
    model: Model, nets: list[Path], service: ControlNetService, clients: list[RemoteControls], tmp_path: Path
) -> None:
    [client, _], [job, _] = clients, make_jobs(model, nets)
    open_all(service, [client], [job])
    client.begin([job])
    turn(service, lambda: bool(service.pending))
    context = service.socket.context
    service.socket.close(linger=0)  # as if it were killed
    assert job.residuals
    with pytest.raises(ControlsLostError, match="has died"):
        job.residuals.result()
    assert client.links[0].num_losses == 1
    service.socket = context.socket(zmq.ROUTER)
    service.socket.bind(f"ipc://{tmp_path}/c")
    service.clients.clear()
    turn(service, lambda: client.is_open(job))


def test_an_edit_whose_controls_are_remote_is_the_same(
    model: Model, nets: list[Path], service: ControlNetService, clients: list[RemoteControls]
) -> None:
    """Whole edits, while a thread turns the loop of the process."""
    [client, _], jobs = clients, make_jobs(model, nets)
    expected, copies, is_over = run(model, jobs), [replace(job) for job in jobs], Event()

    def serve() -> None:
        while not is_over.wait(0.001):
            service.hear(wait=False)
            service.settle()
            service.work()

    thread = Thread(target=serve)
    thread.start()
    engine = Engine(model, controls=client)
    for job in copies:
        client.open(job)
        engine.join(job)
    while not all(client.is_open(job) for job in copies):
        time.sleep(0.002)
    while engine.jobs:
        engine.step()
    is_over.set()
    thread.join()
    assert max(map(apart, (job.latents for job in copies), expected)) <= close(model)
    for job in copies:
        client.close(job)
    turn(service, lambda: not service.used)


def test_workers_that_are_gone_are_forgotten(
    model: Model, nets: list[Path], service: ControlNetService, clients: list[RemoteControls]
) -> None:
    first, second = make_jobs(model, nets)
    open_all(service, clients[:1], [first])
    [silent] = service.clients.values()
    silent.heard_at -= 1000
    open_all(service, clients[1:], [second])
    assert silent not in service.clients.values()
    assert len(service.used) == 1


def test_the_least_recently_used_goes_first(model: Model, nets: list[Path]) -> None:
    uses = [controlled(make_edit(), (net, {})).controls[0] for net in nets]
    uses = [use._replace(name=net.name) for use, net in zip(uses, nets, strict=True)]
    shelf = ControlShelf(model.device, model.dtype)
    size = shelf.take(uses[0]).num_bytes
    shelf = ControlShelf(model.device, model.dtype, max_bytes=2 * size)
    held = shelf.take(uses[0])
    shelf.take(uses[1])
    shelf.take(uses[0])
    shelf.take(uses[2])
    assert shelf.versions == (uses[0].version, uses[2].version)
    assert shelf.num_bytes == 2 * size
    shelf.take(uses[1])
    assert held is shelf.take(uses[0])  # a job still had it: it was not loaded again
    assert shelf.num_loads == 4


def test_what_cannot_be_loaded_is_refused(
    model: Model, nets: list[Path], service: ControlNetService, clients: list[RemoteControls]
) -> None:
    [client, _], [job, _] = clients, make_jobs(model, nets)
    [weights] = nets[0].glob("*.safetensors")
    weights.write_bytes(b"no weights")
    client.open(job)
    turn(service, lambda: not client.links[0].replies)
    with pytest.raises(ControlError, match="the ControlNet '0' cannot be loaded"):
        client.is_open(job)


def test_outside_of_its_window_a_controlnet_is_not_asked(
    model: Model, nets: list[Path], service: ControlNetService, clients: list[RemoteControls]
) -> None:
    job = prepare(controlled(make_edit(), (nets[0], {"start": 0.5})), model)
    open_all(service, clients[:1], [job])
    clients[0].begin([job])
    assert job.residuals is None
    job.step = 2
    clients[0].begin([job])
    assert job.residuals is not None
    assert isinstance(job.controls[0].use, ControlUse)
