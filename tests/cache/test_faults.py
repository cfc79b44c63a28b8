"""A store whose tiers are damaged, full, used by many threads, killed or gone: with real processes and a real
S3-compatible server."""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.s3 import URL, Server
from helpers.spans import (
    FILES,
    GIB,
    KEY,
    SLOT,
    SPANS,
    STEPS,
    equal,
    is_found,
    make_span,
    make_spans,
    no_long_files,
    other_key,
    put,
    whole,
)

from instgenie.cache.disk import DiskTier
from instgenie.cache.host import HostTier
from instgenie.cache.remote import RemoteTier
from instgenie.cache.store import Lookup, Store
from instgenie.errors import CacheError

MISS, PENDING, HIT = Lookup.MISS, Lookup.PENDING, Lookup.HIT


def test_damage_in_one_tier_is_repaired_from_the_next(
    disk: DiskTier, remote: RemoteTier, caplog: pytest.LogCaptureFixture
) -> None:
    for span in make_spans():
        disk.store(KEY, span)
        remote.store(KEY, span)
    path = disk._path(KEY, SPANS[1])
    path.write_bytes(path.read_bytes()[:-5] + b"wrong")
    store = Store(host=HostTier(GIB), disk=disk, remote=remote)
    assert is_found(store, KEY)
    assert str(path) in caplog.text


def test_damage_everywhere_is_a_miss(disk: DiskTier, caplog: pytest.LogCaptureFixture) -> None:
    for host in (None, HostTier(GIB)):
        for span in make_spans():
            disk.store(KEY, span)
        path = disk._path(KEY, STEPS)
        path.write_bytes(path.read_bytes()[:-5] + b"wrong")
        store = Store(host=host, disk=disk)
        assert store.find(KEY) is PENDING
        assert store.get(KEY) is None
        assert "checksum" in caplog.text
        assert store.missing(KEY) == [STEPS]
        store.put(KEY, make_span())
        assert is_found(store, KEY)
        store.settle()
        store.forget(KEY)


