"""Templates: registered, found, lost, registered again, forgotten."""

from helpers.fake_cluster import FakeCluster, events, make_lasting, make_order

from instgenie.cluster import wire
from instgenie.cluster.orders import Finished


def test_the_second_edit_of_a_picture_hits() -> None:
    cluster = FakeCluster()
    cluster.open()
    first, other = (cluster.accept(make_order(picture_seed=seed))[0] for seed in range(2))
    cluster.run()
    cluster.prepare()  # the templates
    cluster.register()
    again = cluster.accept(make_order(seed=9))[0]
    cluster.prepare()
    [message] = cluster.take("denoise")
    assert message.jobs[0].template.id == first._entry.work.template != other._entry.work.template
    cluster.denoised(message.jobs[0])
    cluster.finish()
    tiers = [events(ticket)[-2].facts.cache_tier for ticket in (first, other, again)]  # type: ignore[union-attr]
    assert tiers == [None, None, "host"]


def test_an_edit_stays_cached_though_its_activations_are_lost() -> None:
    cluster = FakeCluster()
    cluster.open()
    template = cluster.register_template()
    assert template.state == "ready"
    [ticket] = cluster.accept(make_order())
    cluster.prepare()
    cluster.take("denoise")
    cluster.kill("denoise")
    assert template.state == "queued"
    cluster.revive(cluster.process("denoise"))
    assert not [m for m in cluster.take("denoise") if isinstance(m, wire.Denoise)]
    cluster.prepare()
    [register] = [message for _, message in cluster.sent if isinstance(message, wire.Register)]
    assert register.is_urgent
    cluster.register()
    cluster.denoise()
    cluster.finish()
    finished = events(ticket)[-2]
    assert isinstance(finished, Finished)
    assert finished.facts.cache_tier == "host"


def test_activations_that_are_gone_by_the_time_a_job_comes() -> None:
    cluster = FakeCluster()
    cluster.open()
    cluster.register_template()
    [ticket] = cluster.accept(make_order())
    cluster.prepare()
    [message] = cluster.take("denoise")
    [job] = message.jobs
    cluster.answer("denoise", 0, wire.Missing(job.id, job.attempt, job.template.id))
    cluster.prepare()
    cluster.register()
    cluster.denoise()
    cluster.finish()
    assert isinstance(events(ticket)[-2], Finished)


def test_shared_activations_that_turn_out_to_be_damaged() -> None:
    cluster = make_lasting()
    template = cluster.register_template()
    cluster.kept(template.id, disk=900)
    [ticket] = cluster.accept(make_order())
    cluster.prepare()
    [message] = cluster.take("denoise")
    [job] = message.jobs
    cluster.answer("denoise", 0, wire.Missing(job.id, job.attempt, template.id))
    assert not cluster.take("denoise")  # it is registered first
    cluster.prepare()
    cluster.register()
    cluster.denoise()
    cluster.finish()
    finished = events(ticket)[-2]
    assert isinstance(finished, Finished)
    assert finished.facts.cache_tier == "host"


def test_a_template_that_does_not_fit_leaves_its_edits_dense() -> None:
    cluster = FakeCluster()
    cluster.open()
    template = cluster.register_template()
    [ticket] = cluster.accept(make_order())
    cluster.kill("denoise")
    cluster.revive(cluster.process("denoise"))
    cluster.prepare()
    [register] = [m for m in cluster.take("denoise") if isinstance(m, wire.Register)]
    failed = wire.JobFailed(register.id, register.attempt, "out_of_memory", "too large")
    cluster.answer("denoise", 0, failed)
    assert (template.state, template.message) == ("failed", "too large")
    cluster.denoise()
    cluster.finish()
    finished = events(ticket)[-2]
    assert isinstance(finished, Finished)
    assert finished.facts.cache_tier is None


def test_forgotten_templates_are_not_used() -> None:
    cluster = FakeCluster()
    cluster.open()
    template = cluster.register_template()
    cluster.coordinator.forget(template)
    [forget] = [message for message in cluster.take("denoise") if isinstance(message, wire.Forget)]
    assert (forget.template.id, forget.template.tenant) == (template.id, "me")
    [ticket] = cluster.accept(make_order())
    assert ticket._entry.template is None


def test_shared_tiers_outlive_a_worker() -> None:
    cluster = make_lasting(devices=("cpu", "cpu"))
    template = cluster.ask_for_template()
    [holder] = template.entries
    cluster.prepare(holder)
    cluster.register(holder)
    assert template.status().tier_bytes == {"host": 1000}
    assert [template.id in worker.load.templates for worker in cluster.workers].count(True) == 1
    cluster.kept(template.id, holder, host=1000, disk=900)
    cluster.kept(template.id, 1 - holder, host=1000, disk=900)
    assert template.status().tier_bytes == {"host": 2000, "disk": 900}
    assert all(template.id in worker.load.templates for worker in cluster.workers)
    cluster.kill("denoise", holder)
    assert (template.state, template.status().tier_bytes) == ("ready", {"host": 1000, "disk": 900})
    cluster.kept(template.id, 1 - holder)
    assert template.state == "failed"
    assert not any(template.id in worker.load.templates for worker in cluster.workers)


def test_the_router_knows_the_fastest_tier_of_a_template_at_each_worker() -> None:
    cluster = make_lasting(devices=("cpu", "cpu"))
    template = cluster.ask_for_template()
    [holder] = template.entries
    here, there = cluster.workers[holder].load.templates, cluster.workers[1 - holder].load.templates
    cluster.prepare(holder)
    cluster.register(holder)
    assert (here, there) == ({template.id: "host"}, {})
    cluster.kept(template.id, holder, gpu=1000, host=1000, disk=900, remote=900)
    assert (here, there) == ({template.id: "gpu"}, {template.id: "disk"})
    cluster.kept(template.id, 1 - holder, host=1000, remote=900)
    assert (here, there) == ({template.id: "gpu"}, {template.id: "host"})
    cluster.kill("denoise", holder)
    assert (here, there) == ({template.id: "remote"}, {template.id: "host"})
    cluster.coordinator.forget(template)
    assert (here, there) == ({}, {})


def test_a_worker_that_was_down_forgets_when_it_is_back() -> None:
    cluster = make_lasting(devices=("cpu", "cpu"))
    template = cluster.ask_for_template()
    [holder] = template.entries
    cluster.prepare(holder)
    cluster.register(holder)
    cluster.kill("denoise", holder)
    cluster.coordinator.forget(template)
    assert [type(message) for message in cluster.take("denoise", 1 - holder)] == [wire.Cancel, wire.Forget]
    cluster.answer("denoise", 1 - holder, wire.Forgotten(template.id))
    [ticket] = cluster.accept(make_order())
    assert ticket._entry.template is None  # though it is still there
    cluster.revive(cluster.process("denoise", holder))
    [forget] = [message for message in cluster.take("denoise", holder) if isinstance(message, wire.Forget)]
    assert forget.template.id == template.id
    cluster.answer("denoise", holder, wire.Forgotten(template.id))
    [ticket] = cluster.accept(make_order())
    assert ticket._entry.template == template.id  # to be looked for
