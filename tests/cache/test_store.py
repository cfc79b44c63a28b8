"""The store over its tiers, with real threads."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.serving import wait_for
from helpers.spans import (
    FILES,
    GIB,
    KEY,
    SLOT,
    SPANS,
    equal,
    is_found,
    make_picture,
    make_span,
    make_spans,
    other_key,
    put,
    whole,
)

from instgenie.cache.disk import DiskTier
from instgenie.cache.host import HostTier
from instgenie.cache.remote import RemoteTier
from instgenie.cache.store import Lookup, Store
from instgenie.errors import CacheError
from instgenie.jobs.activations import Key, Span

MISS, PENDING, HIT = Lookup.MISS, Lookup.PENDING, Lookup.HIT


class SlowDisk(DiskTier):
    """Counts loads, and delays them until `may_load` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, GIB)
        self.may_load = threading.Event()
        self.num_loads = 0

    def load(self, key: Key, steps: range) -> Span | None:
        self.num_loads += 1
        assert self.may_load.wait(60)
        return super().load(key, steps)


def test_a_missing_template_is_a_miss(disk: DiskTier, remote: RemoteTier) -> None:
    for store in (Store(), Store(host=HostTier(GIB)), Store(disk=disk), Store(disk=disk, remote=remote)):
        assert store.find(KEY) is MISS
        assert store.get(KEY) is None
        assert store.missing(KEY) == SPANS
        assert store.num_bytes(KEY) == 0
        store.forget(KEY)
    with pytest.raises(CacheError, match="no tiers"):
        Store().put(KEY, make_span())


def test_a_template_is_a_hit_when_all_of_it_is_in_memory() -> None:
    store = Store(host=HostTier(GIB))
    assert store.is_empty
    first, second = make_spans()
    store.put(KEY, first)
    assert (store.find(KEY), store.missing(KEY)) == (MISS, [SPANS[1]])
    assert store.get(KEY) is None
    store.put(KEY, second)
    assert store.find(KEY) is HIT
    assert is_found(store, KEY)
    assert not store.is_empty


def test_spans_are_written_to_disk_after_put(disk: DiskTier) -> None:
    store = Store(host=HostTier(GIB), disk=disk)
    put(store, KEY)
    store.settle()
    other = Store(host=HostTier(GIB), disk=disk)
    assert (other.find(KEY), other.missing(KEY)) == (PENDING, [])
    assert is_found(other, KEY)
    assert other.find(KEY) is HIT


def test_closing_a_store_finishes_its_writes(disk: DiskTier) -> None:
    store = Store(host=HostTier(GIB), disk=disk)
    put(store, KEY)
    store.close()
    assert disk.missing(KEY, SPANS) == []


def test_found_names_the_tier(disk: DiskTier, remote: RemoteTier) -> None:
    for span in make_spans():
        remote.store(KEY, span)
    disk.store(KEY, make_span())
    for span in make_spans():
        disk.store(other_key(1), span)
    store = Store(host=HostTier(GIB), disk=disk, remote=remote)
    tiers = [(found := store.get(key)) and found.tier for key in (KEY, KEY, other_key(1), other_key(2))]
    assert tiers == ["remote", "host", "disk", None]
    assert {name: status.num_hits for name, status in store.status().items()} == {"host": 1, "disk": 1, "remote": 1}


def test_many_requests_load_once(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path / "disk")
    for span in make_spans():
        disk.store(KEY, span)
    for store in (Store(host=HostTier(GIB), disk=disk), Store(disk=disk)):
        disk.may_load.clear()
        disk.num_loads = 0
        handles = [store.prefetch(KEY) for _ in range(8)]
        assert store.find(KEY) is PENDING
        assert not any(handle.done() for handle in handles)
        disk.may_load.set()
        spans = {id(found.span) for handle in handles if (found := handle.result())}
        assert len(spans) == 1
        assert disk.num_loads == len(SPANS)
        assert is_found(store, KEY)
        assert disk.num_loads == len(SPANS)
        wait_for(lambda store=store: store.status()["disk"].num_hits == 8)  # counted behind the results


