"""The process of ControlNets: computes residuals for the steps of all workers. It owns no step and no edit: what it
keeps can be sent again.

What arrives while it computes is its next batch, whichever workers it comes from. ControlNets are loaded by threads, so
that nobody's residuals wait for that.
"""

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import zmq
from torch import Tensor

from instgenie.cluster.config import ProcessConfig
from instgenie.cluster.wire import Broken, Frame, Loaded, Serving
from instgenie.cluster.wire.controls import (
    AskResiduals,
    CloseControls,
    ControlsOpened,
    ControlsRefused,
    OpenControls,
    ResidualsReady,
    ResidualsRefused,
    StepHead,
    decode_control,
)
from instgenie.engine.control_graphs import ControlGraphs, make_control_graphs
from instgenie.engine.controls import ControlShelf
from instgenie.errors import ControlError, InstGenieError
from instgenie.machine.curve import Doorkeeper, cluster_secret, secure_server
from instgenie.machine.device import choose_device, choose_dtype, stay_near
from instgenie.machine.pages import to_device
from instgenie.machine.shared_memory import OwnMemory, aligned
from instgenie.models.controlnet import Asked, ControlledJob, ControlStep, Run, compute, run_uncaptured
from instgenie.telemetry.logs import log_to_stderr
from instgenie.workers.controls import kept, view_of
from instgenie.workers.errors import described
from instgenie.workers.frames import read_tensor, tensor_frame, tensor_head
from instgenie.workers.line import Line
from instgenie.workers.service import Client, StepService

NUM_LOADERS = 2
MAX_OPEN = 4096  # jobs; those asked for least recently go first, and are opened again if they are asked for after all
SECONDS_TO_FORGET = 900.0  # after which a silent worker counts as gone; one that is not opens its jobs again

log = logging.getLogger(__name__)


@dataclass(eq=False)
class ServedClient:
    """What is kept for one worker."""

    jobs: dict[str, ControlledJob] = field(default_factory=dict)
    memory: OwnMemory | None = None
    heard_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, eq=False)
class PendingAsk:
    client: Client
    message: AskResiduals
    asked: list[Asked]


