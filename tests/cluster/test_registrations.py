"""Registrations wait behind edits, one at a time on each worker, and each tenant may have so many."""

import pytest
from helpers.fake_cluster import FakeCluster, make_order

from instgenie.cluster import quota, wire
from instgenie.cluster.popularity import Popularity
from instgenie.cluster.quota import MAX_WAITING
from instgenie.cluster.registrations import MAX_PASSED, is_registering
from instgenie.cluster.templates import TemplateRecord
from instgenie.errors import TemplatesFullError


@pytest.fixture
def cluster() -> FakeCluster:
    cluster = FakeCluster(max_queue=100)
    cluster.open()
    return cluster


def ask(cluster: FakeCluster, *seeds: int, tenant: str = "me") -> list[TemplateRecord]:
    pictures = [make_order(picture_seed=seed).picture for seed in seeds]
    orders = [cluster.naming.template_order(tenant, picture, None, None) for picture in pictures]
    return [cluster.coordinator.register(order) for order in orders]


def num_waiting(cluster: FakeCluster) -> int:
    return cluster.library.registrations.num_waiting


def test_a_worker_registers_one_template_at_a_time(cluster: FakeCluster) -> None:
    templates = ask(cluster, *range(20))
    for num_ready in range(20):
        assert [template.state for template in templates].count("ready") == num_ready
        assert num_waiting(cluster) == 19 - num_ready
        [message] = cluster.take("prepare")
        assert not cluster.take("denoise")
        cluster.prepared(message)
        assert not cluster.take("prepare")  # no second one is prepared while the first one is on the device
        [register] = cluster.take("denoise")
        cluster.answer("denoise", 0, wire.Registered(register.id, register.attempt, 4, 4, {"host": 1000}))
    assert all(template.state == "ready" for template in templates)


def test_edits_go_before_registrations(cluster: FakeCluster) -> None:
    """The one that has begun is all that stands before an edit."""
    templates = ask(cluster, *range(20))
    tickets = [cluster.accept(make_order(seed, quality="exact"))[0] for seed in range(10)]
    begun, *edits = cluster.take("prepare")
    assert begun.id == templates[0].id
    cluster.prepared(begun)
    [register] = cluster.take("denoise")
    cluster.answer("denoise", 0, wire.Registered(register.id, register.attempt, 4, 4, {"host": 1000}))
    order = []
    while edits:
        message = edits.pop(0)
        order.append(type(message))
        cluster.prepared(message)
        edits += cluster.take("prepare")
    assert order[:10] == [wire.Prepare] * 10, order
    assert all(ticket._entry.prepared for ticket in tickets)
    assert order[10:] == [wire.PrepareTemplate]


def test_edits_do_not_hold_up_registrations_for_ever(cluster: FakeCluster) -> None:
    ask(cluster, 0)
    [begun] = cluster.take("prepare")
    [waiting] = ask(cluster, 1)
    for seed in range(3):
        cluster.accept(make_order(seed, quality="exact"))
    cluster.prepared(begun)
    cluster.register()
    num_edits = 0
    while waiting.entries[0] in cluster.library.registrations._waiting[0]:
        cluster.accept(make_order(quality="exact"))
        messages = cluster.take("prepare")
        assert all(isinstance(message, wire.Prepare) for message in messages)
        for message in messages:
            cluster.prepared(message)
        num_edits += len(messages)
        cluster.denoise()
        cluster.finish()
        assert num_edits <= MAX_PASSED + 4


def test_tenants_take_turns(cluster: FakeCluster) -> None:
    ask(cluster, *range(5), tenant="me")
    ask(cluster, 0, 1, tenant="you")
    seen = []
    for _ in range(7):
        [message] = cluster.take("prepare")
        seen.append(cluster.library.templates[message.id].order.tenant)
        cluster.prepared(message)
        [register] = cluster.take("denoise")
        cluster.answer("denoise", 0, wire.Registered(register.id, register.attempt, 4, 4, {"host": 1000}))
    assert seen == ["me", "you", "me", "you", "me", "me", "me"]


def test_a_registration_that_an_edit_waits_for_goes_at_once(cluster: FakeCluster) -> None:
    template = cluster.register_template()
    others = ask(cluster, *range(1, 9))
    cluster.accept(make_order())
    cluster.prepare()
    cluster.kill("denoise")  # the template is lost, and queued behind the others
    assert num_waiting(cluster) == 8
    cluster.take("denoise")
    cluster.revive(cluster.process("denoise"))
    [message] = cluster.take("prepare")
    assert (message.id, message.is_urgent) == (template.id, True)
    assert num_waiting(cluster) == 7
    assert all(other.state == "queued" for other in others)


