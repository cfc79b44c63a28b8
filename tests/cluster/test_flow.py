"""How work goes through the processes, with processes that answer as the test says."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from instgenie.cluster import wire
from instgenie.cluster.config import CacheConfig, ClusterConfig, Role
from instgenie.cluster.entries import Ticket
from instgenie.cluster.flow import Flow
from instgenie.cluster.orders import Event, Failed, Finished, Order, Partial, Queued, Stepped, Tier
from instgenie.cluster.processes import Process, make_workers
from instgenie.cluster.templates import Template, template_id
from instgenie.cluster.wish import Wish
from instgenie.errors import ClosedError, QueueFullError
from instgenie.scheduling.names import Batching

FACTS = wire.ModelFacts(
    name="tiny", family="flux", is_fill=False, own_size=64, steps=4, guidance=3.5, embeds_guidance=False, patch=16,
    size_multiple=16, num_blocks=3, device="cpu", dtype="float32",
)  # fmt: skip
JOB = wire.JobHead({}, (4, 4), 1.0, "FlowSchedule", msgspec.Raw(b"\x90"), 1, (wire.TensorHead("float32", (1,)),))
WISHES = {field.name for field in fields_of(Wish)}
LATENTS = wire.TensorHead("float32", (1,))


class Stage:
    """A flow and its processes, played by the test."""

    def __init__(self, **config: Any) -> None:
        self.config = ClusterConfig(**({"model": "tiny", "devices": ("cpu",)} | config))
        self.workers = make_workers(self.config)
        self.sent: list[tuple[str, wire.Message]] = []
        self.listings: list[tuple[int, wire.List]] = []
        self.foreseen: list[tuple[int, wire.Fetch]] = []
        self.deadly: tuple[Role, str] | None = None  # who dies of what
        self.num_deaths = 0
        self.flow = Flow(self.config, self.workers, self.send)

    def send(self, process: Process, message: wire.Message, frames: Sequence[wire.Frame] = ()) -> None:
        if isinstance(message, wire.List):
            self.listings.append((process.worker, message))
        elif isinstance(message, wire.Fetch):
            self.foreseen.append((process.worker, message))
        else:
            self.sent.append((f"{process.worker}.{process.role}", message))

    def register_one(self) -> Template:
        """A template of the usual order's picture, from the wish to its activations."""
        template = self.flow.register(self.flow.library.registering("me", make_order().picture, None, None))
        self.prepare()
        self.register()
        return template

    def process(self, role: Role, worker: int = 0) -> Process:
        return self.workers[worker].processes[role]

    def open(self, *workers: int) -> None:
        for worker in workers or range(len(self.workers)):
            for process in self.workers[worker].processes.values():
                self.revive(process)

    def revive(self, process: Process) -> None:
        process.state = "ready"
        self.flow.ready(process, FACTS, "digest")

    def kill(self, role: Role, worker: int = 0) -> None:
        process = self.process(role, worker)
        process.state = "down"
        self.flow.died(process)

    def take(self, role: Role, worker: int = 0) -> list[Any]:
        """What was sent to a process since it was last asked."""
        name = f"{worker}.{role}"
        taken = [message for to, message in self.sent if to == name]
        self.sent = [(to, message) for to, message in self.sent if to != name]
        return taken

    def next(self, role: Role, worker: int) -> Any:
        """The first message to a process that was not yet taken. It dies of what is deadly, and comes back."""
        name = f"{worker}.{role}"
        if message := next((message for to, message in self.sent if to == name), None):
            self.sent.remove((name, message))
            if (role, message.id) == self.deadly:
                self.num_deaths += 1
                self.kill(role, worker)
                self.take(role, worker)
                self.revive(self.process(role, worker))
                return self.next(role, worker)
        return message

    def prepare(self, worker: int = 0) -> None:
        while m := self.next("prepare", worker):
            self.flow.handle(
                self.process("prepare", worker), wire.Prepared(m.id, m.attempt, JOB, 16, 4, 4, 0.1), [b"\0" * 4]
            )

    def denoise(self, worker: int = 0) -> None:
        for message in self.take("denoise", worker):
            if isinstance(message, wire.Denoise):
                for job in message.jobs:
                    self.denoised(job, worker)

    def found(self, job: Any, tier: Tier | None, worker: int = 0) -> None:
        self.flow.handle(self.process("denoise", worker), wire.Found(job.id, job.attempt, tier), [])

    def kept(self, template: str, worker: int = 0, **tier_bytes: int) -> None:
        message = wire.Kept(template, tier_bytes, tier_bytes)  # type: ignore[arg-type]
        self.flow.handle(self.process("denoise", worker), message, [])

    def denoised(self, job: Any, worker: int = 0) -> None:
        if job.template and job.is_sure:
            self.found(job, "host", worker)
        self.flow.handle(
            self.process("denoise", worker), wire.Denoised(job.id, job.attempt, LATENTS, 16, 0.2), [b"\0" * 4]
        )

    def finish(self, worker: int = 0) -> None:
        while m := self.next("finish", worker):
            self.flow.handle(
                self.process("finish", worker), wire.Painted(m.id, m.attempt, m.partial, 0.1, 0.6), [b"png"]
            )

    def register(self, worker: int = 0) -> None:
        for m in self.take("denoise", worker):
            if isinstance(m, wire.Register):
                self.flow.handle(
                    self.process("denoise", worker), wire.Registered(m.id, m.attempt, 4, 4, {"host": 1000}), []
                )

    def run(self, worker: int = 0) -> None:
        self.prepare(worker)
        self.denoise(worker)
        self.finish(worker)


