"""The line of a process that two fronts share, over real sockets; the test plays the fronts and the starter."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from helpers.workers import head_of, make_config

from instgenie.cluster import wire
from instgenie.cluster.config import ProcessConfig
from instgenie.cluster.control import Attach, ControlOrder, Detach, End, decode_order, encode_order
from instgenie.cluster.orders import template_id
from instgenie.scheduling.backlog import NO_LOAD, LoadSums
from instgenie.workers import fronts as fronts_module
from instgenie.workers.fronts import SharedLine

JOB = wire.JobHead({}, (4, 4), 1.0, "FlowSchedule", msgspec.Raw(b"\x90"), (None,), ())
FACTS = wire.ModelFacts("tiny", "flux", False, 64, 4, 3.5, False, 0.9, True, 16, 16, 3, "cpu", "float32")
LOAD = LoadSums(2, 0, 30, 3000, 1.5, 0.5)


class Starter:
    """Orders on a pipe, as on the standard input of a process."""

    def __init__(self) -> None:
        self.fd, self._end = os.pipe()

    def order(self, order: ControlOrder) -> None:
        os.write(self._end, encode_order(order))

    def take(self) -> list[ControlOrder]:
        return [decode_order(line) for line in os.read(self.fd, 65536).splitlines()]


class PlayedFront:
    def __init__(self, context: "zmq.Context[Any]", folder: Path, name: str) -> None:
        self.name, self.is_heard = name, True
        self.socket = context.socket(zmq.ROUTER)
        self.endpoint = f"ipc://{folder}/{name}"
        self.socket.bind(self.endpoint)

    def send(self, message: wire.Message) -> None:
        self.is_heard = False
        self.socket.send_multipart([f"at {self.name}".encode(), wire.encode(message)])

    def received(self) -> list[wire.AnyMessage]:
        """Messages other than signs of life."""
        found = []
        while self.socket.poll(200):
            _, head, *_ = self.socket.recv_multipart()
            found.append(wire.decode(head))
        return [message for message in found if not isinstance(message, wire.Beat | wire.Foreign)]

    def foreign(self) -> wire.Foreign:
        """The load of others as it was last told."""
        found = None
        while self.socket.poll(200):
            _, head, *_ = self.socket.recv_multipart()
            message = wire.decode(head)
            found = message if isinstance(message, wire.Foreign) else found
        assert found
        return found


class Stage:
    """A line with two fronts."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.starter = Starter()
        self.folder = folder
        self.fronts: list[PlayedFront] = []
        self.one, self.other = self.play("one"), self.play("other")
        self.line = SharedLine(configured(self.one), True, self.starter)  # type: ignore[arg-type]
        self.attach(self.other)

    def play(self, name: str) -> PlayedFront:
        self.fronts.append(PlayedFront(self.context, self.folder, name))
        return self.fronts[-1]

    def attach(self, front: PlayedFront) -> None:
        self.starter.order(Attach(front.name, front.endpoint, f"at {front.name}"))
        self.hear()

    def hear(self, num_rounds: int = 3) -> list[wire.AnyMessage]:
        """Messages that reach the process, once those that were sent are there."""
        for front in self.fronts:
            if not front.is_heard and front.name in self.line.links:
                self.line.links[front.name].socket.poll(60_000)
            front.is_heard = True
        found = [self.line.receive(wait=True) for _ in range(num_rounds)]
        return [received[0] for received in found if received]

    def told(self) -> tuple[list[wire.AnyMessage], list[wire.AnyMessage]]:
        return self.one.received(), self.other.received()

    def close(self) -> None:
        self.line.close()
        for front in self.fronts:
            front.socket.close(linger=0)
        self.context.term()


def configured(front: PlayedFront) -> ProcessConfig:
    names = {"name": f"at {front.name}", "endpoint": front.endpoint, "front": front.name}
    return replace(make_config(), **names, front_timeout=100.0)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(fronts_module, "MS_BETWEEN_BEATS", 50)
    monkeypatch.setattr(fronts_module, "MS_BETWEEN_PUSHES", 10)
    stage = Stage(tmp_path)
    yield stage
    stage.close()


def denoise(*jobs: str, key: str = "") -> wire.Denoise:
    return wire.Denoise(tuple(wire.Denoising(job, 1, JOB, None, False, 0, key=key) for job in jobs))