def test_a_full_disk_is_logged_and_memory_works_on(disk: DiskTier, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(host=HostTier(SLOT), disk=disk)
    with no_long_files():
        put(store, KEY)
        store.settle()
        assert is_found(store, KEY)
        put(store, other_key(1), 1)
        store.settle()
        with pytest.raises(CacheError, match="cannot be written"):
            Store(disk=disk).put(KEY, make_span())
    assert "stays in the host tier alone" in caplog.text
    assert "leaves the host tier and is lost" in caplog.text
    assert (store.find(KEY), is_found(store, other_key(1), 1)) == (MISS, True)
    assert list(disk.folder.iterdir()) == []


def use(store: Store, seed: int, num_turns: int, mistakes: list[str]) -> None:
    """Call the store at random, and collect mistakes."""
    chance = random.Random(seed)
    for _ in range(num_turns):
        index = chance.randrange(6)
        key, action = other_key(index), chance.choice(["put", "get", "get", "prefetch", "find", "status", "forget"])
        if action == "put":
            for span in make_spans(index):
                try:
                    store.put(key, span)
                except CacheError as error:
                    if "no room" not in str(error):
                        mistakes.append(str(error))
        elif action == "get":
            with store.pinned(key):
                found = store.get(key)
                if found and not equal(found.span, whole(index)):
                    mistakes.append(f"template {index} is wrong")
        elif action == "prefetch":
            store.prefetch(key)
        elif action == "find":
            store.find(key)
        elif action == "status":
            store.status()
        elif chance.random() < 0.3:
            store.forget(key)


def test_under_concurrent_load(tmp_path: Path) -> None:
    host, disk = HostTier(2 * SLOT), DiskTier(tmp_path / "disk", int(2.5 * FILES))
    store = Store(host=host, disk=disk, remote=RemoteTier(f"file://{tmp_path}/remote", int(3.5 * FILES)))
    mistakes: list[str] = []
    threads = [threading.Thread(target=use, args=(store, seed, 60, mistakes), daemon=True) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    assert mistakes == []
    store.close()
    assert all(status.num_bytes <= status.max_bytes for status in store.status().values())
    with host.pin(KEY):
        host.reserve(KEY, 2 * SLOT)  # nothing is pinned any more


WORK = """
import os
import signal
import sys
from pathlib import Path
from helpers.spans import FILES, SLOT, other_key, put
from instgenie.cache import disk, format
from instgenie.cache.disk import DiskTier
from instgenie.cache.host import HostTier
from instgenie.cache.remote import RemoteTier
from instgenie.cache.store import Store

folder, point = Path(sys.argv[1]), sys.argv[2]
host = HostTier(SLOT) if point != "rename" else None
remote = RemoteTier(f"file://{folder}/remote", int(9 * FILES))
num_on_disk = 2.5 if point != "rename" else 9
store = Store(host=host, disk=DiskTier(folder / "disk", int(num_on_disk * FILES)), remote=remote)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def write_half(path, data):
    Path(path).parent.mkdir(exist_ok=True)
    with open(path, "wb") as file:
        file.write(data[: len(data) // 2])
    die()


def remove_one(paths):
    for path in paths:
        path.unlink()
        die()


def arm():
    if point == "write":
        format.save_file = lambda tensors, path, header: write_half(path, format.save(tensors, header))
    if point == "fsync":
        os.fsync = die
    if point == "rename":
        os.replace = die
    if point == "evict":
        disk.remove = remove_one
    if point == "upload":
        remote._files.pipe_file = write_half


for index in range(5):
    put(store, other_key(index), index)
    store.settle()
    if index == 2:
        arm()
"""


@pytest.mark.parametrize("point", ["write", "fsync", "rename", "evict", "upload"])
def test_a_killed_process_leaves_a_usable_store(tmp_path: Path, point: str) -> None:
    """Templates found later are whole, and new ones can be stored."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WORK, str(tmp_path), point]
    assert subprocess.run(command, env=environment).returncode == -signal.SIGKILL
    left = {path.parts[-3] for path in tmp_path.glob("*/*/*.partial")}
    assert left == {"write": {"disk"}, "fsync": {"disk"}, "rename": {"disk"}, "upload": {"remote"}}.get(point, set())
    disk = DiskTier(tmp_path / "disk", int(2.5 * FILES))
    store = Store(host=HostTier(GIB), disk=disk, remote=RemoteTier(f"file://{tmp_path}/remote", 9 * FILES))
    are_there = [not store.missing(other_key(index)) for index in range(5)]
    assert all(are_there[:3])
    for index, is_there in enumerate(are_there):
        assert is_found(store, other_key(index), index) == is_there
        put(store, other_key(index), index)
    store.close()
    assert store.status()["disk"].num_bytes <= disk.max_bytes
    assert not list((tmp_path / "disk").glob("*/*.partial"))
    assert all(is_found(Store(disk=disk, remote=store.remote), other_key(index), index) for index in range(5))


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.kill()


def test_a_store_over_s3_works_on_when_the_server_is_gone(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    def make_store(name: str) -> Store:
        remote = RemoteTier(URL, GIB, server.options, patience=30)
        return Store(host=HostTier(GIB), disk=DiskTier(tmp_path / name, int(1.5 * FILES)), remote=remote)

    store = make_store("one")
    for index in range(3):
        put(store, other_key(index), index)
        store.settle()
    other = make_store("other")
    assert [other.find(other_key(index)) for index in range(3)] == [PENDING] * 3
    assert is_found(other, other_key(0), 0)
    server.kill()
    assert other.find(other_key(0)) is HIT
    assert other.get(other_key(1)) is None
    assert "left alone" in caplog.text
    for index in range(2, 5):
        put(other, other_key(index), index)
        other.settle()
    assert all(is_found(other, other_key(index), index) for index in range(2, 5))
    other.status()
    other.forget(other_key(0))
    other.close()