def make_order(seed: int = 0, picture_seed: int = 0, **fields: Any) -> Order:
    picture = np.random.default_rng(picture_seed).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    mask = np.zeros((64, 64), np.bool_)
    mask[:32, :32] = True
    wish = Wish(**{"prompt": "cat", "seed": seed} | {name: fields.pop(name) for name in list(fields) if name in WISHES})
    return Order(**{"tenant": "me", "picture": picture, "mask": mask, "wish": wish} | fields)


def events(ticket: Ticket) -> list[Event | None]:
    queue = ticket._entry.events
    return [queue.get_nowait() for _ in range(queue.qsize())]


def test_an_order_goes_through_all_stages() -> None:
    stage = Stage()
    stage.open()
    [ticket] = stage.flow.accept([make_order(seed=5, num_partials=1)])
    stage.prepare()
    [message] = stage.take("denoise")
    [job] = message.jobs
    denoiser = stage.process("denoise")
    stage.flow.handle(denoiser, wire.Joined((wire.JobStep(job.id, 1, 0),), ((),)), [])
    stage.flow.handle(denoiser, wire.Stepped(0.1, 0.1, 0, (wire.JobStep(job.id, 1, 1),)), [])
    stage.flow.handle(denoiser, wire.Glimpsed(job.id, 1, 0, LATENTS), [b"\0" * 4])
    stage.finish()
    stage.denoised(job)
    stage.finish()
    queued, stepped, partial, finished, end = events(ticket)
    assert (queued, stepped, end) == (Queued(0), Stepped(1, 4), None)
    assert isinstance(partial, Partial)
    assert isinstance(finished, Finished)
    assert finished.picture == b"png"
    facts = finished.facts
    assert (facts.seed, facts.num_tokens, facts.num_masked_tokens, facts.num_attempts) == (5, 16, 4, 1)
    assert (facts.finish_seconds, facts.finish_thread_seconds) == pytest.approx((0.7, 0.6))
    assert stage.flow.workers[0].load.chores["finish"] == pytest.approx(0.15)  # four threads
    assert not stage.flow.entries
    assert stage.workers[0].load.num_edits == 0


def test_orders_wait_for_the_first_worker_that_is_ready() -> None:
    stage = Stage(devices=("cpu", "cpu"))
    tickets = [stage.flow.accept([make_order(seed)])[0] for seed in range(4)]
    assert not stage.sent
    stage.open(1)
    stage.run(1)
    assert all(isinstance(events(ticket)[-2], Finished) for ticket in tickets)


