"""The options for workers on Ray, as far as they need no Ray."""

from typing import Any

import pytest

from instgenie.errors import ConfigError
from instgenie.server.config import read_config
from instgenie.server.nodes import limits, resources
from instgenie.server.options import AUTO


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (3, 3)),  # what the nodes have room for
        ({"workers": 2}, (2, 2)),
        ({"workers": 2, "max_workers": 5}, (2, 5)),
        ({"workers": 2, "min_workers": 1}, (1, 2)),
        ({"max_workers": 5}, (1, 5)),
        ({"min_workers": 2}, (2, 3)),
        ({"min_workers": 4}, (4, 4)),
        ({"min_workers": 1, "max_workers": 8}, (1, 8)),
    ],
)
def test_numbers_of_workers(given: dict[str, int], expected: tuple[int, int]) -> None:
    values: dict[str, Any] = {"workers": AUTO, "min_workers": AUTO, "max_workers": AUTO} | given
    assert limits(values, 3) == expected


def test_the_least_is_at_most_the_most() -> None:
    with pytest.raises(ConfigError, match="--min-workers is 4: at most --max-workers, 2"):
        limits({"workers": AUTO, "min_workers": 4, "max_workers": 2}, 3)


def test_a_cluster_without_nodes_has_one_worker() -> None:
    assert limits({"workers": AUTO, "min_workers": AUTO, "max_workers": AUTO}, 0) == (1, 1)


@pytest.mark.parametrize(("agreed", "expected"), [(None, 3), (2, 2)])
def test_a_front_that_leaves_the_number_open_takes_over_that_of_the_cluster(
    agreed: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = pytest.importorskip("instgenie.cluster.ray.connect")
    monkeypatch.setattr(connect, "join_ray", lambda address, cluster: None)
    monkeypatch.setattr(connect, "agreed_slots", lambda: agreed)
    monkeypatch.setattr(connect, "count_slots", lambda resources: 3)
    config = read_config({"cluster": "ray", "device": "cpu"}, {})
    assert config.ray
    assert config.cluster.devices == ("cpu",) * expected
    assert (config.ray.settings.scaling.min_workers, config.ray.settings.scaling.max_workers) == (expected, expected)


def test_resources_are_a_list() -> None:
    assert resources("GPU=1, CPU=4,rack_b=0.5") == {"GPU": 1.0, "CPU": 4.0, "rack_b": 0.5}
    for wrong in ("", "GPU", "GPU=x", "GPU=0", "=1", "GPU=-1", "GPU=nan"):
        with pytest.raises(ValueError, match="a list like GPU=1,CPU=4"):
            resources(wrong)


@pytest.mark.parametrize("flags", [{"min_workers": "1"}, {"max_workers": "4"}])
def test_scaling_needs_a_cluster(flags: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="needs --cluster"):
        read_config(flags, {})


@pytest.mark.parametrize("address", ["kubernetes", "ray://", "host", "http://host:1"])
def test_an_address_that_is_none_of_ray(address: str) -> None:
    with pytest.raises(ConfigError, match="ray, auto, HOST:PORT or ray://HOST:PORT"):
        read_config({"cluster": address}, {})
