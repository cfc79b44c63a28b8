"""The memory of a device: checks before loading that something fits, and names the cause when memory runs out."""

import contextlib
import re
from collections.abc import Iterator

import torch

from instgenie.errors import OutOfMemoryError
from instgenie.machine.memory import available_memory


def check_memory(name: str, num_bytes: int, device: torch.device) -> None:
    available = available_bytes(device)
    if num_bytes > available:
        raise OutOfMemoryError(
            f"the model {name!r} needs {num_bytes / 2**30:.1f} GiB: {device} has {available / 2**30:.1f} GiB available"
        )


def available_bytes(device: torch.device) -> float:
    """Free memory of the device; infinite where the system does not say."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def used_gib(device: torch.device) -> float | None:
    """GiB that tensors have on a GPU; None elsewhere."""
    return round(torch.cuda.memory_allocated(device) / 2**30, 2) if device.type == "cuda" else None


def peak_gib(device: torch.device) -> float | None:
    """The most GiB that tensors had on a GPU since this was last asked; None elsewhere."""
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return round(peak / 2**30, 2)


@contextlib.contextmanager
def memory_guard(what: str) -> Iterator[None]:
    """Turn any sign that memory ran out into an OutOfMemoryError that says for what."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"{what} does not fit into memory: {str(error).splitlines()[0]}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory ran out. torch has a class for this on CUDA; on a CPU only the message says so."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    said = "out of memory|(can't allocate|not enough) memory"
    return isinstance(error, RuntimeError) and bool(re.search(said, str(error)))
