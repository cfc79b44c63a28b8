"""The environment of a worker's process: where Python finds the package, which device it sees, how many threads compute
and how they wait. A variable that the user has set is left alone."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from instgenie.cluster.config import ProcessConfig
from instgenie.machine.cores import available_cores

PACKAGE_ROOT = Path(__file__).parent.parent.parent
DEVICES = "CUDA_VISIBLE_DEVICES"


class SeenDevice(NamedTuple):
    """A device as its process sees it."""

    name: str
    visible: str | None  # the value of CUDA_VISIBLE_DEVICES; None: as inherited


def process_environment(config: ProcessConfig | None = None) -> dict[str, str]:
    """This process's environment, in which Python finds this very copy of the package, with what a process of this
    configuration needs."""
    paths = [str(PACKAGE_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    made = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    if config is None:
        return made
    visible = seen_device(config.device, os.environ).visible
    has_companion = bool(config.guidance_address)  # which computes as much as its worker
    num_computing = 2 * config.num_workers if has_companion else config.num_workers
    return thread_variables(num_computing) | made | ({} if visible is None else {DEVICES: visible})


def seen_device(device: str, environment: Mapping[str, str]) -> SeenDevice:
    """Let a process see its own device alone: its first CUDA device, or none if it computes on the CPU. So it can take
    no memory of another device, and locks pages for its own. A device that the environment does not offer is left to
    the process, which reports that it does not exist."""
    if device == "cpu":
        return SeenDevice(device, "")
    if not (found := re.fullmatch(r"cuda:(\d+)", device)):
        return SeenDevice(device, None)
    index = int(found[1])
    offered = [id.strip() for id in environment[DEVICES].split(",")] if DEVICES in environment else None
    if offered is not None and index >= len(offered):
        return SeenDevice(device, None)
    return SeenDevice("cuda:0", offered[index] if offered else str(index))


def thread_variables(num_workers: int) -> dict[str, str]:
    """Variables of OpenMP, which torch's threads obey. The workers share the cores evenly. Threads sleep while they
    wait for each other: threads that spin take the cores from the processes beside them."""
    num_threads = max(available_cores() // num_workers, 1)
    return {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "PASSIVE"}
