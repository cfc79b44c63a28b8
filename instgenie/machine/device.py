"""Memory: whether something fits before it is loaded, and our words for it when it did not after all."""

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
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


@contextlib.contextmanager
def memory_guard(what: str) -> Iterator[None]:
    """Says in our words that memory ran out while working on something."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"{what} does not fit into memory: {str(error).splitlines()[0]}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """torch has a class for it on CUDA and only words for it on a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    said = "out of memory|(can't allocate|not enough) memory"
    return isinstance(error, RuntimeError) and bool(re.search(said, str(error)))
