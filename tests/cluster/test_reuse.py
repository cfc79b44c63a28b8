"""Which edits reuse activations: a ready template is used whichever worker runs the edit, and the answer says why an
edit is computed in full."""

from typing import Any

import pytest
from helpers.fake_cluster import FakeCluster, events, make_lasting, make_order

from instgenie.cluster import wire
from instgenie.cluster.entries import MAX_PARKS, Ticket
from instgenie.cluster.orders import Facts, Failed, Finished
from instgenie.cluster.retries import FIRST_PAUSE, LAST_PAUSE, Retries
from instgenie.cluster.templates import TemplateRecord
from instgenie.scheduling.names import RoutingPolicy
from instgenie.types import ReuseFound, TierName


def make_two(**config: Any) -> FakeCluster:
    """Two workers without a disk, the first of which has the usual order's template."""
    cluster = FakeCluster(devices=("cpu", "cpu"), **config)
    cluster.open()
    template = cluster.ask_for_template()
    [holder] = template.entries
    cluster.prepare(holder)
    cluster.register(holder)
    return cluster


def template_of(cluster: FakeCluster) -> TemplateRecord:
    [template] = cluster.library.templates.values()
    return template


def play(cluster: FakeCluster, loses: bool = False) -> None:
    """Let all workers work until nothing is left to do. Their stores may lose what was registered."""
    while cluster.sent:
        for worker in range(len(cluster.workers)):
            cluster.prepare(worker)
            for message in cluster.take("denoise", worker):
                if isinstance(message, wire.Register):
                    cluster.answer("denoise", worker, wire.Registered(message.id, message.attempt, 4, 4, {"host": 9}))
                for job in message.jobs if isinstance(message, wire.Denoise) else ():
                    if loses and job.must_reuse:
                        cluster.answer("denoise", worker, wire.Missing(job.id, job.attempt, job.template.id))
                    else:
                        cluster.denoised(job, worker)
            cluster.finish(worker)


def facts(ticket: Ticket) -> Facts:
    finished = events(ticket)[-2]
    assert isinstance(finished, Finished)
    return finished.facts


@pytest.mark.parametrize("policy", ["mask_aware", "round_robin", "requests", "tokens"])
def test_every_edit_of_a_ready_template_uses_it(policy: RoutingPolicy) -> None:
    cluster = make_two(policy=policy)
    tickets = [cluster.accept(make_order(seed))[0] for seed in range(10)]
    assert {ticket._entry.worker for ticket in tickets} == {0, 1}
    play(cluster)
    assert [facts(ticket).cache_tier for ticket in tickets] == ["host"] * 10
    assert template_of(cluster).holders.keys() == {0, 1}


def test_a_template_that_another_worker_registers_stays_ready() -> None:
    cluster = make_two(policy="round_robin")
    for seed in range(2):
        cluster.accept(make_order(seed))
    for worker in range(2):
        cluster.prepare(worker)
    [(worker, register)] = [(int(to[0]), m) for to, m in cluster.sent if isinstance(m, wire.Register)]
    assert register.is_urgent
    cluster.answer("denoise", worker, wire.Registered(register.id, register.attempt, 1, 4, {"host": 250}))
    status = template_of(cluster).status()
    assert (status.state, status.num_registered_steps) == ("ready", 4)


def test_edits_go_to_a_worker_that_has_the_template_if_theirs_cannot_register_it() -> None:
    cluster = make_two(policy="round_robin")
    [holder] = template_of(cluster).holders
    tickets = [cluster.accept(make_order(seed))[0] for seed in range(4)]
    other = 1 - holder
    cluster.prepare(other)
    cluster.prepare(other)
    [register] = [message for message in cluster.take("denoise", other) if isinstance(message, wire.Register)]
    cluster.answer("denoise", other, wire.JobFailed(register.id, register.attempt, "out_of_memory", "no room"))
    later = cluster.accept(make_order(5))[0]
    play(cluster)
    all_facts = [facts(ticket) for ticket in (*tickets, later)]
    assert {(one.cache_tier, one.why_dense, one.worker) for one in all_facts} == {("host", "", holder)}
    assert template_of(cluster).state == "ready"


def test_a_template_that_a_client_registered_is_used_though_its_worker_died() -> None:
    """It is registered again; edits that come meanwhile wait for it instead of being computed in full."""
    cluster = FakeCluster()
    cluster.open()
    template = cluster.register_template()
    cluster.kill("denoise")
    cluster.revive(cluster.process("denoise"))
    assert template.state == "queued"
    [ticket] = cluster.accept(make_order())
    play(cluster)
    assert facts(ticket).cache_tier == "host"
    assert (template.state, template.is_lost) == ("ready", False)


def test_a_registration_that_an_edit_waits_for_does_not_wait_for_room() -> None:
    """The worker holds as many edits as it may, and others stand before the registration."""
    cluster = FakeCluster(max_batch_size=1)
    cluster.open()
    cluster.accept(make_order(reuse="template"))
    for seed in range(4):
        cluster.accept(make_order(seed, picture_seed=1))
    cluster.prepare()
    assert [type(message) for message in cluster.take("denoise")] == [wire.Denoise, wire.Denoise, wire.Register]
    assert len(cluster.process("denoise").queue) == 2


