"""The network of a simulated cluster: nodes, their links, the object store, and templates that move over them.

A link carries one transfer at a time, at its full rate. A worker fetches a template from the source that delivers it
first: the object store, or one of a few peers that have it in memory.
"""

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from instgenie.types import TierName

NUM_SOURCES = 4  # peers that a fetch compares
NODE_MEMORY_RATE = 5e9  # bytes per second between two workers of one node


@dataclass(frozen=True)
class LinkShape:
    workers_per_node: int = 8
    node_rate: float = 12.5e9  # bytes per second of a node, in each direction
    store_rate: float = 50e9  # bytes per second that the object store sends to all nodes together
    store_seconds: float = 0.05  # until the store sends the first byte
    has_peers: bool = True  # False: templates come from the store alone


@dataclass
class Link:
    rate: float  # bytes per second
    free_at: float = 0.0
    num_bytes: float = 0.0  # carried so far

    def carry(self, num_bytes: float, until: float) -> None:
        self.num_bytes += num_bytes
        self.free_at = until

    def use(self, seconds: float) -> float:
        """The share of its capacity that was used in so many seconds."""
        return self.num_bytes / (self.rate * seconds) if seconds > 0 else 0.0


class Network:
    """Links of all nodes, and which worker holds which template."""

    def __init__(self, shape: LinkShape, num_workers: int, template_bytes: float) -> None:
        num_nodes = -(-num_workers // shape.workers_per_node)
        self.shape, self.template_bytes = shape, template_bytes
        self.senders = [Link(shape.node_rate) for _ in range(num_nodes)]
        self.receivers = [Link(shape.node_rate) for _ in range(num_nodes)]
        self.store = Link(shape.store_rate)
        self.holders: dict[str, dict[int, float]] = {}  # by template: the workers, and since when they hold it
        self._random = random.Random(0)

    def fetch(self, template: str, worker: int, now: float) -> float:
        """Bring a template to a worker. Returns the time at which it is there."""
        node = worker // self.shape.workers_per_node
        receiver = self.receivers[node]
        at = max(self.store.free_at, receiver.free_at, now) + self.shape.store_seconds
        best, source = at + self.template_bytes / min(self.store.rate, receiver.rate), self.store
        for peer in self._peers(template, now):
            other = peer // self.shape.workers_per_node
            if other == node:
                return now + self.template_bytes / NODE_MEMORY_RATE
            sender = self.senders[other]
            end = max(sender.free_at, receiver.free_at, now) + self.template_bytes / receiver.rate
            if end < best:
                best, source = end, sender
        # a source goes on with others while a receiver is busy
        source.carry(self.template_bytes, max(source.free_at, now) + self.template_bytes / source.rate)
        receiver.carry(self.template_bytes, best)
        return best

    def _peers(self, template: str, now: float) -> Sequence[int]:
        if not self.shape.has_peers:
            return ()
        held = [worker for worker, since in self.holders.get(template, {}).items() if since <= now]
        return held if len(held) <= NUM_SOURCES else self._random.sample(held, NUM_SOURCES)


@dataclass
class NetworkedMemory:
    """The templates in a worker's memory. Those used least recently are evicted; others come over the network."""

    worker: int
    max_templates: int
    network: Network
    num_hits: int = 0
    num_fetches: int = 0
    _fetched_at: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def keep(self, template: str) -> None:
        """Begin with a template in memory."""
        self._fetched_at[template] = 0.0
        self.network.holders.setdefault(template, {})[self.worker] = 0.0

    def get(self, template: str) -> TierName:
        """The tier in which the worker finds a template: every template is in the store."""
        return "host" if template in self._fetched_at else "remote"

    def use(self, template: str, now: float) -> float:
        """Return the time at which the template is in memory."""
        if template in self._fetched_at:
            self.num_hits += 1
            self._fetched_at.move_to_end(template)
            return max(self._fetched_at[template], now)
        self.num_fetches += 1
        at = self.network.fetch(template, self.worker, now)
        self._fetched_at[template] = at
        self.network.holders.setdefault(template, {})[self.worker] = at
        if len(self._fetched_at) > self.max_templates:
            evicted, _ = self._fetched_at.popitem(last=False)
            del self.network.holders[evicted][self.worker]
        return at
