"""Deaths of processes cost a stage, never an edit, unless the edit is what kills them."""

import itertools

import pytest
from helpers.fake_cluster import FakeCluster, events, make_order

from instgenie.cluster.config import Role
from instgenie.cluster.orders import Failed, Finished


@pytest.mark.parametrize("role", ["prepare", "denoise", "finish"])
def test_a_death_costs_its_own_stage(role: Role) -> None:
    cluster = FakeCluster()
    cluster.open()
    [ticket] = cluster.accept(make_order())
    before = {"prepare": [], "denoise": [cluster.prepare], "finish": [cluster.prepare, cluster.denoise]}[role]
    for play in before:
        play()
    [lost] = cluster.take(role)
    cluster.kill(role)
    assert not cluster.sent
    cluster.revive(cluster.process(role))
    others = [sent for sent in cluster.sent if not sent[0].endswith(role)]
    assert not others
    cluster.run()
    finished = events(ticket)[-2]
    assert isinstance(finished, Finished)
    assert finished.facts.num_attempts == 2
    assert lost is not None


def test_an_answer_to_an_abandoned_attempt_is_ignored() -> None:
    cluster = FakeCluster()
    cluster.open()
    [ticket] = cluster.accept(make_order())
    cluster.prepare()
    [old] = cluster.take("denoise")
    cluster.kill("denoise")
    cluster.revive(cluster.process("denoise"))
    cluster.denoised(old.jobs[0])
    assert not cluster.take("finish")
    cluster.denoise()
    cluster.finish()
    assert isinstance(events(ticket)[-2], Finished)


def test_an_edit_moves_to_another_worker_instead_of_waiting_for_a_restart() -> None:
    cluster = FakeCluster(devices=("cpu", "cpu"), policy="requests")
    cluster.open()
    [ticket] = cluster.accept(make_order())
    own = ticket._entry.worker
    cluster.prepare(own)
    cluster.kill("denoise", own)
    cluster.denoise(1 - own)
    cluster.finish(1 - own)
    assert isinstance(events(ticket)[-2], Finished)


def test_an_edit_that_kills_three_processes_fails_alone() -> None:
    cluster = FakeCluster()
    cluster.open()
    poison, *others = [cluster.accept(make_order(seed))[0] for seed in range(4)]
    cluster.prepare()
    num_deaths, sizes = 0, []
    while cluster.entries:
        held = cluster.take("denoise")
        sizes.append(len(held))
        if any(job.id == poison.id for message in held for job in message.jobs):
            cluster.kill("denoise")
            num_deaths += 1
            cluster.revive(cluster.process("denoise"))
        else:
            for message in held:
                cluster.denoised(message.jobs[0])
        cluster.finish()
    assert num_deaths == 3
    assert sizes == [4, 4, 1, 1, 1, 1]  # after the second death one by one
    failed = events(poison)[-2]
    assert isinstance(failed, Failed)
    assert failed.kind == "crashed"
    assert all(isinstance(events(other)[-2], Finished) for other in others)


@pytest.mark.parametrize("role", ["prepare", "finish"])
def test_an_edit_that_kills_prepare_or_finish_fails_alone(role: Role) -> None:
    cluster = FakeCluster(devices=("cpu", "cpu"))
    cluster.open()
    poison, *others = [cluster.accept(make_order(seed))[0] for seed in range(4)]
    cluster.deadly = role, poison.id
    while cluster.entries:
        for worker, play in itertools.product((0, 1), (cluster.prepare, cluster.denoise, cluster.finish)):
            play(worker)
    assert cluster.num_deaths == 3
    failed = events(poison)[-2]
    assert isinstance(failed, Failed)
    assert failed.kind == "crashed"
    assert all(isinstance(events(other)[-2], Finished) for other in others)


def test_deaths_at_other_stages_do_not_add_up() -> None:
    cluster = FakeCluster()
    cluster.open()
    [ticket] = cluster.accept(make_order())
    for role, play in (("prepare", cluster.prepare), ("denoise", cluster.denoise), ("finish", cluster.finish)):
        for _ in range(2):
            cluster.take(role)
            cluster.kill(role)
            cluster.revive(cluster.process(role))
        play()
    finished = events(ticket)[-2]
    assert isinstance(finished, Finished)
    assert finished.facts.num_attempts == 7


def test_edits_fail_if_no_worker_can_start() -> None:
    cluster = FakeCluster()
    [ticket] = cluster.accept(make_order())
    process = cluster.process("prepare")
    process.state, process.message = "failed", "no such model"
    cluster.coordinator.died(process)
    assert events(ticket)[-2:] == [Failed("unavailable", "no such model"), None]