def test_without_tiers_in_memory_a_template_lives_as_long_as_it_is_held(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path / "disk")
    disk.may_load.set()
    for span in make_spans():
        disk.store(KEY, span)
    store = Store(disk=disk)
    found = store.get(KEY)
    again = store.get(KEY)
    assert found
    assert again
    assert (found.tier, again.tier) == ("disk", "host")
    assert disk.num_loads == len(SPANS)
    del found, again
    again = store.get(KEY)
    assert again
    assert again.tier == "disk"
    store.forget(KEY)
    assert store.get(KEY) is None
    assert equal(again.span, whole())


def test_every_lasting_tier_has_what_higher_tiers_evict(tmp_path: Path) -> None:
    """Nothing is lost as long as a tier has room, and everything can be loaded again."""
    evicted = []
    store = Store(
        host=HostTier(2 * SLOT),
        disk=DiskTier(tmp_path / "disk", int(2.5 * FILES)),
        remote=RemoteTier(f"file://{tmp_path}/remote", int(6.5 * FILES)),
        on_evict=lambda tier, key: evicted.append((tier, key)),
    )
    for index in range(6):
        put(store, other_key(index), index)
        store.settle()
    status = store.status()
    assert [status[name].num_templates for name in ("host", "disk", "remote")] == [2, 2, 6]
    assert [status[name].num_evictions for name in ("host", "disk", "remote")] == [4, 4, 0]
    assert all(tier.num_bytes <= tier.max_bytes for tier in status.values())
    assert evicted[0] in (("host", other_key(0)), ("disk", other_key(0)))
    assert [store.find(other_key(index)) for index in range(6)] == [PENDING] * 4 + [HIT] * 2
    assert all(is_found(store, other_key(index), index) for index in range(6))
    assert store.find(other_key(0)) is PENDING
    assert store.status()["remote"].num_templates == 6


def test_templates_evicted_before_they_are_written_are_not_lost(tmp_path: Path) -> None:
    disk, remote = DiskTier(tmp_path / "disk", int(2.5 * FILES)), RemoteTier(f"file://{tmp_path}/remote", GIB)
    store = Store(host=HostTier(SLOT), disk=disk, remote=remote)
    for index in (*range(8), *range(8)):
        put(store, other_key(index), index)
    store.settle()
    assert [store.missing(other_key(index)) for index in range(8)] == [[]] * 8
    assert all(is_found(store, other_key(index), index) for index in range(8))


def test_a_template_that_fits_nowhere_is_refused_and_evicts_nothing(tmp_path: Path) -> None:
    store = Store(host=HostTier(SLOT), disk=DiskTier(tmp_path / "disk", FILES + 500))
    put(store, KEY)
    large = make_span(num_tokens=200)
    with pytest.raises(CacheError, match=r"host tier has no room .*; .*disk has no room"):
        store.put(other_key(1), large)
    assert is_found(store, KEY)


def test_pinned_templates_stay(disk: DiskTier) -> None:
    store = Store(host=HostTier(2 * SLOT), disk=disk)
    for index in range(2):
        put(store, other_key(index), index)
    store.pin(other_key(0))
    store.pin(other_key(0))
    for index in range(2, 5):
        put(store, other_key(index), index)
        assert store.find(other_key(0)) is HIT
    store.unpin(other_key(0))
    put(store, other_key(5))
    assert store.find(other_key(0)) is HIT
    store.unpin(other_key(0))
    for index in range(2):
        put(store, other_key(6 + index))
    assert store.find(other_key(0)) is PENDING