def test_a_group_is_denoised_in_one_message() -> None:
    stage = Stage()
    stage.open()
    stage.flow.accept([make_order(seed) for seed in range(3)])
    prepared = stage.take("prepare")
    assert len(prepared) == 2
    for m in prepared:
        stage.flow.handle(stage.process("prepare"), wire.Prepared(m.id, 1, JOB, 16, 4, 4, 0.1), [b"\0" * 4])
    assert not stage.take("denoise")
    stage.prepare()
    [message] = stage.take("denoise")
    assert len(message.jobs) == 3


def test_a_group_does_not_wait_for_a_member_that_failed_or_left() -> None:
    stage = Stage()
    stage.open()
    first, second, third = stage.flow.accept([make_order(seed) for seed in range(3)])
    stage.flow.handle(stage.process("prepare"), wire.Failed(first.id, 1, "bad_input", "no"), [])
    second.cancel()
    stage.sent = [sent for sent in stage.sent if sent[1].id == third.id]  # type: ignore[attr-defined]
    stage.prepare()
    [message] = stage.take("denoise")
    assert [job.id for job in message.jobs] == [third.id]
    assert events(first)[1:] == [Failed("bad_input", "no"), None]
    assert events(second)[-1] is None


def test_a_full_queue_says_so() -> None:
    stage = Stage(max_queue=3)
    stage.open()
    tickets = stage.flow.accept([make_order(seed) for seed in range(3)])
    with pytest.raises(QueueFullError, match="3 edits are waiting: at most 3") as full:
        stage.flow.accept([make_order()])
    assert (full.value.num_waiting, full.value.limit) == (3, 3)
    assert full.value.retry_after >= 1
    tickets[0].cancel()
    stage.flow.accept([make_order()])


@pytest.mark.parametrize("role", ["prepare", "denoise", "finish"])
def test_a_death_costs_its_own_stage(role: Role) -> None:
    stage = Stage()
    stage.open()
    [ticket] = stage.flow.accept([make_order()])
    before = {"prepare": [], "denoise": [stage.prepare], "finish": [stage.prepare, stage.denoise]}[role]
    for play in before:
        play()
    [lost] = stage.take(role)
    stage.kill(role)
    assert not stage.sent
    stage.revive(stage.process(role))
    others = [sent for sent in stage.sent if not sent[0].endswith(role)]
    assert not others
    stage.run()
    finished = events(ticket)[-2]
    assert isinstance(finished, Finished)
    assert finished.facts.num_attempts == 2
    assert lost is not None


def test_an_answer_to_an_attempt_that_was_given_up_is_ignored() -> None:
    stage = Stage()
    stage.open()
    [ticket] = stage.flow.accept([make_order()])
    stage.prepare()
    [old] = stage.take("denoise")
    stage.kill("denoise")
    stage.revive(stage.process("denoise"))
    stage.denoised(old.jobs[0])
    assert not stage.take("finish")
    stage.denoise()
    stage.finish()
    assert isinstance(events(ticket)[-2], Finished)


def test_with_another_worker_nobody_waits_for_the_restart() -> None:
    stage = Stage(devices=("cpu", "cpu"), policy="requests")
    stage.open()
    [ticket] = stage.flow.accept([make_order()])
    own = ticket._entry.worker
    stage.prepare(own)
    stage.kill("denoise", own)
    stage.denoise(1 - own)
    stage.finish(1 - own)
    assert isinstance(events(ticket)[-2], Finished)


def test_what_kills_three_processes_fails_alone() -> None:
    stage = Stage()
    stage.open()
    poison, *others = [stage.flow.accept([make_order(seed)])[0] for seed in range(4)]
    stage.prepare()
    num_deaths, sizes = 0, []
    while stage.flow.entries:
        held = stage.take("denoise")
        sizes.append(len(held))
        if any(job.id == poison.id for message in held for job in message.jobs):
            stage.kill("denoise")
            num_deaths += 1
            stage.revive(stage.process("denoise"))
        else:
            for message in held:
                stage.denoised(message.jobs[0])
        stage.finish()
    assert num_deaths == 3
    assert sizes == [4, 4, 1, 1, 1, 1]  # after the second death one by one
    failed = events(poison)[-2]
    assert isinstance(failed, Failed)
    assert failed.kind == "crashed"
    assert all(isinstance(events(other)[-2], Finished) for other in others)


