"""A disk tier and a remote tier with room for anything."""

from pathlib import Path

import pytest

from instgenie.cache.disk import DiskTier
from instgenie.cache.remote import RemoteTier

GIB = 2**30


@pytest.fixture
def disk(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "disk", GIB)


@pytest.fixture
def remote(tmp_path: Path) -> RemoteTier:
    return RemoteTier(f"file://{tmp_path}/remote", GIB)
