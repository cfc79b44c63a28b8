"""A process beside its GPU."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from instgenie.machine import cores
from instgenie.machine.device import stay_near


def test_a_process_stays_on_the_cores_near_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[int, set[int]]] = []
    facts = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(cores, "PCI_DEVICES", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, near: chosen.append((process, near)))
    stay_near(torch.device("cuda", 0))
    stay_near(torch.device("cpu"))
    assert chosen == []
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "local_cpulist").write_text("4-15\n")
    stay_near(torch.device("cuda", 0))
    assert chosen == [(0, {4, 5, 6, 7})]
