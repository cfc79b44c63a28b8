"""LoRAs merged into the weights, while a whole batch shares one set of them: its steps then cost what they cost without
LoRAs, and may run as captured graphs, because weights stay where they are.

The weights that are written over are kept, and put back before anybody else computes, so that a model that was merged
any number of times is bit-identical to one that never was.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from instgenie.adapters.applied import AppliedLoras
from instgenie.jobs.job import Job
from instgenie.kernels.low_rank import add_up
from instgenie.machine.device_memory import available_bytes, is_out_of_memory

MIN_STEPS_LEFT = 4  # of a batch for which merging pays: it reads and writes every patched weight
MIN_STEPS_TOGETHER = 2  # that a batch must have shared its LoRAs, so that batches which change often are left alone

log = logging.getLogger(__name__)


class Merging:
    """What is merged into the weights of a network."""

    def __init__(self, is_on: bool = True) -> None:
        self.is_on = is_on
        self.merged: AppliedLoras | None = None
        self.num_merges = 0
        self._originals: list[tuple[Tensor, Tensor]] = []  # weights, and what they were
        self._last: AppliedLoras | None = None
        self._num_together = 0
        self._refused: AppliedLoras | None = None  # found not to be mergeable; asked again after others

    def settle(self, jobs: Sequence[Job]) -> None:
        """Merge what the jobs of the next pass share, or take out what they do not. To be called before every pass."""
        shared = shared_loras(jobs)
        self._num_together = self._num_together + 1 if shared is self._last else 1
        self._refused = self._refused if shared is self._last else None
        self._last = shared
        if self.merged is not None and shared is not self.merged:
            self.undo()
        if shared is None or self.merged is not None or not self.is_on:
            return
        num_left = max(job.num_steps - job.step for job in jobs)
        if self._num_together < MIN_STEPS_TOGETHER or num_left < MIN_STEPS_LEFT or self._refused is shared:
            return
        if can_merge(shared):
            self.merge(shared)
        else:
            self._refused = shared

    @torch.no_grad()
    def merge(self, loras: AppliedLoras) -> None:
        """Write W + scale * up @ down over the weights, rounded once. Without memory for the originals nothing
        changes."""
        assert self.merged is None
        assert not loras.merging.is_merged
        try:
            for layer, lows in loras.layers.items():
                weight = layer.get_parameter("weight")
                changed = add_up(weight, lows)
                self._originals.append((weight, weight.detach().clone()))
                weight.copy_(changed)
        except (MemoryError, RuntimeError) as error:
            self._put_back()
            if not is_out_of_memory(error):
                raise
            log.warning("no room to merge LoRAs", extra={"num_layers": len(loras.layers)})
            self.is_on = False
            return
        self.merged, loras.merging.is_merged = loras, True
        self.num_merges += 1

    def undo(self) -> None:
        """Put the weights back, if anything is merged. To be called before anybody else computes with them."""
        if self.merged is not None:
            self.merged.merging.is_merged = False
            self.merged = None
            self._put_back()

    @torch.no_grad()
    def _put_back(self) -> None:
        for weight, original in self._originals:
            weight.copy_(original)
        self._originals.clear()


def shared_loras(jobs: Sequence[Job]) -> AppliedLoras | None:
    """The LoRAs of all jobs, if they have the same ones."""
    first = jobs[0].loras if jobs else None
    return first if all(job.loras is first for job in jobs) else None


def can_merge(loras: AppliedLoras) -> bool:
    """True if all layers have weights of plain numbers, since those of low precision would lose what is added, and if
    the originals leave half of the free memory to steps."""
    if not all(isinstance(layer, nn.Linear | nn.Conv2d) for layer in loras.layers):
        return False
    weights = [layer.get_parameter("weight") for layer in loras.layers]
    return not weights or 2 * sum(weight.nbytes for weight in weights) <= available_bytes(weights[0].device)