@pytest.mark.parametrize("role", ["prepare", "finish"])
def test_what_kills_those_who_prepare_or_finish_fails_alone(role: Role) -> None:
    stage = Stage(devices=("cpu", "cpu"))
    stage.open()
    poison, *others = [stage.flow.accept([make_order(seed)])[0] for seed in range(4)]
    stage.deadly = role, poison.id
    while stage.flow.entries:
        for worker, play in itertools.product((0, 1), (stage.prepare, stage.denoise, stage.finish)):
            play(worker)
    assert stage.num_deaths == 3
    failed = events(poison)[-2]
    assert isinstance(failed, Failed)
    assert failed.kind == "crashed"
    assert all(isinstance(events(other)[-2], Finished) for other in others)


def test_deaths_at_other_stages_do_not_add_up() -> None:
    stage = Stage()
    stage.open()
    [ticket] = stage.flow.accept([make_order()])
    for role, play in (("prepare", stage.prepare), ("denoise", stage.denoise), ("finish", stage.finish)):
        for _ in range(2):
            stage.take(role)
            stage.kill(role)
            stage.revive(stage.process(role))
        play()
    finished = events(ticket)[-2]
    assert isinstance(finished, Finished)
    assert finished.facts.num_attempts == 7


def test_no_worker_can_start() -> None:
    stage = Stage()
    [ticket] = stage.flow.accept([make_order()])
    process = stage.process("prepare")
    process.state, process.message = "failed", "no such model"
    stage.flow.died(process)
    assert events(ticket)[-2:] == [Failed("internal", "no such model"), None]


def test_the_second_edit_of_a_picture_hits() -> None:
    stage = Stage()
    stage.open()
    first, other = (stage.flow.accept([make_order(picture_seed=seed)])[0] for seed in range(2))
    stage.run()
    stage.prepare()  # the templates
    stage.register()
    again = stage.flow.accept([make_order(seed=9)])[0]
    stage.prepare()
    [message] = stage.take("denoise")
    assert message.jobs[0].template.id == first._entry.work.template != other._entry.work.template
    stage.denoised(message.jobs[0])
    stage.finish()
    tiers = [events(ticket)[-2].facts.cache_tier for ticket in (first, other, again)]  # type: ignore[union-attr]
    assert tiers == [None, None, "host"]


@pytest.mark.parametrize(
    "change",
    [{"tenant": "you"}, {"steps": 3}, {"picture_seed": 1}, {"quality": "exact"}, {"strength": 0.5}, {"guidance": 9.0}],
)
def test_what_shares_activations(change: dict[str, Any]) -> None:
    stage = Stage()
    stage.open()
    stage.flow.accept([make_order()])
    stage.run()
    stage.prepare()
    stage.register()
    [ticket] = stage.flow.accept([make_order(**change)])
    is_hit = ticket._entry.template is not None
    # strength takes the last of the same steps, and guidance does not enter this network
    assert is_hit == bool({"guidance", "strength"} & set(change))


def test_an_edit_stays_cached_though_its_activations_are_lost() -> None:
    stage = Stage()
    stage.open()
    template = stage.register_one()
    assert template.state == "ready"
    [ticket] = stage.flow.accept([make_order()])
    stage.prepare()
    stage.take("denoise")
    stage.kill("denoise")
    assert template.state == "queued"
    stage.revive(stage.process("denoise"))
    assert not [m for m in stage.take("denoise") if isinstance(m, wire.Denoise)]
    stage.prepare()
    [register] = [message for _, message in stage.sent if isinstance(message, wire.Register)]
    assert register.is_urgent
    stage.register()
    stage.denoise()
    stage.finish()
    finished = events(ticket)[-2]
    assert isinstance(finished, Finished)
    assert finished.facts.cache_tier == "host"


def test_activations_that_are_gone_by_the_time_a_job_comes() -> None:
    stage = Stage()
    stage.open()
    stage.register_one()
    [ticket] = stage.flow.accept([make_order()])
    stage.prepare()
    [message] = stage.take("denoise")
    [job] = message.jobs
    stage.flow.handle(stage.process("denoise"), wire.Missing(job.id, job.attempt, job.template.id), [])
    stage.prepare()
    stage.register()
    stage.denoise()
    stage.finish()
    assert isinstance(events(ticket)[-2], Finished)


