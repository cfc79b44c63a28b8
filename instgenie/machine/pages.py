"""Pages of main memory, straight from the system. With a CUDA device they can be locked, so that the device reads them
directly."""

import contextlib
import ctypes
import logging
import mmap
import weakref

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def map_pages(num_bytes: int) -> ctypes.Array[ctypes.c_uint8]:
    """Fresh pages of the system's. They go back to the system with the last view of them; an allocator would keep some
    of the freed ones, as much again as half of a small tier."""
    pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return (ctypes.c_uint8 * len(pages)).from_buffer(pages)  # must be freed before the pages


@torch.inference_mode(False)
def empty_pages(num_bytes: int) -> Tensor:
    return torch.frombuffer(map_pages(num_bytes), dtype=torch.uint8)[:num_bytes]


@torch.inference_mode(False)
def lock_pages(num_bytes: int) -> Tensor:
    """Page-locked memory of exactly this size, which torch's own allocator would round up to a power of two. It stays
    locked as long as a tensor views it. If the system refuses to lock it, loading from it is slower."""
    viewed = map_pages(num_bytes)
    memory = torch.frombuffer(viewed, dtype=torch.uint8)
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if status:
        logger.warning("%d bytes of main memory cannot be page-locked (CUDA error %d)", num_bytes, status)
        forget_error()
    else:
        weakref.finalize(
            viewed, unlock_pages, memory.data_ptr()
        ).atexit = False  # the end of the process unlocks them anyway
    return memory[:num_bytes]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of main memory that nobody writes to, on a device; nothing waits for the copy."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def forget_error() -> None:
    """Launch a kernel here, because CUDA reports its last error once more at the next launch."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def unlock_pages(address: int) -> None:
    """Unlock pages before they are freed; else a device would go on reading the old pages at this address."""
    torch.cuda.synchronize()  # copies from these pages may be under way
    torch.cuda.cudart().cudaHostUnregister(address)
