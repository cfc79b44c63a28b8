"""Names and data that fronts, the controller and the node actors share. They travel through Ray as JSON in bytes; no
request and no tensor is among them."""

from typing import Literal

import msgspec
from msgspec import Struct

from instgenie.machine.version import package_version
from instgenie.scheduling.autoscaler import ScalingConfig

CONTROLLER = "controller"
LEDGER = "ledger"
SECONDS_BETWEEN_REPORTS = 0.5

SlotState = Literal["waiting", "running", "draining", "ending"]


def namespace(cluster: str) -> str:
    """The Ray namespace of a cluster. Versions of this package do not mix: two of them run side by side."""
    return "-".join(filter(None, ("instgenie", cluster, package_version())))


def slot_name(index: int) -> str:
    return f"slot-{index}"


class ClusterSettings(Struct, frozen=True):
    """All that the fronts of a cluster have to agree on."""

    model: str
    config: dict[str, str]  # what processes are started with, for comparison
    resources: dict[str, float]  # that Ray reserves for each slot
    scaling: ScalingConfig
    front_timeout: float  # seconds of silence after which a front counts as gone
    linger: float  # seconds that workers outlive the last front that died

    def differences(self, other: "ClusterSettings") -> list[str]:
        """What differs, for people."""
        ours, theirs = (msgspec.to_builtins(one) for one in (self, other))
        pairs = {name: (ours[name], theirs[name]) for name in ours if name != "config"}
        pairs |= {name: (self.config.get(name), other.config.get(name)) for name in self.config | other.config}
        return [f"{name} is {there}, not {here}" for name, (here, there) in pairs.items() if here != there]


class RayConfig(Struct, frozen=True):
    """How a front joins."""

    address: str  # ray: join a Ray that runs on this machine, or start one; auto, HOST:PORT, ray://HOST:PORT: join
    name: str  # of the cluster
    settings: ClusterSettings


class NodeFacts(Struct, frozen=True):
    """A slot's node, as its actor sees it."""

    node: str  # Ray's id of the node
    address: str  # IP address
    available_bytes: float  # of main memory, now
    num_cores: int
    is_ending: bool = False  # the slot is given up: its processes end

    @property
    def name(self) -> str:
        """For people and labels. Several nodes may have one address."""
        return f"{self.address}-{self.node[:6]}"


class SlotInfo(Struct, frozen=True):
    index: int
    state: SlotState
    facts: NodeFacts | None = None  # None: no node yet
    num_neighbours: int = 1  # slots on the same node, this one among them
    num_drains: int = 0  # times that it began to drain


class FrontReport(Struct, frozen=True):
    """What a front tells the controller, again and again."""

    front: str
    endpoint: str
    seconds: float  # predicted, of all its work if one worker did it
    num_edits: int
    released: tuple[tuple[int, int], ...] = ()  # draining slots on which it has nothing, and their number of drains


class Directive(Struct, frozen=True):
    """What the controller answers."""

    is_known: bool  # False: the front counted as gone, and the processes have dropped its jobs
    slots: tuple[SlotInfo, ...]  # those that exist
    fronts: tuple[str, ...] = ()  # endpoints of all fronts
