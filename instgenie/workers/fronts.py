"""The line of a process that several fronts share: one connection to each of them. What a process says about a job goes
to the front that sent the job; facts about the process go to all, and a front that comes later is told those that still
hold. Knows who sent what; knows nothing of what messages ask for.

The starter of the process attaches and detaches fronts. A front that is silent for too long counts as gone, too. When a
front is gone, its jobs are cancelled, except those with an idempotency key: they run on for whoever asks next.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TypeAlias

import msgspec
import zmq

from instgenie.cluster.config import ProcessConfig
from instgenie.cluster.control import Attach, ControlOrder, Detach, End
from instgenie.cluster.wire import (
    Announced,
    AnyMessage,
    Assigned,
    BatchStepped,
    Beat,
    Begin,
    Broken,
    Cancel,
    Collect,
    Collected,
    Denoise,
    Denoised,
    Dropped,
    EditCounted,
    Foreign,
    Frame,
    JobFailed,
    JobStep,
    Joined,
    Kept,
    List,
    Listed,
    Listing,
    Loaded,
    Message,
    Missing,
    Painted,
    Preempted,
    Prepared,
    Priced,
    Ready,
    Recall,
    Recalled,
    Register,
    Registered,
    Stop,
    decode,
    encode,
)
from instgenie.machine.pauses import Pauses
from instgenie.scheduling.backlog import NO_LOAD, LoadSums
from instgenie.workers.control import ControlChannel
from instgenie.workers.line import MS_BETWEEN_BEATS, Line, open_socket

MS_BETWEEN_PUSHES = 100  # of the load to one front, at least
FINAL = (Prepared, Denoised, Painted, JobFailed, Missing)  # a process has no more to say about an attempt

Attempted: TypeAlias = tuple[str, int, int | None]  # id and attempt of a job or a registration; its partial picture

log = logging.getLogger(__name__)


@dataclass(eq=False)
class FrontLink:
    """The connection to one front."""

    front: str
    socket: "zmq.Socket[bytes]"
    heard_at: float
    is_beating: bool = False  # True once the front has given a sign of life; until then silence says nothing
    load: LoadSums = NO_LOAD  # that the front has given to this worker
    pushed: Foreign | None = None  # what the front was last told of the others

    def send(self, message: Message, frames: Sequence[Frame] = ()) -> None:
        self.socket.send_multipart([encode(message), *frames], copy=False)


@dataclass(eq=False)
class Senders:
    """The fronts that sent an attempt: one, but several may ask for the same registration."""

    links: list[FrontLink] = field(default_factory=list)
    is_kept: bool = False  # True if it runs on without them
    listing: Listing | None = None  # of the template that is being registered


class SharedLine(Line):
    def __init__(self, config: ProcessConfig, pushes_load: bool, control: ControlChannel | None = None) -> None:
        """`pushes_load`: tell each front what the others have given to the worker, as one process of a worker does."""
        super().__init__(config)
        self.timeout = config.front_timeout
        self.pushes_load = pushes_load
        self.links: dict[str, FrontLink] = {}
        self._senders: dict[Attempted, Senders] = {}
        self._askers: dict[tuple[type, str], list[FrontLink]] = {}  # by the kind of answer and what was asked for
        self._facts: dict[tuple[type, str], Message] = {}  # that hold until the next of their kind
        self._templates: dict[str, Listing] = {}  # registered here
        self._latest: FrontLink | None = None  # that sent the message being handled
        self._readable: deque[FrontLink] = deque()
        self._orphans: deque[str] = deque()  # jobs to cancel
        self._pauses = Pauses(2 * MS_BETWEEN_BEATS / 1000, time.monotonic())
        self._has_news = False  # True if a load has changed since it was last pushed
        self._pushed_at = 0.0
        self._is_ended = False
        self._control = control or ControlChannel()
        self._poller.register(self._control.fd, zmq.POLLIN)
        self._attach(config.front, config.endpoint, config.name)

    def _connect(self, config: ProcessConfig) -> None:
        """Connect later, to each front alike."""

    # fronts

    def obey(self, order: ControlOrder) -> None:
        match order:
            case Attach(front, endpoint, name):
                self._detach(front)
                self._attach(front, endpoint, name)
            case Detach(front):
                self._detach(front)
            case End():
                self._is_ended = True

    def _attach(self, front: str, endpoint: str, name: str) -> None:
        link = FrontLink(front, open_socket(self._context, endpoint, name), time.monotonic())
        self._poller.register(link.socket, zmq.POLLIN)
        self.links[front] = link
        self._has_news = True
        if self._templates:
            link.send(Announced(tuple(self._templates.values())))
        for fact in self._facts.values():
            link.send(fact)
        log.info("front attached", extra={"front": front, "num_fronts": len(self.links)})

    def _detach(self, front: str) -> None:
        """Forget a front. Its jobs are cancelled, unless another front waits for them or they run on for a key."""
        link = self.links.pop(front, None)
        if link is None:
            return
        self._poller.unregister(link.socket)
        link.socket.close(linger=0)
        self._has_news = True
        self._askers = {key: [one for one in links if one is not link] for key, links in self._askers.items()}
        for attempted, senders in list(self._senders.items()):
            if link in senders.links:
                senders.links.remove(link)
                if not senders.links:
                    del self._senders[attempted]
                    if not senders.is_kept:
                        self._orphans.append(attempted[0])
        log.info("front detached", extra={"front": front, "num_fronts": len(self.links)})

    def _detach_silent(self, now: float) -> None:
        """Detach fronts that have been silent for too long. Time in which this loop itself was held up, by the model's
        loading or by a long step, is not counted against them."""
        late = self._pauses.look(now)
        for link in self.links.values():
            link.heard_at += late
        for link in [link for link in self.links.values() if link.is_beating and now - link.heard_at > self.timeout]:
            log.warning("front is silent", extra={"front": link.front, "seconds": self.timeout})
            self._detach(link.front)

    # sending

    def send(self, message: Message, frames: Sequence[Frame] = ()) -> None:
        match message:
            case BatchStepped():
                self._send_split(message.jobs, lambda _, jobs: batch_of(message, jobs))
            case Joined():
                plans = dict(zip(message.jobs, message.plans, strict=True))
                self._send_split(message.jobs, lambda _, jobs: Joined(jobs, tuple(plans[job] for job in jobs)))
            case Preempted(_, by):
                self._send_split(message.jobs, lambda _, jobs: Preempted(jobs, by))
            case Dropped() | EditCounted():
                if self._latest:
                    self._latest.send(message)
            case Listed(model):
                self._answer((Listed, model), message, frames)
            case Recalled(template):
                self._answer((Recalled, template), message, frames)
            case Collected(name):
                self._answer((Collected, name), message, frames)
            case _ if (attempted := attempted_of(message)) is not None:
                self._send_to_senders(attempted, message, frames)
            case _:
                self._note_fact(message)
                for link in self.links.values():
                    link.send(message, frames)

    def _send_split(self, jobs: Sequence[JobStep], make: Callable[[FrontLink, tuple[JobStep, ...]], Message]) -> None:
        """Tell each front about its own jobs."""
        by_link: dict[FrontLink, list[JobStep]] = {}
        for job in jobs:
            for link in self._links_of((job.id, job.attempt, None)):
                by_link.setdefault(link, []).append(job)
        for link, own in by_link.items():
            link.send(make(link, tuple(own)))

    def _links_of(self, attempted: Attempted) -> Sequence[FrontLink]:
        senders = self._senders.get(attempted)
        return senders.links if senders else ()

    def _send_to_senders(self, attempted: Attempted, message: Message, frames: Sequence[Frame]) -> None:
        for link in self._links_of(attempted):
            link.send(message, frames)
        if is_final(message) and (senders := self._senders.pop(attempted, None)) and isinstance(message, Registered):
            self._announce(message.id, senders)

    def _announce(self, template: str, senders: Senders) -> None:
        """Tell the other fronts of a template that is registered."""
        if senders.listing:
            self._templates[template] = senders.listing
            for link in self.links.values():
                if link not in senders.links:
                    link.send(Announced((senders.listing,)))

    def _answer(self, asked: tuple[type, str], message: Message, frames: Sequence[Frame]) -> None:
        for link in self._askers.pop(asked, ()):
            link.send(message, frames)

    def _note_fact(self, message: Message) -> None:
        match message:
            case Kept(template, template_bytes) if template is not None and not template_bytes:
                self._facts.pop((Kept, template), None)
                self._templates.pop(template, None)
            case Kept(template):
                self._facts[Kept, template or ""] = message
            case Ready():
                self._facts.pop((Loaded, ""), None)
                self._facts[Ready, ""] = message
            case Loaded() | Priced() | Broken():
                self._facts[type(message), ""] = message

    # receiving

    def receive(self, wait: bool) -> tuple[AnyMessage, list[Frame]] | None:
        self._beat()
        if self._orphans:
            self._latest = None
            return Cancel(self._orphans.popleft()), []
        while True:
            if not self._readable:
                self._poll(wait)
            if self._is_ended:
                self._is_ended = False  # it is said once: those who read all messages come to their end
                return Stop(), []
            if not self._readable:
                return None
            link = self._readable.popleft()
            if link.socket.closed:
                continue
            head, *frames = link.socket.recv_multipart(copy=False)
            message = decode(head.buffer)
            if self._take_note(link, message):
                return message, [frame.buffer for frame in frames]
            wait = False  # a job may come right behind a sign of life

    def _poll(self, wait: bool) -> None:
        timeout = MS_BETWEEN_PUSHES if self.pushes_load and self._has_news else MS_BETWEEN_BEATS
        ready = dict(self._poller.poll(timeout if wait and not self._orphans else 0))
        if self._woken in ready:
            os.read(self._woken, 4096)
        if self._control.fd in ready:
            for order in self._control.take():
                self.obey(order)
        self._readable.extend(link for link in self.links.values() if link.socket in ready)

    def _take_note(self, link: FrontLink, message: AnyMessage) -> bool:
        """Note who sent a message. Return False if nobody else needs to see it."""
        link.heard_at, self._latest = time.monotonic(), link
        match message:
            case Assigned(load):
                self._has_news |= load != link.load
                link.load, link.is_beating = load, True
                return False
            case Beat():
                link.is_beating = True
                return False
            case Begin():
                return (Ready, "") not in self._facts
            case Stop():  # a front that stops leaves; the process goes on for the others
                self._detach(link.front)
                return False
            case Cancel(id):
                return self._cancel(link, id)
            case Denoise(jobs):
                for job in jobs:
                    self._note_sender((job.id, job.attempt, None), link).is_kept = bool(job.key)
            case List(model):
                self._askers.setdefault((Listed, model), []).append(link)
            case Recall(template):
                self._askers.setdefault((Recalled, template.id), []).append(link)
            case Collect(name):
                self._askers.setdefault((Collected, name), []).append(link)
            case _ if (attempted := attempted_of(message)) is not None:
                senders = self._note_sender(attempted, link)
                if isinstance(message, Register):
                    senders.listing = listing_of(message)
        return True

    def _note_sender(self, attempted: Attempted, link: FrontLink) -> Senders:
        senders = self._senders.setdefault(attempted, Senders())
        if link not in senders.links:
            senders.links.append(link)
        return senders

    def _cancel(self, link: FrontLink, id: str) -> bool:
        """Note that a front no longer wants a job. Return whether no other front wants it."""
        is_wanted = False
        for attempted, senders in list(self._senders.items()):
            if attempted[0] == id and link in senders.links:
                senders.links.remove(link)
                is_wanted |= bool(senders.links)
                if not senders.links:
                    del self._senders[attempted]
        if is_wanted:
            link.send(Dropped(id))
        return not is_wanted

    # signs of life

    def _beat(self) -> None:
        now = time.monotonic()
        is_due = 1000 * (now - self._beat_at) >= MS_BETWEEN_BEATS
        self._detach_silent(now)
        if is_due:
            self._beat_at = now
        if self.pushes_load:
            if is_due or (self._has_news and 1000 * (now - self._pushed_at) >= MS_BETWEEN_PUSHES):
                self._push(is_due)
                self._pushed_at, self._has_news = now, False
        elif is_due:
            for link in self.links.values():
                link.send(Beat())

    def _push(self, is_due: bool) -> None:
        """Tell each front what the others have given to the worker: with each beat, else if it has changed."""
        for link in self.links.values():
            others = [other.load for other in self.links.values() if other is not link]
            foreign = Foreign(total(others), len(self.links))
            if is_due or foreign != link.pushed:
                link.send(foreign)
                link.pushed = foreign

    def close(self) -> None:
        for link in self.links.values():
            link.socket.close(linger=1000)
        self._context.term()


def attempted_of(message: Message) -> Attempted | None:
    """The attempt that a message is about; None: it is about no single attempt."""
    id, attempt = getattr(message, "id", None), getattr(message, "attempt", None)
    return None if id is None or attempt is None else (id, attempt, getattr(message, "partial", None))


def is_final(message: Message) -> bool:
    match message:
        case Registered():
            return message.num_registered_steps == message.num_steps
        case _:
            return isinstance(message, FINAL)


def batch_of(message: BatchStepped, jobs: tuple[JobStep, ...]) -> BatchStepped:
    return msgspec.structs.replace(message, jobs=jobs, num_others=len(message.jobs) - len(jobs))


def listing_of(message: Register) -> Listing:
    return Listing(message.template, message.size, message.template.steps, {}, message.is_asked_for)


def total(loads: Sequence[LoadSums]) -> LoadSums:
    return reduce(LoadSums.plus, loads, NO_LOAD)
