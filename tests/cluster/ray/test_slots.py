"""Slots on a real Ray cluster: made, found again, given up and made anew."""

from collections.abc import Iterator

import msgspec
import pytest
import ray
from helpers.rays import RayNodes

from instgenie.cluster.ray.connect import count_slots, join_ray
from instgenie.cluster.ray.names import NodeFacts, slot_name
from instgenie.cluster.ray.slots import find_slots, make_slot, remove_slot

RESOURCES = {"CPU": 0.01, "slot": 0.01}


@pytest.fixture
def joined(rays: RayNodes) -> Iterator[RayNodes]:
    join_ray(rays.address, "slots")
    yield rays
    ray.shutdown()


def test_a_slot_is_made_found_given_up_and_made_anew(joined: RayNodes) -> None:
    rays = joined
    assert count_slots({"slot": 1.0}) == len(rays.nodes)
    index = 77  # of no other test
    for _ in range(2):
        made = make_slot(index, RESOURCES, "00" * 32, {})
        facts = msgspec.json.decode(ray.get(made.facts.remote()), type=NodeFacts)
        assert facts.node in [node.node_id for node in rays.nodes]
        assert facts.available_bytes > 0
        assert find_slots()[index] == made
        remove_slot(index, made)
        with pytest.raises(ValueError, match=slot_name(index)):
            ray.get_actor(slot_name(index))
