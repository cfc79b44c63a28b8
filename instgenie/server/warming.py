"""Registers the example pictures ahead, so that the first edit of one finds its activations. Workers do it in idle
time, one picture after the other, for the public tenant once the server is ready, and for a tenant with a key when its
page is opened. Only for the built-in model, which the examples are made for."""

import asyncio
from contextlib import suppress

from instgenie.cluster.cluster import Cluster
from instgenie.cluster.orders import TemplateStatus
from instgenie.errors import InstGenieError
from instgenie.pictures.cropping import Canvas, choose_box
from instgenie.pictures.examples import EXAMPLES, Example, read_examples
from instgenie.pictures.fitting import crop
from instgenie.types import Pixels

SECONDS_BETWEEN_LOOKS = 0.5


class Warming:
    def __init__(self, cluster: Cluster, is_wanted: bool) -> None:
        self.cluster = cluster
        self.is_on = is_wanted and cluster.config.reuse and cluster.config.model == "builtin"
        self.num_ready: dict[str, int] = {}  # by tenant
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by tenant
        self._parts: list[Pixels] = []  # what edits of the examples compute

    def start(self, tenant: str) -> None:
        """Begin to register the examples for a tenant; a second call does nothing."""
        if self.is_on and self.cluster.ready and tenant not in self._tasks:
            self.num_ready[tenant] = 0
            self._tasks[tenant] = asyncio.create_task(self._register(tenant))

    def progress(self, tenant: str) -> dict[str, int] | None:
        """Return how many of the tenant's examples are ready; None if none are being registered."""
        task = self._tasks.get(tenant)
        if task is None or task.done():
            return None
        return {"num_ready": self.num_ready[tenant], "num": len(self._parts)}

    def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _register(self, tenant: str) -> None:
        with suppress(InstGenieError):  # the server closes, or has no room: edits do without
            self._parts = self._parts or await asyncio.to_thread(self._read_parts)
            for part in self._parts:
                self.cluster.check_quota(tenant)
                status: TemplateStatus | None = await self.cluster.register(tenant, part)
                while status and status.state not in ("ready", "failed"):
                    await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
                    status = self.cluster.template(tenant, status.id)
                self.num_ready[tenant] += 1

    def _read_parts(self) -> list[Pixels]:
        facts = self.cluster.model_facts
        assert facts is not None, "a cluster that is ready knows its model"
        canvas = Canvas(facts.size_multiple, facts.own_size)
        return [edited_part(example, canvas) for example in read_examples(EXAMPLES)]


def edited_part(example: Example, canvas: Canvas) -> Pixels:
    """What an edit of the example computes: a crop around the mask of a large photograph, else all of it."""
    box = choose_box(example.mask, canvas, "auto")
    return crop(example.picture, box).copy() if box else example.picture  # lets go of the photograph