def test_shared_activations_that_turn_out_to_be_damaged() -> None:
    stage = lasting()
    template = stage.register_one()
    stage.kept(template.id, disk=900)
    [ticket] = stage.flow.accept([make_order()])
    stage.prepare()
    [message] = stage.take("denoise")
    [job] = message.jobs
    stage.flow.handle(stage.process("denoise"), wire.Missing(job.id, job.attempt, template.id), [])
    assert not stage.take("denoise")  # it is registered first
    stage.prepare()
    stage.register()
    stage.denoise()
    stage.finish()
    finished = events(ticket)[-2]
    assert isinstance(finished, Finished)
    assert finished.facts.cache_tier == "host"


def test_a_template_that_does_not_fit_leaves_its_edits_dense() -> None:
    stage = Stage()
    stage.open()
    template = stage.register_one()
    [ticket] = stage.flow.accept([make_order()])
    stage.kill("denoise")
    stage.revive(stage.process("denoise"))
    stage.prepare()
    [register] = [m for m in stage.take("denoise") if isinstance(m, wire.Register)]
    failed = wire.Failed(register.id, register.attempt, "out_of_memory", "too large")
    stage.flow.handle(stage.process("denoise"), failed, [])
    assert (template.state, template.message) == ("failed", "too large")
    stage.denoise()
    stage.finish()
    finished = events(ticket)[-2]
    assert isinstance(finished, Finished)
    assert finished.facts.cache_tier is None


def test_forgotten_templates_are_not_used() -> None:
    stage = Stage()
    stage.open()
    template = stage.register_one()
    stage.flow.forget(template)
    [forget] = [message for message in stage.take("denoise") if isinstance(message, wire.Forget)]
    assert (forget.template.id, forget.template.tenant) == (template.id, "me")
    [ticket] = stage.flow.accept([make_order()])
    assert ticket._entry.template is None


def test_cancelled_edits_leave_every_stage() -> None:
    stage = Stage()
    stage.open()
    for num_stages in range(3):
        [ticket] = stage.flow.accept([make_order()])
        for play in (stage.prepare, stage.denoise)[:num_stages]:
            play()
        stage.flow.cancel(ticket._entry)
        stage.flow.cancel(ticket._entry)
        assert not stage.flow.entries
        assert not any(process.held or process.queue for process in stage.workers[0].processes.values())
        assert events(ticket)[-1] is None
    assert stage.flow.counts["cancelled"] == 3


def test_a_job_in_the_batch_is_told_to_leave() -> None:
    stage = Stage()
    stage.open()
    [ticket] = stage.flow.accept([make_order()])
    stage.prepare()
    ticket.cancel()
    assert stage.take("denoise")[-1] == wire.Cancel(ticket.id)


@pytest.mark.parametrize("batching", ["naive", "static"])
def test_some_workers_have_one_process(batching: Batching) -> None:
    stage = Stage(batching=batching)
    stage.open()
    [ticket] = stage.flow.accept([make_order()])
    process = stage.process("denoise")
    [prepare] = stage.take("denoise")
    stage.flow.handle(process, wire.Prepared(prepare.id, 1, JOB, 16, 4, 4, 0.1), [b"\0" * 4])
    stage.denoise()
    [finish] = stage.take("denoise")
    stage.flow.handle(process, wire.Painted(finish.id, 1, None, 0.1), [b"png"])
    assert isinstance(events(ticket)[-2], Finished)


def test_who_waits_hears_how_many_go_first() -> None:
    stage = Stage()
    stage.open()
    tickets = [stage.flow.accept([make_order(seed)])[0] for seed in range(3)]
    tickets[0].cancel()
    assert [events(ticket) for ticket in tickets[1:]] == [[Queued(1), Queued(0)], [Queued(2), Queued(1)]]


def test_a_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Stage().config.model = "other"  # type: ignore[misc]
    assert replace(ClusterConfig(), batching="naive").roles == ("denoise",)
    assert replace(ClusterConfig(), batching="static-pipelined").roles == ("prepare", "denoise", "finish")


