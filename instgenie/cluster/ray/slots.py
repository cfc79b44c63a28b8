"""Slots as Ray knows them: a placement group and a node actor each, both detached and of one name in the cluster's
namespace, so that a controller that was restarted finds them again. The calls here may take a moment."""

from contextlib import suppress
from typing import Any

import ray
from ray.util import get_placement_group, list_named_actors, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from instgenie.cluster.ray.names import slot_name
from instgenie.cluster.ray.node import NodeActor

CORES, GPUS, MEMORY = "CPU", "GPU", "memory"
NUM_CALLS = 1000  # that an actor takes at once: fronts wait for the end of processes in calls


def make_slot(index: int, resources: dict[str, float], secret: str, environment: dict[str, str]) -> Any:
    """Reserve the resources of a slot, and return its actor. Ray starts it once a node has room; a Ray cluster that
    scales itself sees the reservation and adds a node."""
    name = slot_name(index)
    try:
        group = get_placement_group(name)  # a controller that died had made it
    except ValueError:
        group = placement_group([resources], strategy="STRICT_PACK", name=name, lifetime="detached")
    options = {
        "name": name,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": NUM_CALLS,
        "num_cpus": resources.get(CORES, 0),
        "num_gpus": resources.get(GPUS, 0),
        "memory": resources.get(MEMORY),
        "resources": {key: amount for key, amount in resources.items() if key not in (CORES, GPUS, MEMORY)},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, 0),
    }
    num_threads = None if resources.get(GPUS) else max(int(resources.get(CORES, 1)), 1)
    return ray.remote(NodeActor).options(**options).remote(secret, num_threads, environment)


def find_slots() -> dict[int, Any]:
    """The actors of the slots that exist, by index."""
    prefix = slot_name(0).removesuffix("0")
    names = [name for name in list_named_actors() if name.startswith(prefix)]
    return {int(name.removeprefix(prefix)): ray.get_actor(name) for name in names}


def remove_slot(index: int, actor: Any) -> None:
    """End a slot's actor for good, and give its resources back."""
    ray.kill(actor, no_restart=True)
    with suppress(ValueError):  # it is removed already
        remove_placement_group(get_placement_group(slot_name(index)))
