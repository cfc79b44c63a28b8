"""The host tier: templates in main memory. With a CUDA device the pages are locked, so that the device can read them
directly."""

import torch
from torch import Tensor

from instgenie.cache.memory import MemoryTier
from instgenie.machine.pages import empty_pages, lock_pages


class HostTier(MemoryTier):
    name = "host"

    def _allocate(self, num_bytes: int) -> Tensor:
        return lock_pages(num_bytes) if torch.cuda.is_available() else empty_pages(num_bytes)
