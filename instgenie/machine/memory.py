"""Main memory that this process may still use. Imports no torch."""

import math
import re
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # a container's own; version 2


def available_memory() -> float:
    """Bytes: what the machine has, or the container, if that is less; infinite where the system does not say."""
    return min(machine_memory(), container_memory())


def machine_memory() -> float:
    found = re.search(r"MemAvailable:\s+(\d+) kB", MEMINFO.read_text()) if MEMINFO.is_file() else None
    return int(found[1]) * 1024 if found else math.inf


def container_memory() -> float:
    try:
        most, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        files = re.findall(r"^(?:in)?active_file (\d+)$", (CGROUP / "memory.stat").read_text(), re.MULTILINE)
        return max(most - used + sum(map(int, files)), 0)  # copies of files are given back when memory is asked for
    except (OSError, ValueError):  # there is no limit, or no such file
        return math.inf
