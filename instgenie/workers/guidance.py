"""The companion of a worker: a process on another device that computes the second branch of the worker's edits, step
by step. It owns no edit: what it keeps can be sent again.

It predicts steps and takes none: the worker says which step, with which latents. What the dense steps of an edit leave
behind of this branch stays here.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import zmq
from torch import Tensor

from instgenie.cluster.config import ProcessConfig
from instgenie.cluster.wire import Frame, Loaded, Serving
from instgenie.cluster.wire.guidance import (
    AskBranches,
    BranchesReady,
    BranchesRefused,
    CloseBranch,
    Greet,
    Greeted,
    OpenBranch,
    decode_guidance,
)
from instgenie.engine.graphs import make_graphs
from instgenie.engine.loop import Engine
from instgenie.engine.own import OwnActivations, reuse_own
from instgenie.jobs.job import Job, locate
from instgenie.machine.curve import Doorkeeper, cluster_secret, secure_server
from instgenie.models.family import PartKind
from instgenie.models.model import Model
from instgenie.workers.errors import described
from instgenie.workers.frames import read_job, read_tensor, tensor_frame, tensor_head
from instgenie.workers.line import Line
from instgenie.workers.process import run_process
from instgenie.workers.service import Client, StepService

log = logging.getLogger(__name__)

PARTS: frozenset[PartKind] = frozenset({"network"})


@dataclass(frozen=True, eq=False)
class BranchAsk:
    """A question of the worker. Its jobs are at the steps that it asks for when it is worked on."""

    client: Client
    ticket: int
    steps: tuple[tuple[Job, int, bool, Tensor], ...]  # step, whether it is dense, latents


class BranchService(StepService):
    def __init__(self, engine: Engine, socket: Any, line: Line) -> None:
        super().__init__(socket, line)
        self.engine = engine
        self.device = engine.model.device
        self.owner: Client | None = None  # the worker, as of its last greeting
        self.jobs: dict[str, Job] = {}
        self.pending: list[BranchAsk] = []

    def run(self) -> None:
        while not self.is_stopped:
            self.hear(wait=not self.pending)
            self.work()

    def decode(self, head: Frame) -> object:
        return decode_guidance(head)

    def accept(self, client: Client, message: object, frames: Sequence[Frame]) -> None:
        match message:
            case Greet():
                self.owner, self.jobs = client, {}
                self.send(client, Greeted())
            case OpenBranch() if client == self.owner:
                self.open(message, frames)
            case AskBranches():
                self.take(client, message, frames)
            case CloseBranch(id):
                self.jobs.pop(id, None)

    @torch.inference_mode()
    def open(self, message: OpenBranch, frames: Sequence[Frame]) -> None:
        """Keep a job. One that has been here before computes its latest dense step again."""
        num = len(message.job.tensors)
        try:
            job = read_job(message.job, frames[:num], self.device)
            job = reuse_own(job) if message.has_own else job
            locate(job, self.engine.sides)
            if message.kept is not None and message.latents is not None:
                latents = read_tensor(message.latents, frames[num]).to(self.device)
                self.predict([(job, message.kept, True, latents)])
            self.jobs[message.id] = job
        except Exception as error:  # the worker is told when it asks
            log.error("branch not opened", exc_info=error)

    def take(self, client: Client, message: AskBranches, frames: Sequence[Frame]) -> None:
        if missing := [one.id for one in message.steps if one.id not in self.jobs or client != self.owner]:
            self.send(client, BranchesRefused(message.ticket, f"{len(missing)} jobs are not open"))
            return
        steps = tuple(
            (self.jobs[one.id], one.step, one.is_dense, read_tensor(one.latents, frame).to(self.device))
            for one, frame in zip(message.steps, frames, strict=True)
        )
        self.pending.append(BranchAsk(client, message.ticket, steps))

    @torch.inference_mode()
    def work(self) -> None:
        pending, self.pending = self.pending, []
        for ask in pending:  # a worker waits for the answer before it asks again
            try:
                predictions = self.predict(ask.steps)
            except Exception as error:
                log.error("branches not computed", exc_info=error)
                self.send(ask.client, BranchesRefused(ask.ticket, described(error)))
                continue
            heads = tuple(map(tensor_head, predictions))
            self.send(ask.client, BranchesReady(ask.ticket, heads), [tensor_frame(one) for one in predictions])

    def predict(self, steps: Sequence[tuple[Job, int, bool, Tensor]]) -> list[Tensor]:
        """Predict steps, all jobs together. Doing so again changes nothing."""
        jobs = [job for job, *_ in steps]
        for job, step, is_dense, latents in steps:
            job.step, job.latents = step, latents
            if is_dense and not job.in_dense_steps:
                job.kept_step = None  # the worker computes every token, whatever was kept
        self.engine.own.make_ready(jobs)
        predicted = [one for [one] in self.engine.predict(jobs)]
        for job in jobs:
            if job.keeps_activations:
                job.kept_step = job.step
        return predicted


def serve(config: ProcessConfig, model: Model, line: Line) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket: Any = context.socket(zmq.ROUTER)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)
    doorkeeper = Doorkeeper(context, cluster_secret())
    secure_server(socket, cluster_secret())
    socket.bind(config.guidance_address)
    line.watch(socket)
    line.send(Loaded())
    line.send(Serving())
    own = OwnActivations(model, keeps_text=config.cache.keeps_text)
    engine = Engine(model, config.max_batch_size, graphs=make_graphs(model, config.graphs), own=own)
    BranchService(engine, socket, line).run()
    doorkeeper.close()


def main(config: str) -> None:
    run_process(config, serve, PARTS)
