"""Main memory that this process may still use. Imports no torch."""

import math
import re
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # of this container
# Files of the two versions of control groups: the limit, what is used of it, and what of that are cached files. A limit
# of version 1 counts the groups below, and so do the lines of its statistics that begin with total_.
VERSION_2 = ("memory.max", "memory.current", "memory.stat", r"(?:in)?active_file")
VERSION_1 = (
    "memory/memory.limit_in_bytes",
    "memory/memory.usage_in_bytes",
    "memory/memory.stat",
    r"total_(?:in)?active_file",
)


def available_memory() -> float:
    """Available bytes: the lesser of the machine's and the container's; infinite where the system does not say."""
    return min(machine_memory(), container_memory())


def machine_memory() -> float:
    found = re.search(r"MemAvailable:\s+(\d+) kB", MEMINFO.read_text()) if MEMINFO.is_file() else None
    return int(found[1]) * 1024 if found else math.inf


def container_memory() -> float:
    return min(group_memory(*VERSION_2), group_memory(*VERSION_1))


def group_memory(limit_file: str, used_file: str, statistics_file: str, cached: str) -> float:
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in (limit_file, used_file))
        files = re.findall(rf"^{cached} (\d+)$", (CGROUP / statistics_file).read_text(), re.MULTILINE)
        return max(limit - used + sum(map(int, files)), 0)  # the kernel drops cached files when memory is needed
    except (OSError, ValueError):  # no limit, or no such file
        return math.inf
