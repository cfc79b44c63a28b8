"""Which ControlNets are in memory, and where: in processes that all workers share, or in each worker. The router asks
the loads of the workers for it."""

from collections.abc import Sequence

from instgenie.cluster.processes import Process, Worker
from instgenie.cluster.status import ControlNetsStatus
from instgenie.cluster.wire import ControlNetsKept

NOTHING_KEPT = ControlNetsKept((), 0, 0)


def hold_controls(
    process: Process, message: ControlNetsKept, services: Sequence[Process], workers: Sequence[Worker]
) -> None:
    """Note what a process has in memory, and what it took to load the last ones."""
    process.control_versions = message.versions
    process.kept = ControlNetsStatus(len(message.versions), message.num_bytes, message.num_loads)
    if process.role == "controlnet":
        holdings, held = workers[0].load.controls, [version for one in services for version in one.control_versions]
    else:
        holdings, held = workers[process.worker].load.controls, list(message.versions)
    holdings.hold(held)
    for num_bytes, seconds in message.loads:
        holdings.measure(num_bytes, seconds)


def begin_controls(process: Process, services: Sequence[Process], workers: Sequence[Worker]) -> None:
    """Note that a process has just started: if it runs ControlNets, it has none yet."""
    roles = {one.role for one in services}
    if process.role == "controlnet" or (process.role == "denoise" and "controlnet" not in roles):
        hold_controls(process, NOTHING_KEPT, services, workers)