def test_answers_go_to_the_front_that_asked(stage: Stage) -> None:
    stage.one.send(denoise("a"))
    stage.other.send(denoise("b"))
    assert len(stage.hear()) == 2
    steps = tuple(wire.JobStep(job, 1, 1) for job in "ab")
    stage.line.send(wire.BatchStepped(0.1, 0.1, 0, steps))
    stage.line.send(wire.Denoised("b", 1, wire.TensorHead("float32", (1,)), 4, 0.1))
    stage.line.send(wire.Denoised("b", 1, wire.TensorHead("float32", (1,)), 4, 0.1))  # nobody waits any more
    [stepped], [other, denoised] = stage.told()
    assert stepped == wire.BatchStepped(0.1, 0.1, 0, steps[:1], num_others=1)
    assert other == wire.BatchStepped(0.1, 0.1, 0, steps[1:], num_others=1)
    assert isinstance(denoised, wire.Denoised)


def test_a_front_hears_of_its_own_jobs_that_were_preempted(stage: Stage) -> None:
    stage.one.send(denoise("a"))
    stage.other.send(denoise("b"))
    stage.hear()
    first, second = (wire.JobStep(job, 1, 3) for job in "ab")
    stage.line.send(wire.Preempted((first, second), by="c"))
    stage.line.send(wire.Preempted((second,), by="a"))
    assert stage.told() == (
        [wire.Preempted((first,), by="c")],
        [wire.Preempted((second,), by="c"), wire.Preempted((second,), by="a")],
    )


def test_the_count_of_a_pictures_edits_goes_to_the_front_that_asked(stage: Stage) -> None:
    asking = wire.CountEdit("t", "request")
    stage.other.send(asking)
    assert stage.hear() == [asking]
    counted = wire.EditCounted("t", True)
    stage.line.send(counted)
    assert stage.told() == ([], [counted])


def test_facts_go_to_all_and_to_those_who_come_later(stage: Stage) -> None:
    ready, kept = wire.Ready(FACTS, "digest"), wire.Kept("t", {"host": 5}, {"host": 5})
    gone = wire.Kept("u", {}, {"host": 5})
    for fact in (wire.Loaded(), ready, kept, wire.Kept("u", {"host": 1}, {"host": 6}), gone):
        stage.line.send(fact)
    assert [told[1] for told in stage.told()] == [ready, ready]
    late = stage.play("late")
    stage.attach(late)
    assert late.received() == [ready, kept]


def test_a_process_begins_once(stage: Stage) -> None:
    stage.one.send(wire.Begin(1))
    assert stage.hear() == [wire.Begin(1)]
    stage.line.send(wire.Ready(FACTS, "digest"))
    stage.other.send(wire.Begin(2))
    assert stage.hear() == []


def test_a_registration_for_two_fronts_is_cancelled_by_the_last(stage: Stage) -> None:
    head = head_of("picture")
    message = wire.Register(head.id, 1, head, JOB, False, None, size=(40, 48), is_asked_for=True)
    stage.one.send(message)
    stage.other.send(message)
    assert stage.hear() == [message, message]
    stage.one.send(wire.Cancel(head.id))
    assert stage.hear() == []
    stage.line.send(wire.Registered(head.id, 1, 4, 4, {}))
    one, other = stage.told()
    assert one[0] == wire.Dropped(head.id)
    assert one[1:] == [wire.Announced((wire.Listing(head, (40, 48), 4, {}, True),))]
    assert other == [wire.Registered(head.id, 1, 4, 4, {})]
    assert head.id == template_id("me", 4, 0.0, "picture")


def test_a_template_is_announced_once_it_is_registered(stage: Stage) -> None:
    """A front that attaches meanwhile, or after the registration was given up, hears nothing of it."""
    heads = [head_of(name) for name in ("given up", "registered")]
    messages = [wire.Register(head.id, 1, head, JOB, False, None, size=(40, 48)) for head in heads]
    for message in messages:
        stage.one.send(message)
    stage.one.send(wire.Cancel(heads[0].id))
    assert stage.hear() == [*messages, wire.Cancel(heads[0].id)]
    late = stage.play("late")
    stage.attach(late)
    assert late.received() == []
    stage.line.send(wire.Registered(heads[1].id, 1, 4, 4, {}))
    listed = [wire.Announced((wire.Listing(heads[1], (40, 48), 4, {}),))]
    assert late.received() == listed
    last = stage.play("last")
    stage.attach(last)
    assert last.received() == listed


