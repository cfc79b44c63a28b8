"""The host tier: templates in main memory. Where there is a CUDA device the pages are locked, so that it can read them
by itself."""

import contextlib
import logging
import mmap
import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from instgenie.activations import Key
from instgenie.cache.memory import MemoryTier, Slot

logger = logging.getLogger(__name__)


class HostTier(MemoryTier):
    name = "host"

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        weakref.finalize(self, unlock_all, self._slots).atexit = False  # the end of the process does it by itself

    def _allocate(self, num_bytes: int) -> Tensor:
        return lock_pages(num_bytes) if torch.cuda.is_available() else empty(num_bytes)

    def _release(self, memory: Tensor) -> None:
        unlock_pages(memory)


@torch.inference_mode(False)
def empty(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


@torch.inference_mode(False)
def lock_pages(num_bytes: int) -> Tensor:
    """Page-locked memory of that very size: torch's own would round it up to a power of two. The pages are nobody
    else's; where the system does not allow to lock them, loading from them is slower and no more."""
    pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the pages as long as anything views them
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if status:
        logger.warning("%d bytes of the host tier cannot be page-locked (CUDA error %d)", num_bytes, status)
        forget_error()
    return memory[:num_bytes]


def forget_error() -> None:
    """CUDA reports the last error once more at the next launch, whoever's that is: let it be this one."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def unlock_pages(memory: Tensor) -> None:
    """Before they go back to the system: a device would go on reading the old ones under the same address."""
    if torch.cuda.is_available() and memory.is_pinned():
        torch.cuda.synchronize()  # copies out of it may be under way
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def unlock_all(slots: Mapping[Key, Slot]) -> None:
    for slot in slots.values():
        unlock_pages(slot.memory)
