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
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from instgenie.adapters.applied import AppliedLoras
from instgenie.adapters.copies import Joined, WeightCopies, find_joined, padded_bytes
from instgenie.jobs.job import Job
from instgenie.machine.device_memory import is_out_of_memory

log = logging.getLogger(__name__)


class CopyPlan(NamedTuple):
    groups: tuple[Joined, ...]
    num_bytes: int


class Copying:
    """The copies of the weights of a network, by set of LoRAs."""

    def __init__(self, max_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self.num_copied = 0  # sets so far
        self._kept: OrderedDict[Hashable, WeightCopies] = OrderedDict()  # by versions and scales
        self._joined: dict[nn.Module, Joined] = {}
        self._plans: WeakKeyDictionary[AppliedLoras, CopyPlan] = WeakKeyDictionary()
        self._refused: frozenset[Hashable] = (
            frozenset()
        )  # sets of the last batch that was too large, which is told once

    @property
    def num_bytes(self) -> int:
        return sum(copies.num_bytes for copies in self._kept.values())

    def settle(self, jobs: Sequence[Job]) -> None:
        """Copy the weights for the LoRAs of the next pass, unless all jobs share one set, which is merged instead. To
        be called before every pass, when nothing is merged."""
        sets = {name_of(job.loras): job.loras for job in jobs if job.loras and job.loras.layers}
        if not self.max_bytes or not sets or len({job.loras for job in jobs}) < 2:
            return
        wanted = {name: self.plan(one).num_bytes for name, one in sets.items()}
        if sum(wanted.values()) > self.max_bytes:
            self.refuse(wanted)
            return
        for name in wanted:
            if name in self._kept:
                self._kept.move_to_end(name)
        try:
            for name, loras in sets.items():
                if name not in self._kept:
                    self.make_room(wanted[name])
                    self._kept[name] = WeightCopies(self.plan(loras).groups, loras.low_rank, loras.numbers)
                    self.num_copied += 1
                loras.merging.kept = weakref.ref(self._kept[name])
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            log.warning("no room to copy weights for LoRAs", extra={"num_bytes": self.num_bytes})
            self._kept.clear()
            self.max_bytes = 0

    def plan(self, loras: AppliedLoras) -> CopyPlan:
        """What is copied for a set; found once."""
        if loras not in self._plans:
            self._joined = self._joined or find_joined(list(loras.numbers))
            groups = dict.fromkeys(self._joined[layer] for layer in loras.layers if layer in self._joined)
            self._plans[loras] = CopyPlan(tuple(groups), sum(map(padded_bytes, groups)))
        return self._plans[loras]

    def make_room(self, num_bytes: int) -> None:
        """Drop the least recently used. Those of the next pass are the last ones, and fit."""
        while self.num_bytes + num_bytes > self.max_bytes:
            self._kept.popitem(last=False)

    def refuse(self, wanted: dict[Hashable, int]) -> None:
        if wanted.keys() != self._refused:
            self._refused = frozenset(wanted)
            told = {"num_sets": len(wanted), "num_bytes": sum(wanted.values()), "max_bytes": self.max_bytes}
            log.info("weights of their own for the LoRAs of a batch exceed the limit", extra=told)


def name_of(loras: AppliedLoras) -> Hashable:
    """Sets with the same versions and scales have the same copies; one without a name is known by itself."""
    return loras.names or loras.token
