"""Passes of ControlNets captured as CUDA graphs, as `engine.graphs` captures those of the network beside them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary, proxy

import torch
from torch import Tensor

from instgenie.engine.captures import Captures, FixedColumns
from instgenie.models.controlnet import ControlBatch, ControlNet
from instgenie.models.packed import name_columns, walk, with_columns

MAX_GRAPHS = 16  # of one ControlNet: a batch size, a size of pictures or a length of texts is one each


@dataclass(frozen=True, eq=False)
class CapturedControl:
    columns: FixedColumns
    replay: Callable[[], Sequence[Tensor]]


class ControlGraphs:
    """Each ControlNet has fixed tensors, memory and graphs of its own, since several of them run beside each other and
    beside the network. They are gone with the ControlNet.

    The life of residuals: a graph writes them to a fixed place, and its next replay writes over them. So behind each
    replay, on the same stream, they are copied to new memory, and only the copies are handed out. The next pass of the
    ControlNet, of this step or of the next one, then need not wait until somebody has read them. From there on they
    live like residuals that no graph has computed: their memory belongs to the stream of the ControlNet. When nobody
    refers to it any more, the device may still have to read it, but only that stream can use it again, and `Streams`
    first lets it wait for everything that the readers had to do by then. The network waits for the event behind all
    ControlNets of a step before it reads residuals."""

    def __init__(self, device: torch.device, max_graphs: int = MAX_GRAPHS, max_branches: int | None = None) -> None:
        """At most `max_graphs` passes of each ControlNet are kept, of no more branches than given, or than pay off."""
        self.device, self.max_graphs, self.max_branches = device, max_graphs, max_branches
        self._of: WeakKeyDictionary[ControlNet, Captures[CapturedControl]] = WeakKeyDictionary()

    def of(self, net: ControlNet) -> Captures[CapturedControl]:
        if net not in self._of:
            self._of[net] = Captures(self.device, self.max_graphs)
        return self._of[net]

    @property
    def num_captured(self) -> int:
        return sum(len(captures.captured) for captures in self._of.values())

    def run(self, net: ControlNet, batch: ControlBatch) -> Sequence[Tensor]:
        """Make one pass on the current stream, captured or not."""
        if len(batch.sample) > (self.max_branches or net.max_captured):
            return net.run(batch)
        captures, (columns, signature) = self.of(net), walk(batch)
        key = signature, tuple(column.dtype for column in columns)
        found = captures.find_or_capture(key, lambda: capture(captures, net, batch, columns))
        if found is None:
            return net.run(batch)
        found.columns.copy(columns)
        return found.replay()


def capture(
    captures: Captures[CapturedControl], net: ControlNet, batch: ControlBatch, columns: Sequence[Tensor]
) -> CapturedControl:
    fixed = captures.tensors.take_all(name_columns(batch), columns)
    fixed.copy(columns)
    twin, known = with_columns(batch, fixed.tensors), proxy(net)  # what is captured does not keep the ControlNet
    return CapturedControl(fixed, captures.repeatable(lambda: known.run(twin)))


def make_control_graphs(device: torch.device, enabled: bool = True) -> ControlGraphs | None:
    """Graphs on devices that have them, unless they are disabled."""
    return ControlGraphs(device) if enabled and device.type == "cuda" else None
