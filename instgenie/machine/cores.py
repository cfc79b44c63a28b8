"""Cores that this process may use, and those that are near a device. Imports no torch."""

import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")  # of this container
PCI_DEVICES = Path("/sys/bus/pci/devices")
SWITCH_SECONDS = 0.0002


def available_cores() -> int:
    """The number of cores: those the system lets this process run on, or the lesser time its container may take."""
    return int(max(min(len(allowed_cores()), container_cores()), 1))


def allowed_cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def container_cores() -> float:
    """Seconds of processor time per second; infinite without a limit."""
    return min(quota(CGROUP / "cpu.max"), quota(CGROUP / "cpu/cpu.cfs_quota_us", CGROUP / "cpu/cpu.cfs_period_us"))


def quota(*files: Path) -> float:
    """A limit in files that hold, together, the time granted and the period; version 1 of control groups has a file for
    each, version 2 has one for both."""
    try:
        granted, period = (int(word) for file in files for word in file.read_text().split())
    except (OSError, ValueError):  # no such file, or "max"
        return math.inf
    return granted / period if granted > 0 and period > 0 else math.inf


def cores_near(pci_address: str) -> set[int]:
    """The allowed cores on the NUMA node of a PCI device; none if the system does not say."""
    try:
        listed = (PCI_DEVICES / pci_address / "local_cpulist").read_text()
        return allowed_cores() & set(parse_list(listed.strip().split(",")))
    except (OSError, ValueError):
        return set()


def parse_list(parts: Iterable[str]) -> Iterable[int]:
    """Yield the numbers of a list like 0-3,8."""
    for part in parts:
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def switch_threads_soon() -> None:
    """Let threads of this process take turns in a fraction of a millisecond. By default Python lets one run for five:
    the thread that takes steps would wait so long for one that reads LoRAs, several times a step."""
    sys.setswitchinterval(SWITCH_SECONDS)
