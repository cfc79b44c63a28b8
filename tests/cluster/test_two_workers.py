"""Two real workers without a disk: a ready template is used by both, and both make the same picture."""

from pathlib import Path

from helpers.clusters import TENANT, Run, are_equal, edit, make_config, make_order, pictures, register, until

from instgenie.cluster.cluster import Cluster
from instgenie.cluster.orders import Finished


def test_edits_of_a_ready_template_use_it_on_every_worker(
    run: Run, folders: dict[str, Path], environment: None
) -> None:
    async def play() -> None:
        two = {"devices": ("cpu", "cpu"), "policy": "round_robin", "batching": "static"}
        cluster = Cluster(make_config(folders["sd"], **two))
        await cluster.start()
        await until(lambda: all(worker.is_ready for worker in cluster.workers))
        order = make_order(7, picture_seed=90)
        await register(cluster, TENANT, order)
        events = [event for _ in range(4) for event in await edit(cluster, make_order(7, picture_seed=90))]
        found = [event.facts for event in events if isinstance(event, Finished)]
        assert {one.worker for one in found} == {0, 1}
        assert [(one.cache_tier, one.why_dense) for one in found] == [("host", "")] * 4
        assert are_equal(pictures(events), pictures(events[:1] * 4))
        assert all(worker.templates for worker in cluster.status().workers)
        [status] = cluster.templates(TENANT)
        assert status.state == "ready"
        assert await cluster.stop(60)

    run(play())
