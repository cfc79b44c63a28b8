"""Memory that is left to a process: the machine's, or what a container's control group leaves of it."""

import math
from pathlib import Path

import pytest

from instgenie.machine import memory

GIB = 2**30


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 64 GiB available, whose control groups are in a folder of the test."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable:   {64 * GIB // 1024} kB\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)


def write(folder: Path, **files: object) -> None:
    folder.mkdir(exist_ok=True)
    for name, value in files.items():
        (folder / f"memory.{name}").write_text(f"{value}\n")


def test_without_a_container_the_machine_decides() -> None:
    assert memory.available_memory() == 64 * GIB


def test_a_limit_of_version_2(tmp_path: Path) -> None:
    write(tmp_path, max=8 * GIB, current=6 * GIB, stat=f"anon 7\ninactive_file {GIB}\nactive_file {GIB}")
    assert memory.available_memory() == 4 * GIB


def test_a_limit_of_version_1(tmp_path: Path) -> None:
    """The group's own lines are a part of the totals, and are not counted twice."""
    statistics = f"cache 9\ninactive_file {GIB}\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}"
    write(tmp_path / "memory", limit_in_bytes=8 * GIB, usage_in_bytes=7 * GIB, stat=statistics)
    assert memory.available_memory() == 3 * GIB


def test_no_limit_in_either_version(tmp_path: Path) -> None:
    write(tmp_path, max="max", current=6 * GIB, stat="")
    write(tmp_path / "memory", limit_in_bytes=2**63 - 4096, usage_in_bytes=7 * GIB, stat="")
    assert memory.available_memory() == 64 * GIB


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "meminfo").unlink()
    assert memory.available_memory() == math.inf
