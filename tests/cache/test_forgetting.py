"""Templates that are forgotten while a remote tier is away, and templates that expire."""

import os
import time
from pathlib import Path

import pytest
from helpers.spans import GIB, KEY, SPANS, is_found, make_picture, make_spans, other_key, put

from instgenie.cache.disk import DiskTier
from instgenie.cache.host import HostTier
from instgenie.cache.remote import RemoteTier
from instgenie.cache.store import Lookup, Store
from instgenie.machine.backoff import GoneError

OTHER = other_key(1)
HOUR = 3600.0


def fill(store: Store, *keys: int) -> None:
    for index in keys:
        put(store, other_key(index), index)
        store.put_picture(other_key(index), make_picture())
    store.settle()


def take_away(remote: RemoteTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object) -> None:
        raise GoneError("nobody answers")

    monkeypatch.setattr(remote._server, "ask", ask)


@pytest.mark.parametrize("with_disk", [True, False])
def test_a_template_forgotten_during_an_outage_is_not_found_again(
    tmp_path: Path, remote: RemoteTier, monkeypatch: pytest.MonkeyPatch, with_disk: bool
) -> None:
    disk = DiskTier(tmp_path / "disk", GIB) if with_disk else None
    store = Store(host=HostTier(GIB), disk=disk, remote=remote)
    fill(store, 1, 2)
    with monkeypatch.context() as patch:
        take_away(remote, patch)
        assert store.forget(OTHER) == ["remote"]
    stores = [store, Store(disk=disk, remote=remote)] if disk else [store]  # a disk tells the next process
    for one in stores:
        assert one.find(OTHER) is Lookup.MISS
        assert one.get(OTHER) is None
        assert one.missing(OTHER) == SPANS
        assert one.picture(OTHER) is None
        assert set(one.pictures()) == {other_key(2)}
        assert one.tombstones.all() == [OTHER]
    assert remote.missing(OTHER, SPANS) == []
    assert stores[-1].forget(OTHER) == []
    assert remote.missing(OTHER, SPANS) == SPANS
    assert store.tombstones.all() == []
    assert is_found(store, other_key(2), 2)


def test_a_template_that_is_registered_again_is_no_longer_forgotten(
    tmp_path: Path, remote: RemoteTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(host=HostTier(GIB), disk=DiskTier(tmp_path / "disk", GIB), remote=remote)
    fill(store, 1)
    with monkeypatch.context() as patch:
        take_away(remote, patch)
        assert store.forget(OTHER) == ["remote"]
    fill(store, 1)
    assert store.tombstones.all() == []
    assert is_found(Store(host=HostTier(GIB), remote=remote), OTHER, 1)
    assert not (tmp_path / "disk" / "forgotten").exists()


def age(folder: Path, seconds: float) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - seconds,) * 2)


def test_unused_templates_that_nobody_asked_for_expire(tmp_path: Path) -> None:
    disk, remote = DiskTier(tmp_path / "disk", GIB), RemoteTier(f"file://{tmp_path}/remote", GIB)
    earlier = Store(host=HostTier(GIB), disk=disk, remote=remote)
    fill(earlier, 1, 2, 3, 4)
    earlier.put_picture(other_key(2), make_picture(), is_asked_for=True)
    earlier.ask_for(other_key(3))
    earlier.close()
    age(tmp_path, 5 * HOUR)
    store = Store(host=HostTier(GIB), disk=disk, remote=remote)
    store.expiry.is_on = True
    assert is_found(store, other_key(4), 4)  # a use
    assert store.expiry.sweep(time.time() - 6 * HOUR) == set()
    assert store.expiry.sweep(time.time() - 4 * HOUR) == {OTHER.name}
    for tier in (disk, remote):
        gone = [tier.missing(other_key(index), SPANS) == SPANS for index in (1, 2, 3, 4)]
        assert gone == [True, False, False, False]
    assert not (disk.folder / OTHER.name).exists()


def test_templates_in_memory_alone_expire_unless_they_are_in_use() -> None:
    store = Store(host=HostTier(GIB))
    store.expiry.is_on = True
    for index in range(3):
        put(store, other_key(index), index)
    store.ask_for(other_key(0))
    soon = time.time() + HOUR
    with store.pinned(other_key(1)):
        assert store.expiry.sweep(soon) == {other_key(2).name}
    assert store.expiry.sweep(soon) == {OTHER.name}
    assert store.find(other_key(0)) is Lookup.HIT


def test_an_expired_template_leaves_no_trace_and_can_be_put_again(disk: DiskTier) -> None:
    for span in make_spans():
        disk.store(KEY, span)
    assert disk.expire(time.time() + HOUR) == [KEY.name]
    assert list(disk.folder.iterdir()) == []
    store = Store(disk=disk)
    put(store, KEY)
    assert is_found(store, KEY)
