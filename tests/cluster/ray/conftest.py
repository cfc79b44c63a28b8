"""One Ray cluster for all tests here. They are skipped where Ray is not installed."""

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from helpers.rays import RayNodes

pytest.importorskip("ray")
logging.setLogRecordFactory(logging.LogRecord)  # Ray's own adds a field to every line of the log


@pytest.fixture(scope="session")
def rays() -> Iterator["RayNodes"]:
    """A head and two nodes with one slot each. A test that kills a node adds another one."""
    from helpers.rays import ray_nodes

    with ray_nodes() as nodes:
        nodes.add()
        nodes.add()
        yield nodes
