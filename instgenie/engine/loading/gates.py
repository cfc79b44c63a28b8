"""Gates: points of a pass at which it waits for rows that are still on their way. Knows places and streams; knows no
activations.

The first step of an edit has nothing to hide its loads behind but itself: it computes with its first rows while the
others are being copied. The events are external to captured passes, so a captured pass waits, whenever it runs, for the
copies that were started last.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

NUM_GATES = 8


class Gates:
    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.events = [torch.cuda.Event(external=True) for _ in range(NUM_GATES)] if is_cuda else []
        for event in self.events:
            event.record(torch.cuda.current_stream(device))  # a capture leaves out events that were never recorded

    def open(self, gate: int, stream: torch.cuda.Stream | None) -> None:
        """Open a gate when the stream has done what it is asked to do so far."""
        if stream:
            self.events[gate].record(stream)

    def wait(self, gate: int) -> None:
        if self.events:
            torch.cuda.current_stream().wait_event(self.events[gate])


@dataclass(eq=False)
class Passage:
    """The way of a pass, place after place, through the gates. A pass may begin again."""

    gates: Gates
    ranks: Sequence[int]  # per place, which in turn the pass reads it
    rank: int = -1  # of the last one that was reached

    def reach(self, place: int) -> None:
        """Wait at the gate before a place, unless the pass has come through it."""
        rank, num_places = self.ranks[place], len(self.ranks)
        gate = gate_of(rank, num_places)
        if rank <= self.rank or self.rank < 0 or gate != gate_of(self.rank, num_places):
            self.gates.wait(gate)
        self.rank = rank


def gate_of(rank: int, num_places: int) -> int:
    """The gate that a pass goes through before it reads a place, by its rank; each has as many places behind it."""
    return rank * NUM_GATES // num_places