class ControlNetService(StepService):
    def __init__(self, shelf: ControlShelf, socket: Any, line: Line, graphs: ControlGraphs | None = None) -> None:
        super().__init__(socket, line)
        self.shelf = shelf
        self.run_pass: Run = graphs.run if graphs else run_uncaptured
        self.clients: dict[Client, ServedClient] = {}
        self.used: OrderedDict[tuple[Client, str], None] = OrderedDict()  # open jobs, the least recently asked first
        self.pending: list[PendingAsk] = []
        self.opening: list[tuple[Client, str, Future[ControlledJob]]] = []
        self.loaders = ThreadPoolExecutor(NUM_LOADERS, "controlnet")

    def run(self) -> None:
        while not self.is_stopped:
            self.hear(wait=not self.pending)
            self.settle()
            self.work()

    # messages

    def decode(self, head: Frame) -> object:
        return decode_control(head)

    def accept(self, client: Client, message: object, frames: Sequence[Frame]) -> None:
        self.clients.setdefault(client, ServedClient()).heard_at = time.monotonic()
        match message:
            case OpenControls():
                loading = self.loaders.submit(self.load, message, frames)
                loading.add_done_callback(lambda _: self.line.wake())
                self.opening.append((client, message.job, loading))
            case AskResiduals():
                self.take(client, message, frames)
            case CloseControls(job):
                self.forget(client, job)

    # jobs

    @torch.inference_mode()
    def load(self, message: OpenControls, frames: Sequence[Frame]) -> ControlledJob:
        """Load the ControlNets of a job, and embed its images. Runs in a thread."""
        device = self.shelf.device
        tensors = [read_tensor(*pair).to(device) for pair in zip(message.tensors, frames, strict=True)]
        num, num_branches = len(message.uses), message.num_branches
        nets = tuple(self.shelf.take(use) for use in message.uses)
        hints = tuple(net.embed(hint) for net, hint in zip(nets, tensors[:num], strict=True))
        texts, pooled = tensors[num : num + num_branches], tensors[num + num_branches :]
        dtype = self.shelf.dtype
        return ControlledJob(
            nets,
            hints,
            tuple(use.mode for use in message.uses),
            message.size,
            tuple(text.to(dtype) for text in texts),
            tuple(one.to(dtype) for one in pooled),
        )

    def settle(self) -> None:
        """Answer for the jobs whose ControlNets have come, or cannot be loaded."""
        done = [one for one in self.opening if one[2].done()]
        self.opening = [one for one in self.opening if not one[2].done()]
        for client, job, loading in done:
            try:
                self.keep(client, job, loading.result())
                self.send(client, ControlsOpened(job))
            except ControlError as error:
                self.send(client, ControlsRefused(job, str(error)))
            except Exception as error:
                log.error("ControlNets not opened", exc_info=error)
                self.send(client, ControlsRefused(job, f"the ControlNets cannot be used: {type(error).__name__}"))
        if done:
            self.line.send(kept(self.shelf))

    def keep(self, client: Client, job: str, opened: ControlledJob) -> None:
        self.clients.setdefault(client, ServedClient()).jobs[job] = opened
        self.forget_silent()
        self.used[client, job] = None
        while len(self.used) > MAX_OPEN:
            self.forget(*next(iter(self.used)))

    def forget(self, client: Client, job: str) -> None:
        self.used.pop((client, job), None)
        served = self.clients.get(client)
        if served:
            served.jobs.pop(job, None)

    def forget_silent(self) -> None:
        """Free what is kept for workers that are gone."""
        now = time.monotonic()
        for client, served in [one for one in self.clients.items() if now - one[1].heard_at > SECONDS_TO_FORGET]:
            for job in list(served.jobs):
                self.forget(client, job)
            if served.memory:
                served.memory.close()
            del self.clients[client]

    # steps

    def take(self, client: Client, message: AskResiduals, frames: Sequence[Frame]) -> None:
        jobs = self.clients.setdefault(client, ServedClient()).jobs
        if missing := [step.job for step in message.steps if step.job not in jobs]:
            self.send(client, ResidualsRefused(message.ticket, f"{len(missing)} jobs are not open"))
            return
        left = iter(frames)
        asked = [(jobs[step.job], self.read_step(step, left)) for step in message.steps]
        for step in message.steps:
            self.used.move_to_end((client, step.job))
        self.pending.append(PendingAsk(client, message, asked))

    def read_step(self, step: StepHead, frames: Any) -> ControlStep:
        device = self.shelf.device
        sample = to_device(read_tensor(step.sample, next(frames)), device)
        rows = None if step.rows is None else to_device(read_tensor(step.rows, next(frames)), device)
        timestep = to_device(torch.tensor(step.timestep), device)
        return ControlStep(sample, timestep, step.guidance, step.scales, rows)

    def work(self) -> None:
        """Compute everything that has been asked for, the asks of all workers together."""
        pending, self.pending = self.pending, []
        if pending:
            self.try_to_answer(pending)

    @torch.inference_mode()
    def try_to_answer(self, pending: Sequence[PendingAsk]) -> None:
        """Answer the asks together, or one by one where that fails: those fail that cannot be computed alone, each with
        its own error."""
        try:
            self.answer(pending)
        except Exception as error:
            if len(pending) > 1:
                for one in pending:
                    self.try_to_answer([one])
                return
            log.error("residuals not computed", exc_info=error)
            self.send(pending[0].client, ResidualsRefused(pending[0].message.ticket, described(error)))

    def answer(self, pending: Sequence[PendingAsk]) -> None:
        started = time.monotonic()
        computed = iter(compute([asked for one in pending for asked in one.asked], self.run_pass))
        num_jobs = sum(len(one.asked) for one in pending)
        for one in pending:
            self.hand_over(one, [next(computed) for _ in one.asked], started, num_jobs)

    def hand_over(self, ask: PendingAsk, residuals: Sequence[Sequence[Tensor]], started: float, num_jobs: int) -> None:
        heads = tuple(tuple(map(tensor_head, places)) for places in residuals)
        tensors = [place for places in residuals for place in places]
        memory, num_bytes, frames = "", 0, list[Frame]()
        if ask.message.shares:
            memory, num_bytes = self.write(ask.client, tensors)
        else:
            frames = [tensor_frame(tensor) for tensor in tensors]
        times = started, time.monotonic()
        self.send(ask.client, ResidualsReady(ask.message.ticket, heads, memory, num_bytes, *times, num_jobs), frames)

    def write(self, client: Client, tensors: Sequence[Tensor]) -> tuple[str, int]:
        """Write residuals into the memory that is shared with a worker; it has read the last ones."""
        served = self.clients[client]
        served.memory = served.memory or OwnMemory()
        view = served.memory.reserve(sum(aligned(tensor.nbytes) for tensor in tensors))
        first = 0
        for tensor in tensors:
            view_of(tensor_head(tensor), view, first).copy_(tensor)
            first += aligned(tensor.nbytes)
        return served.memory.path, served.memory.num_bytes


def serve(config: ProcessConfig, line: Line) -> None:
    device = choose_device(config.device)
    stay_near(device)
    shelf = ControlShelf(device, choose_dtype(config.dtype, device), config.controls.max_bytes)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket: Any = context.socket(zmq.ROUTER)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)
    doorkeeper = Doorkeeper(context, cluster_secret())
    secure_server(socket, cluster_secret())
    socket.bind(config.control_address)
    line.watch(socket)
    line.send(Loaded())
    line.send(Serving())
    ControlNetService(shelf, socket, line, make_control_graphs(device, config.graphs)).run()
    doorkeeper.close()


def main(encoded: str) -> None:
    config = msgspec.json.decode(encoded, type=ProcessConfig)
    log_to_stderr(worker_process=config.name)
    torch.set_grad_enabled(False)
    line = Line(config)
    try:
        serve(config, line)
    except InstGenieError as error:
        log.error("cannot start", extra={"reason": str(error)})
        line.send(Broken(str(error)))
    finally:
        line.close()
    os._exit(0)  # unloading torch would take seconds
