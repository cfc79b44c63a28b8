"""Deleting templates while a tier is away, and pictures that do not become templates."""

import asyncio
from typing import Any

import pytest
from helpers.fake_cluster import FakeCluster, make_lasting, make_order

from instgenie.cluster import forgetting, wire
from instgenie.cluster.entries import ComputeMode
from instgenie.cluster.templates import TemplateRecord


def forgets(cluster: FakeCluster, worker: int = 0) -> list[Any]:
    return [message for message in cluster.take("denoise", worker) if isinstance(message, wire.Forget)]


def prepared_templates(cluster: FakeCluster) -> list[Any]:
    return [message for _, message in cluster.sent if isinstance(message, wire.PrepareTemplate)]


def forget(cluster: FakeCluster) -> TemplateRecord:
    template = cluster.register_template()
    cluster.take("denoise")
    cluster.coordinator.forget(template)
    return template


async def until(cluster: FakeCluster) -> None:
    while not [message for _, message in cluster.sent if isinstance(message, wire.Forget)]:
        await asyncio.sleep(0.001)


def test_a_deletion_is_tried_again_until_every_tier_has_heard_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgetting, "FIRST_PAUSE", 0.001)

    async def play() -> None:
        cluster = make_lasting()
        template = forget(cluster)
        leaving = cluster.library.forgetting
        assert not await leaving.until_done(template.id, 0.0)
        for _ in range(3):
            await asyncio.wait_for(until(cluster), 60)
            assert [message.template.id for message in forgets(cluster)] == [template.id]
            cluster.answer("denoise", 0, wire.Forgotten(template.id, ("remote",)))
            assert not await leaving.until_done(template.id, 60)
            assert leaving.left(template.id) == ("remote",)
            assert leaving.tenant_of(template.id) == "me"
            [ticket] = cluster.accept(make_order())
            assert ticket._entry.template is None, "it is not looked for while it is being deleted"
            ticket.cancel()
        await asyncio.wait_for(until(cluster), 60)
        cluster.answer("denoise", 0, wire.Forgotten(template.id))
        assert await leaving.until_done(template.id, 60)
        assert template.id not in leaving
        assert leaving.tenant_of(template.id) is None

    asyncio.run(play())


def test_a_deletion_ends_when_the_template_is_registered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgetting, "FIRST_PAUSE", 0.001)

    async def play() -> None:
        cluster = make_lasting()
        template = forget(cluster)
        forgets(cluster)
        cluster.answer("denoise", 0, wire.Forgotten(template.id, ("remote",)))
        again = cluster.register_template()
        await asyncio.sleep(0.05)
        assert again.id == template.id not in cluster.library.forgetting
        assert forgets(cluster) == []

    asyncio.run(play())


def test_deletions_that_an_earlier_server_left_are_taken_up() -> None:
    cluster = make_lasting()
    order = cluster.naming.template_order_of(make_order())
    head = cluster.naming.head_of(order.id, order, cluster.workers[0])
    assert head
    cluster.answer("denoise", 0, wire.Listed(head.model, (), (head,)))
    assert [message.template for message in forgets(cluster)] == [head]
    [ticket] = cluster.accept(make_order())
    assert ticket._entry.mode is ComputeMode.OWN


def test_without_any_worker_a_deletion_is_pending() -> None:
    async def play() -> None:
        cluster = make_lasting()
        template = cluster.register_template()
        cluster.kill("denoise")
        cluster.coordinator.forget(template)
        assert not await cluster.library.forgetting.until_done(template.id, 0.01)

    asyncio.run(play())


def test_pictures_become_templates_only_if_they_may() -> None:
    for config, fields, num_templates in (
        ({}, {}, 1),
        ({}, {"may_store": False}, 0),
        ({"auto_register": False}, {}, 0),
    ):
        cluster = FakeCluster(**config)
        cluster.open()
        cluster.accept(make_order(**fields))
        cluster.run()
        assert len(prepared_templates(cluster)) == num_templates
    assert cluster.ask_for_template().entries, "a client may still ask for one"


def test_an_edit_that_may_not_store_uses_a_template_but_does_not_register_it_again() -> None:
    cluster = FakeCluster()
    cluster.open()
    cluster.edit_and_register(make_order())
    [ticket] = cluster.accept(make_order(may_store=False))
    assert ticket._entry.mode is ComputeMode.CACHED
    cluster.prepare()
    [message] = cluster.take("denoise")
    [job] = message.jobs
    cluster.answer("denoise", 0, wire.Missing(job.id, job.attempt, job.template.id))
    assert prepared_templates(cluster) == []
    assert ticket._entry.mode is ComputeMode.OWN
    assert "may not store" in ticket._entry.why_dense


def test_an_edit_under_way_does_not_bring_a_deleted_template_back() -> None:
    cluster = FakeCluster()
    cluster.open()
    template = cluster.register_template()
    cluster.accept(make_order())
    cluster.coordinator.forget(template)
    cluster.run()
    assert prepared_templates(cluster) == []
    assert cluster.library.templates == {}


def test_a_client_that_asks_for_an_unasked_template_keeps_it_from_expiring() -> None:
    cluster = FakeCluster()
    cluster.open()
    cluster.accept(make_order())
    cluster.run()
    cluster.prepare()
    [register] = [message for _, message in cluster.sent if isinstance(message, wire.Register)]
    assert not register.is_asked_for
    cluster.register()
    template = cluster.ask_for_template()
    [claim] = cluster.take("denoise")
    assert (type(claim), claim.template.id) == (wire.Keep, template.id)
    cluster.ask_for_template()
    assert cluster.take("denoise") == []
    cluster.coordinator.forget(template)
    cluster.take("denoise")
    cluster.ask_for_template()
    cluster.prepare()
    [register] = cluster.take("denoise")
    assert register.is_asked_for