def test_a_deleted_template_leaves_the_queue_and_the_process(cluster: FakeCluster) -> None:
    first, second, third = ask(cluster, 0, 1, 2)
    cluster.take("prepare")
    cluster.coordinator.forget(second)
    assert num_waiting(cluster) == 1
    cluster.coordinator.forget(first)
    cancel, *_ = cluster.take("prepare")
    assert cancel == wire.Cancel(first.id)
    assert is_registering(cluster.workers[0])
    assert set(cluster.library.templates) == {third.id}


def test_registrations_of_a_worker_that_cannot_start_fail(cluster: FakeCluster) -> None:
    templates = ask(cluster, 0, 1, 2)
    process = cluster.process("prepare")
    process.state, process.message = "failed", "no memory"
    cluster.coordinator.died(process)
    assert [template.state for template in templates] == ["failed"] * 3
    assert num_waiting(cluster) == 0


def test_a_tenant_has_so_many_templates() -> None:
    cluster = FakeCluster(max_templates=3)
    cluster.open()
    templates = ask(cluster, 0, 1, 2)
    with pytest.raises(TemplatesFullError, match="3 templates of 3: delete one") as full:
        ask(cluster, 3)
    assert not full.value.passes
    assert ask(cluster, 2) == templates[2:]  # it is there already
    ask(cluster, 3, tenant="you")
    cluster.coordinator.forget(templates[0])
    ask(cluster, 3)


def test_a_tenant_has_so_many_registrations_under_way(cluster: FakeCluster) -> None:
    ask(cluster, *range(MAX_WAITING))
    with pytest.raises(TemplatesFullError, match=f"{MAX_WAITING} of your templates wait") as full:
        ask(cluster, 100)
    assert full.value.passes
    cluster.prepare()
    cluster.register()
    ask(cluster, 100)


def test_templates_that_nobody_asked_for_do_not_count() -> None:
    cluster = FakeCluster(max_templates=1)
    cluster.open()
    for seed in range(5):
        cluster.edit_and_register(make_order(picture_seed=seed))
    assert len(cluster.library.templates) == 5
    ask(cluster, 9)
    with pytest.raises(TemplatesFullError, match="1 templates of 1"):
        ask(cluster, 10)


def test_the_pictures_of_a_tenant_have_so_many_bytes(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "MAX_BYTES", 3 * 64 * 64 - 1)
    ask(cluster, 0)
    with pytest.raises(TemplatesFullError, match="take 12,288 bytes of 12,287: delete one"):
        ask(cluster, 1)


def test_a_picture_is_registered_when_it_comes_back_within_the_window() -> None:
    popularity = Popularity(num_requests=2, seconds=60)
    assert not popularity.note("cat", "first", now=0)
    assert not popularity.note("cat", "first", now=1), "two pictures of one request"
    assert not popularity.note("dog", "second", now=2)
    assert not popularity.note("cat", "third", now=100), "the first request is too long ago"
    assert popularity.note("cat", "fourth", now=130)
    assert Popularity(num_requests=1, seconds=60).note("cat", "first")


def test_the_first_edit_of_a_picture_registers_nothing() -> None:
    cluster = FakeCluster(register_after=2)
    cluster.open()
    nums = []
    for request in ("first", "second"):
        cluster.accept(make_order(request_id=request))
        cluster.run()
        nums.append(sum(isinstance(message, wire.PrepareTemplate) for _, message in cluster.sent))
    assert nums == [0, 1]


def test_a_picture_that_comes_back_to_another_front_is_counted_by_a_worker() -> None:
    """Each front sees one edit. The worker that counts for both of them is found by the template's id."""
    fronts = [FakeCluster(register_after=2, devices=("cpu",) * 3) for _ in range(2)]
    count = Popularity(num_requests=2, seconds=60)
    counters = []
    for number, front in enumerate(fronts):
        front.open()
        for worker in front.workers:
            worker.num_fronts = 2
        [ticket] = front.accept(make_order(request_id=f"request {number}"))
        front.run(ticket._entry.worker)
        [(counter, asked)] = [(to, sent) for to, sent in front.sent if isinstance(sent, wire.CountEdit)]
        counters.append(counter)
        assert not [sent for _, sent in front.sent if isinstance(sent, wire.PrepareTemplate)]
        counted = wire.EditCounted(asked.template, count.note(asked.template, asked.request))
        front.answer("denoise", int(counter[0]), counted)
        registering = [to for to, sent in front.sent if isinstance(sent, wire.PrepareTemplate)]
        assert registering == ([] if number == 0 else [f"{ticket._entry.worker}.prepare"])
    assert counters[0] == counters[1]


def test_a_request_that_is_repeated_with_its_key_counts_once() -> None:
    cluster = FakeCluster(register_after=2)
    cluster.open()
    for request in ("first", "repeated"):
        cluster.accept(make_order(request_id=request, key="name of the key/0"))
        cluster.run()
    assert not cluster.library.templates
