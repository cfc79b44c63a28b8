"""Main memory that this process may still use. Imports no torch."""

import math
import re
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # of this container, version 2


def available_memory() -> float:
    """Available bytes: the lesser of the machine's and the container's; infinite where the system does not say."""
    return min(machine_memory(), container_memory())


def machine_memory() -> float:
    found = re.search(r"MemAvailable:\s+(\d+) kB", MEMINFO.read_text()) if MEMINFO.is_file() else None
    return int(found[1]) * 1024 if found else math.inf


def container_memory() -> float:
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        files = re.findall(r"^(?:in)?active_file (\d+)$", (CGROUP / "memory.stat").read_text(), re.MULTILINE)
        return max(limit - used + sum(map(int, files)), 0)  # the kernel drops cached files when memory is needed
    except (OSError, ValueError):  # no limit, or no such file
        return math.inf