def test_without_room_in_memory_a_template_is_a_miss(disk: DiskTier, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(host=HostTier(SLOT), disk=disk)
    put(store, KEY)
    for span in make_spans(1):
        disk.store(other_key(1), span)
    with store.pinned(KEY):
        assert store.get(other_key(1)) is None
        assert "no room" in caplog.text
    assert is_found(store, other_key(1), 1)


def test_a_pin_holds_spans_that_are_loaded_later(disk: DiskTier) -> None:
    store = Store(host=HostTier(SLOT), disk=disk)
    for index in range(2):
        for span in make_spans(index):
            disk.store(other_key(index), span)
    with store.pinned(other_key(0)):
        assert is_found(store, other_key(0))
        assert store.get(other_key(1)) is None
        assert store.find(other_key(0)) is HIT


def test_forgotten_templates_are_gone_from_everywhere(disk: DiskTier, remote: RemoteTier) -> None:
    store = Store(host=HostTier(GIB), disk=disk, remote=remote)
    put(store, KEY)
    put(store, other_key(1), 1)
    for span in make_spans():
        remote.store(KEY, span)
    with store.pinned(KEY):
        found = store.get(KEY)
        store.forget(KEY)
        assert store.find(KEY) is MISS
    store.settle()
    assert store.missing(KEY) == SPANS
    assert found
    assert equal(found.span, whole())
    assert is_found(store, other_key(1), 1)


def test_a_template_forgotten_while_loading_does_not_come_back(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path / "disk")
    for span in make_spans():
        disk.store(KEY, span)
    store = Store(host=HostTier(GIB), disk=disk)
    handle = store.prefetch(KEY)
    forgetting = threading.Thread(target=store.forget, args=(KEY,))
    forgetting.start()
    disk.may_load.set()
    forgetting.join(60)
    assert handle.done()
    assert store.find(KEY) is MISS
    assert store.missing(KEY) == SPANS


def test_a_template_forgotten_while_being_written_does_not_come_back(tmp_path: Path) -> None:
    started = threading.Event()

    class SlowlyWritten(DiskTier):
        def store(self, key: Key, span: Span) -> None:
            started.set()
            forgetting.join(0.2)  # `forget` must not return before this store does
            super().store(key, span)

    store = Store(host=HostTier(GIB), disk=SlowlyWritten(tmp_path / "disk", GIB))
    forgetting = threading.Thread(target=store.forget, args=(KEY,))
    put(store, KEY)
    assert started.wait(60)
    forgetting.start()
    forgetting.join(60)
    store.settle()
    assert store.find(KEY) is MISS
    assert store.missing(KEY) == SPANS


def test_no_tenant_finds_the_template_of_another(disk: DiskTier, remote: RemoteTier) -> None:
    store = Store(host=HostTier(GIB), disk=disk, remote=remote)
    mine, theirs = (replace(KEY, tenant=tenant) for tenant in ("mine", "theirs"))
    put(store, mine)
    store.settle()
    for key in (theirs, KEY):
        assert store.find(key) is MISS
        assert store.get(key) is None
    assert is_found(store, mine)


def test_a_picture_goes_where_its_template_goes(tmp_path: Path, remote: RemoteTier) -> None:
    disk = DiskTier(tmp_path / "disk", FILES + 10_000)
    store = Store(disk=disk, remote=remote)
    put(store, KEY)
    store.put_picture(KEY, make_picture())
    assert np.array_equal(store.picture(KEY), make_picture())
    store.settle()
    assert store.pictures() == {KEY: (24, 32)}
    assert np.array_equal(disk.load_picture(KEY), make_picture())
    put(store, other_key(1))  # evicts the first
    assert disk.load_picture(KEY) is None
    assert np.array_equal(remote.load_picture(KEY), make_picture())
    assert store.pictures() == {KEY: (24, 32)}
    assert np.array_equal(store.picture(KEY), make_picture())
    store.forget(KEY)
    assert (store.picture(KEY), store.pictures()) == (None, {})


def test_without_lasting_tiers_no_picture_is_kept() -> None:
    store = Store(host=HostTier(GIB))
    put(store, KEY)
    store.put_picture(KEY, make_picture())
    assert (store.picture(KEY), store.pictures()) == (None, {})
