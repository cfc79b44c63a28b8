"""Which workers have a template in memory, for those that lack it: their addresses, as messages carry them. Knows no
socket: workers copy templates from each other."""

import random
from collections.abc import Mapping, Sequence

from instgenie.cluster.processes import Worker
from instgenie.cluster.templates import TemplateRecord

MAX_NAMED = 4  # peers that a message names


class Peers:
    def __init__(self, workers: Sequence[Worker], templates: Mapping[str, TemplateRecord]) -> None:
        self.workers = workers
        self.templates = templates
        self.map = workers[0].load.peers  # of all workers
        self._random = random.Random(0)
        self._holders: dict[str, frozenset[int]] = {}  # as of the last update, by template

    def addresses(self, name: str | None, worker: int) -> tuple[str, ...]:
        """The addresses of some workers from which a worker can copy a template; none if it has the template."""
        template = self.templates.get(name or "")
        if template is None or worker in template.holders:
            return ()
        serving = self._serving(template)
        chosen = self._random.sample(serving, min(len(serving), MAX_NAMED))  # so that copies are spread
        return tuple(self.workers[index].denoiser.peer_address for index in chosen)

    def update(self, template: TemplateRecord) -> None:
        """Note which workers have a template now."""
        before, now = self._holders.get(template.id, frozenset()), frozenset(self._serving(template))
        if now == before:
            return
        if not now:
            self.forget(template)
            return
        self._holders[template.id] = now
        if now - before:
            self.map.renew(template.id)

    def fail(self, template: TemplateRecord, worker: int) -> None:
        """Note that a worker could not copy a template: it registers the template, until one more worker has it."""
        self.map.fail(template.id, worker)

    def forget(self, template: TemplateRecord) -> None:
        self._holders.pop(template.id, None)
        self.map.drop(template.id)

    def _serving(self, template: TemplateRecord) -> list[int]:
        """Workers that have a template and serve it."""
        return [index for index in template.holders if self.workers[index].denoiser.peer_address]


def host_of(address: str) -> str:
    """The machine at an address; empty: this one."""
    return address.removeprefix("tcp://").rpartition(":")[0] if address.startswith("tcp://") else ""
