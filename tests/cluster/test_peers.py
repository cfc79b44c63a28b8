"""The cluster tells workers which peers hold a template, and what becomes of an edit whose peers fail."""

from helpers.fake_cluster import FakeCluster, events, make_lasting, make_order

from instgenie.cluster import wire
from instgenie.cluster.orders import Finished
from instgenie.cluster.peers import MAX_NAMED
from instgenie.cluster.templates import TemplateRecord


def make_cluster(num_workers: int = 2) -> FakeCluster:
    cluster = FakeCluster(devices=("cpu",) * num_workers, policy="round_robin")
    for worker in cluster.workers:
        worker.denoiser.peer_address = f"tcp://node{worker.index}:1"
    cluster.open()
    return cluster


def register(cluster: FakeCluster) -> tuple[TemplateRecord, int, int]:
    """Register a template. Return it, the worker that has it and the one that an edit then goes to."""
    template = cluster.ask_for_template()
    [holder] = template.entries
    cluster.prepare(holder)
    cluster.register(holder)
    return template, holder, 1 - holder


def accept_on(cluster: FakeCluster, worker: int) -> wire.Denoising:
    """Have an edit denoised on a worker, and return the message."""
    while cluster.accept(make_order())[0]._entry.worker != worker:
        pass
    cluster.prepare(worker)
    *_, message = cluster.take("denoise", worker)
    return message.jobs[-1]


def test_a_worker_that_lacks_a_template_is_told_who_has_it() -> None:
    cluster = make_cluster()
    template, holder, other = register(cluster)
    job = accept_on(cluster, other)
    assert (job.must_reuse, job.peers) == (True, (f"tcp://node{holder}:1",))
    assert (other, job.peers) in [(worker, fetch.peers) for worker, fetch in cluster.fetches]
    assert not template.entries  # nothing is registered again
    cluster.found(job, "peer", other)
    cluster.denoised(job, other)
    cluster.kept(template.id, other, host=1000)
    assert accept_on(cluster, other).peers == ()  # it has the template now
    assert accept_on(cluster, holder).peers == ()


def test_few_peers_are_named() -> None:
    cluster = make_cluster(9)
    template, holder, _ = register(cluster)
    for worker in range(8):
        cluster.kept(template.id, (holder + worker) % 9, host=1000)
    [lacking] = set(range(9)) - template.holders.keys()
    job = accept_on(cluster, lacking)
    assert len(set(job.peers)) == MAX_NAMED
    assert f"tcp://node{lacking}:1" not in job.peers


def test_a_template_that_cannot_be_copied_is_registered_once() -> None:
    cluster = make_cluster()
    template, holder, other = register(cluster)
    job = accept_on(cluster, other)
    cluster.answer("denoise", other, wire.Missing(job.id, job.attempt, template.id))
    assert list(template.entries) == [other]
    cluster.prepare(other)
    cluster.register(other)
    [message] = [one for one in cluster.take("denoise", other) if isinstance(one, wire.Denoise)]
    assert message.jobs[0].peers == ()
    assert template.holders.keys() == {holder, other}


def test_a_dead_peer_is_not_named() -> None:
    cluster = make_cluster(3)
    template, holder, _ = register(cluster)
    second, third = (worker for worker in range(3) if worker != holder)
    cluster.kept(template.id, second, host=1000)
    cluster.kill("denoise", holder)
    assert accept_on(cluster, third).peers == (f"tcp://node{second}:1",)
    cluster.kill("denoise", second)
    assert not cluster.workers[third].load.peers.serves(template.id, third)


def test_a_deleted_template_is_copied_by_nobody() -> None:
    cluster = make_cluster()
    template, _, other = register(cluster)
    load = cluster.workers[other].load
    assert load.peers.serves(template.id, other)
    cluster.coordinator.forget(template)
    assert not load.peers.serves(template.id, other)
    assert cluster.library.peers.addresses(template.id, other) == ()


def test_fetches_are_measured_and_counted() -> None:
    cluster = make_cluster()
    rates = cluster.workers[1].load.fetch_rates
    before = rates.per_byte("peer", 1e-9)
    cluster.answer("denoise", 1, wire.Fetched("peer", 10**9, 100.0))
    assert rates.per_byte("peer", 1e-9) > before


def test_an_edit_finished_with_a_copy_says_so() -> None:
    cluster = make_cluster()
    _, _, other = register(cluster)
    [ticket] = cluster.accept(make_order())
    while ticket._entry.worker != other:
        [ticket] = cluster.accept(make_order())
    cluster.prepare(other)
    for message in cluster.take("denoise", other):
        for job in message.jobs:
            cluster.found(job, "peer", other)
            cluster.answer(
                "denoise",
                other,
                wire.Denoised(job.id, job.attempt, wire.TensorHead("float32", (1,)), 16, 0.2),
                b"\0" * 4,
            )
    cluster.finish(other)
    finished = events(ticket)[-2]
    assert isinstance(finished, Finished)
    assert finished.facts.cache_tier == "peer"
    assert cluster.reporter.cache_hits["peer"] >= 1


def test_a_disk_is_shared_by_the_workers_of_one_host() -> None:
    cluster = make_lasting(devices=("cpu",) * 3)
    for worker, host in zip(cluster.workers, ("one", "one", "two"), strict=True):
        worker.denoiser.peer_address = f"tcp://{host}:{worker.index}"
        cluster.revive(worker.denoiser)
    template = cluster.ask_for_template()
    [holder] = template.entries
    cluster.prepare(holder)
    cluster.register(holder)
    cluster.kept(template.id, holder, host=1000)
    for worker in range(3):
        cluster.kept(template.id, worker, disk=900) if worker < 2 else cluster.kept(template.id, worker, remote=800)
    loads = [worker.load for worker in cluster.workers]
    assert [load.templates[template.id] for load in loads] == ["disk", "disk", "remote"]
    assert template.status().tier_bytes == {"disk": 900, "remote": 800}
    cluster.kept(template.id, 0, remote=800)
    assert [load.templates[template.id] for load in loads] == ["remote"] * 3
    cluster.kept(template.id, 2)
    assert template.state == "failed"
