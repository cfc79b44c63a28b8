"""Main memory of this machine. Imports no torch."""

import math
import re
from pathlib import Path

MEMINFO = Path("/proc/meminfo")


def available_memory() -> float:
    """Bytes; infinite where the system does not say."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", MEMINFO.read_text()) if MEMINFO.is_file() else None
    return int(found[1]) * 1024 if found else math.inf