def test_an_edit_does_not_wait_for_ever_for_a_store_that_loses_its_template() -> None:
    cluster = FakeCluster()
    cluster.open()
    cluster.register_template()
    tickets = [cluster.accept(make_order(seed, reuse=reuse))[0] for seed, reuse in enumerate(("auto", "template"))]
    play(cluster, loses=True)
    assert f"{MAX_PARKS} times" in facts(tickets[0]).why_dense
    failed = events(tickets[1])[-2]
    assert isinstance(failed, Failed)
    assert failed.kind == "no_reuse"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"quality": "exact"}, "quality 'exact'"),
        ({"reuse": "off"}, "reuse=off"),
        ({"steps": 1}, "computes 1 of 1 steps"),
        ({"picture_seed": 7}, "no activations are registered"),
        ({}, ""),
    ],
)
def test_the_answer_says_why_an_edit_is_computed_in_full(fields: dict[str, Any], why: str) -> None:
    cluster = FakeCluster()
    cluster.open()
    cluster.register_template()
    [ticket] = cluster.accept(make_order(**fields))
    play(cluster)
    found = facts(ticket)
    assert (why in found.why_dense, bool(why)) == (True, found.cache_tier is None)


def test_an_edit_that_insists_has_its_template_registered_first() -> None:
    cluster = FakeCluster()
    cluster.open()
    [ticket] = cluster.accept(make_order(reuse="template"))
    cluster.prepare()
    assert [(type(message), message.is_urgent) for _, message in cluster.sent] == [(wire.Register, True)]  # type: ignore[attr-defined]
    play(cluster)
    assert facts(ticket).cache_tier == "host"


def test_an_edit_that_insists_fails_if_its_template_cannot_be_registered() -> None:
    cluster = FakeCluster()
    cluster.open()
    pinned, other = (cluster.accept(make_order(reuse="template", seed=seed))[0] for seed in range(2))
    cluster.prepare()
    cluster.prepare()
    [register] = [message for message in cluster.take("denoise") if isinstance(message, wire.Register)]
    cluster.answer("denoise", 0, wire.JobFailed(register.id, register.attempt, "out_of_memory", "3 GB do not fit"))
    for ticket in (pinned, other):
        failed = events(ticket)[-2]
        assert isinstance(failed, Failed)
        assert failed.kind == "no_reuse"
        assert "3 GB do not fit" in failed.message
    assert not cluster.entries


def test_an_edit_that_insists_fails_when_its_template_is_deleted() -> None:
    cluster = make_lasting()
    template = cluster.register_template()
    [ticket] = cluster.accept(make_order(reuse="template"))
    cluster.prepare()
    cluster.coordinator.forget(template)
    failed = events(ticket)[-2]
    assert isinstance(failed, Failed)
    assert "deleted" in failed.message


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_failed_registration_is_tried_again_after_a_pause() -> None:
    cluster = FakeCluster()
    cluster.open()
    clock = Clock()
    cluster.library.retries = Retries(clock)
    num_tried = []
    for now in (0.0, 1.0, FIRST_PAUSE, FIRST_PAUSE + 1, 3 * FIRST_PAUSE):
        clock.now = now
        cluster.accept(make_order())
        cluster.run()
        cluster.prepare()
        registers = [message for message in cluster.take("denoise") if isinstance(message, wire.Register)]
        for m in registers:
            cluster.answer("denoise", 0, wire.JobFailed(m.id, m.attempt, "out_of_memory", "no room"))
        num_tried.append(len(registers))
    assert num_tried == [1, 0, 1, 0, 1]


def test_pauses_grow_up_to_a_limit_and_end_with_a_success() -> None:
    clock = Clock()
    retries = Retries(clock)
    for _ in range(20):
        retries.failed("a")
    clock.now = LAST_PAUSE - 1
    assert not retries.may_try("a")
    assert retries.may_try("b")
    clock.now = LAST_PAUSE
    assert retries.may_try("a")
    retries.failed("a")
    retries.succeeded("a")
    assert retries.may_try("a")


@pytest.mark.parametrize(
    ("tier", "reuse", "why"),
    [
        (None, "own", "an edit with the same key was begun before the template was ready"),
        ("host", "template", ""),
    ],
)
def test_an_edit_that_follows_another_with_its_key_says_what_that_one_read(
    tier: TierName | None, reuse: ReuseFound, why: str
) -> None:
    """Another front sent the same edit to the worker before, when less or more was known of its template."""
    cluster = FakeCluster()
    cluster.open()
    if reuse == "own":
        cluster.register_template()
    [ticket] = cluster.accept(make_order(key="name/0"))
    cluster.prepare()
    [job] = [job for sent in cluster.take("denoise") if isinstance(sent, wire.Denoise) for job in sent.jobs]
    if tier:
        cluster.found(job, tier)
    latents = wire.TensorHead("float32", (1,))
    cluster.answer("denoise", 0, wire.Denoised(job.id, job.attempt, latents, 8, 0.2, reuse), b"\0" * 4)
    cluster.finish()
    answered = facts(ticket)
    assert (answered.reuse, answered.cache_tier, answered.why_dense) == (reuse, tier, why)
