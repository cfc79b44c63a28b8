"""A cluster in front of which the real HTTP application runs, but whose processes answer at once with a given file."""

import asyncio
from collections.abc import Sequence
from typing import Any

from helpers.fake_cluster import FakeCluster
from instgenie.cluster import wire
from instgenie.cluster.cluster import Cluster
from instgenie.cluster.config import ClusterConfig
from instgenie.cluster.entries import Ticket
from instgenie.cluster.orders import Order


class InstantCluster(Cluster):
    def __init__(self, config: ClusterConfig, painted: bytes) -> None:
        super().__init__(config)
        self.fake = FakeCluster(max_queue=config.max_queue)
        self.painted = painted
        self.workers = self.fake.workers
        self._coordinator = self.fake.coordinator
        self._is_open = True
        self.fake.open()

    def submit(self, orders: Sequence[Order], *given: Any) -> list[Ticket]:
        tickets = super().submit(orders, *given)
        asyncio.get_running_loop().call_soon(self.work)
        return tickets

    def work(self) -> None:
        """Do what is asked of all processes; of an edit with partial pictures, send each once."""
        self.fake.prepare()
        for message in self.fake.take("denoise"):
            if isinstance(message, wire.Denoise):
                for job in message.jobs:
                    for index in range(job.num_partials):
                        self.paint(job, index)
                    self.fake.denoised(job)
            elif isinstance(message, wire.Register):
                self.fake.answer("denoise", 0, wire.Registered(message.id, message.attempt, 4, 4, {"host": 1000}))
        while message := self.fake.next("finish", 0):
            self.paint(message, message.partial)

    def paint(self, message: Any, partial: int | None) -> None:
        self.fake.answer("finish", 0, wire.Painted(message.id, message.attempt, partial, 0.1, 0.6), self.painted)