def lasting(**config: Any) -> Stage:
    stage = Stage(cache=CacheConfig(disk="somewhere"), **config)
    stage.open()
    return stage


@pytest.mark.parametrize("tier", ["disk", "remote", None])
def test_a_worker_says_whether_an_unknown_template_is_below(tier: Tier | None) -> None:
    stage = lasting()
    [ticket] = stage.flow.accept([make_order()])
    [(_, foreseen)] = stage.foreseen
    stage.prepare()
    [message] = stage.take("denoise")
    [job] = message.jobs
    assert (job.template, job.is_sure) == (foreseen.template, False)
    assert stage.flow.counts["queries"] == 0
    stage.found(job, tier)
    assert (stage.flow.counts["queries"], dict(stage.flow.cache_hits)) == (1, {tier: 1} if tier else {})
    stage.kill("denoise")
    stage.revive(stage.process("denoise"))
    if tier:  # it was told of before it died; what is on disk is yet to be told
        stage.prepare()
        stage.register()
    [message] = [message for message in stage.take("denoise") if isinstance(message, wire.Denoise)]
    assert [bool(job.template and job.is_sure) for job in message.jobs] == [tier is not None]
    stage.denoised(message.jobs[0])
    stage.finish()
    finished = events(ticket)[-2]
    assert isinstance(finished, Finished)
    assert (finished.facts.cache_tier is None) == (tier is None)
    assert stage.flow.counts["queries"] == 1


def test_what_is_shared_outlives_a_worker() -> None:
    stage = lasting(devices=("cpu", "cpu"))
    template = stage.flow.register(stage.flow.library.registering("me", make_order().picture, None, None))
    [holder] = template.entries
    stage.prepare(holder)
    stage.register(holder)
    assert template.status().tier_bytes == {"host": 1000}
    assert [template.id in worker.load.templates for worker in stage.workers].count(True) == 1
    stage.kept(template.id, holder, host=1000, disk=900)
    stage.kept(template.id, 1 - holder, host=1000, disk=900)
    assert template.status().tier_bytes == {"host": 2000, "disk": 900}
    assert all(template.id in worker.load.templates for worker in stage.workers)
    stage.kill("denoise", holder)
    assert (template.state, template.status().tier_bytes) == ("ready", {"host": 1000, "disk": 900})
    stage.kept(template.id, 1 - holder)
    assert template.state == "failed"
    assert not any(template.id in worker.load.templates for worker in stage.workers)


def test_the_router_knows_the_highest_tier_of_a_template_at_each_worker() -> None:
    stage = lasting(devices=("cpu", "cpu"))
    template = stage.flow.register(stage.flow.library.registering("me", make_order().picture, None, None))
    [holder] = template.entries
    here, there = stage.workers[holder].load.templates, stage.workers[1 - holder].load.templates
    stage.prepare(holder)
    stage.register(holder)
    assert (here, there) == ({template.id: "host"}, {})
    stage.kept(template.id, holder, gpu=1000, host=1000, disk=900, remote=900)
    assert (here, there) == ({template.id: "gpu"}, {template.id: "disk"})
    stage.kept(template.id, 1 - holder, host=1000, remote=900)
    assert (here, there) == ({template.id: "gpu"}, {template.id: "host"})
    stage.kill("denoise", holder)
    assert (here, there) == ({template.id: "remote"}, {template.id: "host"})
    stage.flow.forget(template)
    assert (here, there) == ({}, {})


def test_a_worker_that_was_away_forgets_when_it_is_back() -> None:
    stage = lasting(devices=("cpu", "cpu"))
    template = stage.flow.register(stage.flow.library.registering("me", make_order().picture, None, None))
    [holder] = template.entries
    stage.prepare(holder)
    stage.register(holder)
    stage.kill("denoise", holder)
    stage.flow.forget(template)
    assert [type(message) for message in stage.take("denoise", 1 - holder)] == [wire.Cancel, wire.Forget]
    stage.flow.handle(stage.process("denoise", 1 - holder), wire.Forgotten(template.id), [])
    [ticket] = stage.flow.accept([make_order()])
    assert ticket._entry.template is None  # though it is still there
    stage.revive(stage.process("denoise", holder))
    [forget] = [message for message in stage.take("denoise", holder) if isinstance(message, wire.Forget)]
    assert forget.template.id == template.id
    stage.flow.handle(stage.process("denoise", holder), wire.Forgotten(template.id), [])
    [ticket] = stage.flow.accept([make_order()])
    assert ticket._entry.template == template.id  # to be looked for


