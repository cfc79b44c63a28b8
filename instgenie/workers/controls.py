"""ControlNets of a worker's jobs that run in processes of their own. Latents go out when a step begins; the network
waits for residuals where it needs them."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from instgenie.cluster.wire import ControlNetsKept, Frame, TensorHead
from instgenie.cluster.wire.controls import (
    AskResiduals,
    CloseControls,
    ControlsRefused,
    OpenControls,
    ResidualsReady,
    ResidualsRefused,
    StepHead,
    read_control,
)
from instgenie.engine.controls import ControlShelf, LocalControls, StepControls, size_of, texts_of
from instgenie.errors import ControlError
from instgenie.jobs.controls import JobControl
from instgenie.jobs.job import Job, control_scales
from instgenie.machine.shared_memory import ForeignMemory, aligned, can_share
from instgenie.models.model import Model
from instgenie.workers.control_link import ControlLink, Reply
from instgenie.workers.errors import StepLostError
from instgenie.workers.frames import read_tensor, tensor_frame, tensor_head

SECONDS_BETWEEN_BEATS = 0.25
SECONDS_TO_OPEN = 600.0  # after which a job is given up


class ControlsLostError(StepLostError):
    """Residuals do not come."""


@dataclass(frozen=True)
class StepTimes:
    """When the residuals of a step were asked for, computed, needed and there; of `time.monotonic`."""

    asked: float
    started: float
    ended: float
    needed: float
    came: float
    num_jobs: int  # that shared the passes, of all workers


@dataclass(eq=False)
class OpenPart:
    """The ControlNets of a job that run in one process."""

    link: ControlLink
    numbers: tuple[int, ...]  # among the job's own
    reply: Reply | None = None  # to its opening; None: it is to be opened
    is_open: bool = False
    wanted_from: float = field(default_factory=time.monotonic)  # when it began to wait for its opening

    def lose(self) -> None:
        """Note that it is to be opened again."""
        self.is_open, self.reply, self.wanted_from = False, None, time.monotonic()


@dataclass(eq=False)
class RemoteJob:
    id: str
    parts: list[OpenPart]


@dataclass(eq=False)
class Question:
    """The residuals of one step, asked of one process."""

    controls: "RemoteControls"
    link: ControlLink
    parts: list[OpenPart]  # of the jobs, in the order of the answer
    reply: Reply
    asked: float
    tensors: list[list[Tensor]] | None = None  # per job and place

    def answer(self) -> list[list[Tensor]]:
        if self.tensors is None:
            self.tensors = self.controls.receive(self)
        return self.tensors


@dataclass(eq=False)
class RemotePromise:
    """Residuals of a job, from one process or several."""

    found: list[tuple[Question, int]] = field(default_factory=list)  # and the number of the job in each answer

    def result(self) -> Sequence[Tensor]:
        first, *others = [question.answer()[number] for question, number in self.found]
        return [sum(each[1:], each[0]) for each in zip(first, *others, strict=True)] if others else first


class RemoteControls:
    def __init__(
        self,
        model: Model,
        addresses: Sequence[str],
        names: Sequence[str] = (),
        wake: Callable[[], None] = lambda: None,
        keep_alive: Callable[[], None] = lambda: None,
    ) -> None:
        """ControlNets are dealt out to the processes in the order of their names, by all workers alike. `wake` is
        called when something has come, `keep_alive` again and again while a step waits."""
        self.model, self.keep_alive = model, keep_alive
        self.links = [
            ControlLink(address, wake, self._lost, read_control, "process of ControlNets") for address in addresses
        ]
        self.order = {name: number for number, name in enumerate(names)}
        self.times: list[StepTimes] = []  # of the last step
        self._jobs: WeakKeyDictionary[JobControl, RemoteJob] = WeakKeyDictionary()
        self._memory: dict[ControlLink, ForeignMemory] = {}
        self._shares = can_share()
        self._tickets, self._ids = count(), count()

    # jobs

    def open(self, job: Job) -> None:
        if not job.controls or job.controls[0] in self._jobs:
            return
        numbers: dict[ControlLink, list[int]] = {}
        for number, control in enumerate(job.controls):
            link = self.links[self.order.get(control.use.name, 0) % len(self.links)]
            numbers.setdefault(link, []).append(number)
        parts = [OpenPart(link, tuple(own)) for link, own in numbers.items()]
        self._jobs[job.controls[0]] = RemoteJob(f"{id(self):x}-{next(self._ids)}", parts)
        self.is_open(job)

    def is_open(self, job: Job) -> bool:
        """Return whether all processes are ready for a job; opens it again where one has died. Raises a ControlError if
        a ControlNet cannot be loaded."""
        remote = self._jobs[job.controls[0]]
        for part in remote.parts:
            reply = part.reply
            if reply is None or (reply.come.is_set() and reply.message is None):
                part.is_open, part.reply = False, self._send_open(job, remote, part)
            elif not reply.come.is_set():
                if time.monotonic() - part.wanted_from > SECONDS_TO_OPEN:
                    raise ControlError(f"no process of ControlNets has answered for {SECONDS_TO_OPEN:g} s")
            elif isinstance(reply.message, ControlsRefused):
                raise ControlError(reply.message.message)
            else:
                part.is_open = True
        return all(part.is_open for part in remote.parts)

    def close(self, job: Job) -> None:
        remote = self._jobs.pop(job.controls[0], None) if job.controls else None
        for part in remote.parts if remote else ():
            part.link.tell(CloseControls(remote.id if remote else ""))

    def stop(self) -> None:
        for link in self.links:
            link.close()

    def _send_open(self, job: Job, remote: RemoteJob, part: OpenPart) -> Reply:
        controls = [job.controls[number] for number in part.numbers]
        tensors = [*(control.hint for control in controls), *texts_of(job), *(one.pooled for one in job.branches)]
        message = OpenControls(
            remote.id,
            tuple(control.use for control in controls),
            size_of(job, controls[0]),
            len(job.branches),
            tuple(map(tensor_head, tensors)),
        )
        frames = [tensor_frame(tensor) for tensor in tensors]
        return part.link.ask(remote.id, message, lambda: frames)

    def _lost(self, link: ControlLink) -> None:
        """Note, in the link's thread, that a process has died: what was open there is to be opened again."""
        for remote in list(self._jobs.values()):
            for part in remote.parts:
                if part.link is link and part.reply and part.reply.come.is_set():
                    part.lose()

    # steps

    @torch.inference_mode()
    def begin(self, jobs: Sequence[Job]) -> None:
        self.times = []
        asked: dict[ControlLink, list[tuple[Job, OpenPart, tuple[float, ...]]]] = {}
        for job in jobs:
            job.residuals = None
            if not any(control_scales(job)):
                continue
            self.open(job)
            if not self.is_open(job):
                raise ControlsLostError("its ControlNets are not there")
            for part in self._jobs[job.controls[0]].parts:
                scales = tuple(control_scales(job)[number] for number in part.numbers)
                if any(scales):
                    asked.setdefault(part.link, []).append((job, part, scales))
        for link, members in asked.items():
            self._ask(link, members)

    def _ask(self, link: ControlLink, members: Sequence[tuple[Job, OpenPart, tuple[float, ...]]]) -> None:
        tensors: list[Tensor] = []
        steps = []
        for job, _, scales in members:
            sample, rows = self.model.guided.sample(job), self.model.guided.rows(job)
            tensors += [sample] if rows is None else [sample, rows]
            remote, timestep = self._jobs[job.controls[0]], job.schedule.timestep(job.step)
            head = None if rows is None else tensor_head(rows)
            steps.append(StepHead(remote.id, timestep, float(job.edit.guidance), scales, tensor_head(sample), head))
        ticket = next(self._tickets)
        staged, after = to_host(tensors)
        message = AskResiduals(ticket, tuple(steps), self._shares)
        reply = link.ask(ticket, message, lambda: [tensor_frame(tensor) for tensor in staged], after)
        question = Question(self, link, [part for _, part, _ in members], reply, time.monotonic())
        for number, (job, _, _) in enumerate(members):
            promise = job.residuals if isinstance(job.residuals, RemotePromise) else RemotePromise()
            promise.found.append((question, number))
            job.residuals = promise

    def receive(self, question: Question) -> list[list[Tensor]]:
        """Wait for residuals, and give signs of life meanwhile."""
        needed = time.monotonic()
        while not question.reply.come.wait(SECONDS_BETWEEN_BEATS):
            self.keep_alive()
        message = question.reply.message
        if not isinstance(message, ResidualsReady):
            for part in question.parts:
                part.lose()
            why = message.message if isinstance(message, ResidualsRefused) else "the process of ControlNets has died"
            raise ControlsLostError(why)
        tensors = self._read(question.link, message, question.reply.frames)
        times = question.asked, message.started, message.ended, needed, time.monotonic()
        self.times.append(StepTimes(*times, message.num_jobs))
        return tensors

    def _read(self, link: ControlLink, message: ResidualsReady, frames: Sequence[Frame]) -> list[list[Tensor]]:
        """Residuals are read where they lie, and moved to the device of the steps."""
        if not message.memory:
            left = iter(frames)
            return [[self._place(read_tensor(head, next(left))) for head in heads] for heads in message.tensors]
        try:
            memory = self._memory.get(link)
            if memory is None or memory.path != message.memory:  # the process was started again
                if memory:
                    memory.close()
                memory = self._memory[link] = ForeignMemory(message.memory)
            view = memory.read(message.num_bytes)
        except OSError as error:
            self._shares = False
            raise ControlsLostError(f"shared memory cannot be opened: {error.strerror}") from error
        found, first = [], 0
        for heads in message.tensors:
            places = []
            for head in heads:
                tensor = view_of(head, view, first)
                places.append(self._place(tensor))
                first += aligned(tensor.nbytes)
            found.append(places)
        return found

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.model.device, self.model.dtype)


