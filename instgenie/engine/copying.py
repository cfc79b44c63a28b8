"""Copies of weights with LoRAs merged into them, for batches whose edits have different LoRAs: each edit's rows are
multiplied by its own copies, so that a step makes no product more than without LoRAs. The weights of the model are
never written to.

Copies are kept in a limited number of bytes; the least recently used go first. A batch whose copies do not all fit has
none: its LoRAs are added as products of low rank.
"""

import logging
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from torch import nn

from instgenie.adapters.applied import AppliedLoras
from instgenie.adapters.copies import CopyPlan, Joined, WeightCopies, find_joined, plan_copies
from instgenie.jobs.job import Job
from instgenie.machine.device_memory import is_out_of_memory

MAX_PLANS = 64

log = logging.getLogger(__name__)


class Copying:
    """The copies of the weights of a network, by set of LoRAs."""

    def __init__(self, max_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self.num_copied = 0  # sets so far
        self._kept: OrderedDict[Hashable, WeightCopies] = OrderedDict()  # by versions and scales
        self._joined: dict[nn.Module, Joined] = {}
        self._plans: dict[frozenset[int], CopyPlan] = {}  # by numbers of the layers that are patched
        self._has_told = False  # True after a batch that did not fit

    @property
    def num_bytes(self) -> int:
        return sum(copies.plan.num_bytes for copies in self._kept.values())

    def settle(self, jobs: Sequence[Job]) -> None:
        """Copy the weights for the LoRAs of the next pass, unless all jobs share one set, which is merged instead. To
        be called before every pass, when nothing is merged."""
        if not self.max_bytes or len({job.loras for job in jobs}) < 2:
            return
        sets = {job.loras: name_of(job.loras) for job in jobs if job.loras and job.loras.layers}
        wanted = {name: self.plan(loras).num_bytes for loras, name in sets.items()}
        if sum(wanted.values()) > self.max_bytes:
            self.refuse(wanted)
            return
        for name in wanted.keys() & self._kept.keys():
            self._kept.move_to_end(name)
        try:
            for loras, name in sets.items():
                if name not in self._kept:
                    self.make_room(wanted[name])
                    self._kept[name] = WeightCopies(self.plan(loras), loras.low_rank)
                    self.num_copied += 1
                loras.merging.kept = weakref.ref(self._kept[name])
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            log.warning("no room to copy weights for LoRAs", extra={"num_bytes": self.num_bytes})
            self._kept.clear()
            self.max_bytes = 0

    def plan(self, loras: AppliedLoras) -> CopyPlan:
        """What is copied for a set. Sets that patch the same layers share a plan."""
        key = loras.low_rank.patched
        if key not in self._plans:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._joined = self._joined or find_joined(loras.numbers)
            self._plans[key] = plan_copies(loras.layers, self._joined, loras.numbers)
        return self._plans[key]

    def make_room(self, num_bytes: int) -> None:
        """Drop the least recently used. Those of the next pass are the last ones, and fit."""
        while self.num_bytes + num_bytes > self.max_bytes:
            self._kept.popitem(last=False)

    def refuse(self, wanted: dict[Hashable, int]) -> None:
        if not self._has_told:
            self._has_told = True
            told = {"num_sets": len(wanted), "num_bytes": sum(wanted.values()), "max_bytes": self.max_bytes}
            log.warning("copies of weights for the LoRAs of a batch exceed the limit: it is slower", extra=told)


def name_of(loras: AppliedLoras) -> Hashable:
    """Sets with the same versions and scales have the same copies; one without a name is known by itself."""
    return loras.names or loras.token