def test_other_weights_are_another_model() -> None:
    stage = lasting()
    stage.flow.accept([make_order()])
    stage.flow.ready(stage.process("prepare"), FACTS, "other text encoders")
    stage.flow.accept([make_order()])
    stage.flow.ready(stage.process("denoise"), FACTS, "another transformer")
    stage.flow.accept([make_order()])
    assert len({fetch.template.model for _, fetch in stage.foreseen}) == 3


def listed(stage: Stage, worker: int = 0, num_steps: int = 4, **fields: Any) -> str:
    """A worker tells of a template of the usual order's picture; its id."""
    order = make_order(**fields)
    registering = stage.flow.library.registering_of(order)
    head = stage.flow.library.head_of(template_id(registering), registering, stage.workers[worker])
    assert head is not None
    listing = wire.Listing(head, order.picture.shape[:2], num_steps, {"disk": 900})
    stage.flow.handle(stage.process("denoise", worker), wire.Listed(head.model, (listing,)), [])
    return head.id


def test_what_outlived_the_cluster_is_asked_for_once() -> None:
    stage = Stage(cache=CacheConfig(disk="somewhere"), devices=("cpu", "cpu"))
    stage.open(0)
    assert stage.listings == [(0, wire.List(stage.workers[0].identity or ""))]
    stage.open(1)
    assert len(stage.listings) == 1
    stage.kill("denoise", 0)  # before it has answered
    stage.revive(stage.process("denoise", 1))
    listed(stage, 1)
    stage.revive(stage.process("denoise", 0))
    assert [worker for worker, _ in stage.listings] == [0, 1]


def test_a_listed_template_is_used_and_forgotten() -> None:
    stage = lasting(devices=("cpu", "cpu"))
    name = listed(stage)
    template = stage.flow.library.templates[name]
    status = template.status()
    assert (status.state, status.num_registered_steps, status.width, status.height) == ("ready", 4, 64, 64)
    assert status.tier_bytes == {"disk": 900}
    [ticket] = stage.flow.accept([make_order()])
    assert (ticket._entry.template, ticket._entry.is_sure) == (name, True)
    stage.flow.forget(template)
    for worker in (0, 1):
        [forget] = [message for message in stage.take("denoise", worker) if isinstance(message, wire.Forget)]
        assert (forget.template.id, forget.template.tenant) == (name, "me")
    listed(stage)
    assert name not in stage.flow.library.templates  # it is on its way out


def test_a_listed_template_that_is_not_whole_is_registered_by_the_next_edit() -> None:
    stage = lasting()
    name = listed(stage, num_steps=2)
    template = stage.flow.library.templates[name]
    assert (template.state, template.message) == ("failed", "its registration was interrupted: register it again")
    [ticket] = stage.flow.accept([make_order()])
    assert ticket._entry.template is None
    stage.run()
    stage.prepare()
    stage.register()
    assert template.state == "ready"


def test_the_picture_of_a_listed_template_is_recalled() -> None:
    async def play() -> None:
        stage = lasting()
        template = stage.flow.library.templates[listed(stage)]
        denoiser = stage.process("denoise")
        found, again = stage.flow.library.recall(template), stage.flow.library.recall(template)
        [recall] = [message for message in stage.take("denoise") if isinstance(message, wire.Recall)]
        assert recall.template.id == template.id
        pixels = make_order().picture
        stage.flow.handle(denoiser, wire.Recalled(template.id, (64, 64)), wire.picture_frames(pixels))
        assert np.array_equal(await found, pixels)
        assert np.array_equal(await again, pixels)
        lost = stage.flow.library.recall(template)
        stage.kill("denoise")
        with pytest.raises(ClosedError, match="stopped"):
            await lost
        with pytest.raises(ClosedError, match="no worker"):
            stage.flow.library.recall(template)

    asyncio.run(play())
