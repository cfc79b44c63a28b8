"""The gpu tier: templates in the memory of a CUDA device, next to the model that reads them."""

import torch
from torch import Tensor

from instgenie.cache.memory import MemoryTier, pairs
from instgenie.jobs.activations import Span


class GpuTier(MemoryTier):
    """Copies run on a stream of their own, beside the steps of running jobs."""

    name = "gpu"

    def __init__(self, device: torch.device, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.device = torch.device(device.type, device.index or 0)
        self._stream = torch.cuda.Stream(self.device)
        self._out_stream = torch.cuda.Stream(self.device)  # for peers, which wait for no copy to the device

    @torch.inference_mode(False)
    def _allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def _copy(self, source: Span, target: Span) -> None:
        """Copy after the steps under way: the memory may have belonged to an evicted template that they still read."""
        self._stream.wait_stream(torch.cuda.default_stream(self.device))
        self._stream.wait_stream(torch.cuda.current_stream(self.device))  # on which the source was computed
        with torch.cuda.stream(self._stream):
            for one, other in pairs(source, target):
                other.copy_(one, non_blocking=True)
        self._stream.synchronize()

    def copy_out(self, memory: Tensor) -> Tensor:
        """Copy beside the steps under way; the bytes were complete before the block was handed out."""
        with torch.cuda.stream(self._out_stream):
            return memory.cpu()  # waits for this stream alone