def test_a_job_is_read_with_the_signs_of_life_before_it(stage: Stage) -> None:
    stage.one.send(wire.Assigned(LOAD))
    stage.one.send(wire.Beat())
    stage.one.send(denoise("a"))
    time.sleep(0.1)  # until all three are there
    assert stage.hear(1) == [denoise("a")]


def test_nothing_is_kept_of_an_edit_that_only_had_partial_pictures(stage: Stage) -> None:
    head = wire.TensorHead("float32", (1,))
    stage.one.send(wire.Finish("a", 1, head, (4, 4), (32, 32), 0, "png", 100, 0))
    assert len(stage.hear()) == 1
    stage.line.send(wire.Painted("a", 1, 0, 0.1))
    stage.line.send(wire.Painted("a", 1, None, 0.1))  # nobody asked for it here
    assert [message.partial for message in stage.one.received()] == [0]  # type: ignore[union-attr]
    assert stage.line._senders == {}


def test_questions_are_answered_to_those_who_asked(stage: Stage) -> None:
    stage.other.send(wire.List("model"))
    stage.one.send(wire.Collect("name"))
    stage.hear()
    stage.line.send(wire.Listed("model", ()))
    stage.line.send(wire.Collected("name", False))
    assert stage.told() == ([wire.Collected("name", False)], [wire.Listed("model", ())])


def test_jobs_of_a_front_that_is_gone_are_cancelled_unless_they_have_a_key(stage: Stage) -> None:
    stage.one.send(denoise("a", "b"))
    stage.one.send(denoise("c", key="key"))
    stage.other.send(denoise("d"))
    assert len(stage.hear()) == 3
    stage.starter.order(Detach("one"))
    assert stage.hear(6) == [wire.Cancel("a"), wire.Cancel("b")]
    stage.line.send(wire.Dropped("a"))
    stage.line.send(wire.Denoised("c", 1, wire.TensorHead("float32", (1,)), 4, 0.1))
    assert stage.told()[1] == []


def test_a_front_that_falls_silent_is_gone(stage: Stage) -> None:
    """Not one that has never given a sign of life, and not for the time in which the process itself was held up."""
    stage.one.send(denoise("a"))
    stage.one.send(wire.Assigned(LOAD))
    stage.other.send(denoise("b"))
    stage.hear()
    stage.line._pauses.looked_at -= 1000
    for link in stage.line.links.values():
        link.heard_at -= 1000
    assert stage.hear() == []
    for link in stage.line.links.values():
        link.heard_at -= 1000
    assert stage.hear() == [wire.Cancel("a")]
    assert list(stage.line.links) == ["other"]


def test_a_front_that_stops_leaves_the_process_to_the_others(stage: Stage) -> None:
    stage.one.send(wire.Stop())
    assert stage.hear() == []
    assert list(stage.line.links) == ["other"]
    stage.starter.order(End())
    assert stage.hear(1) == [wire.Stop()]
    assert stage.line.receive(wait=False) is None  # it is said once, so that a reader of all messages ends


def test_each_front_is_told_what_the_others_have_given(stage: Stage) -> None:
    third = stage.play("third")
    stage.attach(third)
    stage.one.send(wire.Assigned(LOAD))
    third.send(wire.Assigned(LoadSums(num_edits=1)))
    assert stage.hear(6) == []
    assert stage.one.foreign() == wire.Foreign(LoadSums(num_edits=1), 3)
    assert stage.other.foreign() == wire.Foreign(LOAD._replace(num_edits=3), 3)
    stage.starter.order(Detach("third"))
    stage.hear(6)
    assert stage.one.foreign() == wire.Foreign(NO_LOAD, 2)


def test_a_front_that_attaches_again_is_served_anew(stage: Stage) -> None:
    stage.one.send(denoise("a"))
    stage.hear()
    stage.starter.order(Attach("one", stage.one.endpoint, "at one again"))
    assert stage.hear() == [wire.Cancel("a")]
    stage.line.send(wire.Ready(FACTS, "digest"))
    names = set()
    while stage.one.socket.poll(200):
        name, head = stage.one.socket.recv_multipart()
        names |= {name} if isinstance(wire.decode(head), wire.Ready) else set()
    assert names == {b"at one again"}