def kept(shelf: ControlShelf) -> ControlNetsKept:
    """What is in memory, and what it took to load the last ones."""
    return ControlNetsKept(shelf.versions, shelf.num_bytes, shelf.num_loads, shelf.take_loads())


def news_of(controls: StepControls) -> ControlNetsKept | None:
    """What to tell of ControlNets that run in this process; None: nothing new."""
    return kept(controls.shelf) if isinstance(controls, LocalControls) and controls.shelf.has_loaded else None


class ControlUser(Protocol):
    """A job that may have ControlNets."""

    job: Job


def settle_controls(controls: StepControls, users: Iterable[ControlUser]) -> Iterator[tuple[ControlUser, ControlError]]:
    """Let jobs wait until their ControlNets are there. Yields the jobs whose ControlNets cannot be loaded."""
    for user in users:
        if not user.job.controls:
            continue
        try:
            user.job.awaits_controls = not controls.is_open(user.job)
        except ControlError as error:
            yield user, error


def view_of(head: TensorHead, memory: memoryview, first: int) -> Tensor:
    """A tensor that lies in memory from a byte on."""
    dtype: torch.dtype = getattr(torch, head.dtype)
    shape = torch.Size(head.shape)
    return torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=first).view(shape)


def to_host(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], "torch.cuda.Event | None"]:
    """Begin to copy tensors into main memory; they are there after the event."""
    if not tensors[0].is_cuda:
        return tensors, None
    staged = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
    for target, tensor in zip(staged, tensors, strict=True):
        target.copy_(tensor, non_blocking=True)
    after = torch.cuda.Event()
    after.record()
    return staged, after
