"""Writing to lasting tiers beside all other work: every tier gets every template, and nobody waits for a slow one."""

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from helpers.spans import (
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

from instgenie.cache import writer
from instgenie.cache.disk import DiskTier
from instgenie.cache.host import HostTier
from instgenie.cache.remote import RemoteTier
from instgenie.cache.store import Lookup, Store
from instgenie.errors import CacheError
from instgenie.jobs.activations import Key, Span

OTHER = other_key(1)


class SlowRemote(RemoteTier):
    """Waits with every upload until `may_store` is set; `is_gone` makes uploads fail."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"file://{folder}", GIB)
        self.may_store, self.is_asked = threading.Event(), threading.Event()
        self.is_gone = False

    def store(self, key: Key, span: Span) -> None:
        self.is_asked.set()
        assert self.may_store.wait(60)
        if self.is_gone:
            raise CacheError("the server is gone")
        super().store(key, span)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[SlowRemote]:
    remote = SlowRemote(tmp_path / "remote")
    yield remote
    remote.may_store.set()


def offer(store: Store, key: Key, seed: int = 0) -> list[bool]:
    return [store.offer(key, span) for span in make_spans(seed)]


def wait_for(store: Store, key: Key) -> None:
    for _ in range(600):
        if store.remote and not store.remote.missing(key, SPANS):
            return
        time.sleep(0.1)
    raise AssertionError("the template was not written within 60 s")


def test_a_remote_tier_alone_keeps_templates(remote: RemoteTier) -> None:
    store = Store(host=HostTier(GIB), remote=remote)
    put(store, KEY)
    store.put_picture(KEY, make_picture())
    store.close()
    other = Store(host=HostTier(GIB), remote=remote)
    assert other.pictures() == {KEY: (24, 32)}
    found = other.get(KEY)
    assert found
    assert (found.tier, equal(found.span, whole())) == ("remote", True)


def test_the_remote_tier_gets_all_that_the_disk_gets(disk: DiskTier, remote: RemoteTier) -> None:
    for store in (Store(host=HostTier(GIB), disk=disk, remote=remote), Store(disk=disk, remote=remote)):
        put(store, KEY)
        store.put_picture(KEY, make_picture())
        store.settle()
        for tier in (disk, remote):
            assert tier.missing(KEY, SPANS) == []
            assert np.array_equal(tier.load_picture(KEY), make_picture())
        store.forget(KEY)


def test_offers_do_not_wait_for_a_slow_tier_and_nothing_is_lost(slow: SlowRemote) -> None:
    store = Store(host=HostTier(SLOT), remote=slow)
    assert offer(store, KEY) == [True, True]
    assert slow.is_asked.wait(60)
    assert offer(store, OTHER, 1) == [False, False], "memory is full of what is not yet written"
    assert not store.has_room(OTHER, SLOT)
    assert is_found(store, KEY)
    slow.may_store.set()
    store.settle()
    assert store.has_room(OTHER, SLOT)
    assert offer(store, OTHER, 1) == [True, True]
    store.settle()
    assert is_found(store, KEY)
    assert is_found(store, OTHER, 1)


def test_without_memory_few_spans_wait_to_be_written(slow: SlowRemote, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(remote=slow)
    monkeypatch.setattr(writer, "MAX_QUEUED_BYTES", make_span().num_bytes)
    assert store.offer(KEY, make_span())
    assert slow.is_asked.wait(60)
    assert not store.offer(KEY, make_span(SPANS[1]))
    assert store.writer.is_pending(KEY)
    slow.may_store.set()
    store.settle()
    assert store.offer(KEY, make_span(SPANS[1]))
    store.settle()
    assert is_found(store, KEY)


def test_a_disk_frees_memory_before_a_slow_remote_tier_does(disk: DiskTier, slow: SlowRemote) -> None:
    store = Store(host=HostTier(SLOT), disk=disk, remote=slow)
    put(store, KEY)
    put(store, OTHER, 1)  # waits for the disk, not for the remote tier
    assert disk.missing(KEY, SPANS) == []
    assert store.find(KEY) is Lookup.PENDING
    slow.may_store.set()
    store.settle()
    assert slow.missing(KEY, SPANS) == slow.missing(OTHER, SPANS) == []


def test_a_load_waits_for_memory_that_is_about_to_be_written(disk: DiskTier, slow: SlowRemote) -> None:
    for span in make_spans(1):
        RemoteTier.store(slow, OTHER, span)
    store = Store(host=HostTier(SLOT), remote=slow)
    put(store, KEY)
    handle = store.prefetch(OTHER)
    assert slow.is_asked.wait(60)
    assert not handle.done()
    slow.may_store.set()
    found = handle.result(60)
    assert found
    assert equal(found.span, whole(1))
    store.close()
    assert slow.missing(KEY, SPANS) == []


def test_what_a_tier_did_not_take_is_tried_again(slow: SlowRemote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "FIRST_PAUSE", 0.1)
    slow.may_store.set()
    slow.is_gone = True
    store = Store(host=HostTier(GIB), remote=slow)
    for index in range(2):
        put(store, other_key(index), index)
        store.put_picture(other_key(index), make_picture(index))
    store.settle()
    assert slow.usage().num_templates == 0
    slow.is_gone = False
    for index in range(2):
        wait_for(store, other_key(index))
    store.close()
    assert np.array_equal(slow.load_picture(other_key(1)), make_picture(1))


def test_closing_tries_again_what_failed(slow: SlowRemote) -> None:
    slow.may_store.set()
    slow.is_gone = True
    store = Store(host=HostTier(GIB), remote=slow)
    put(store, KEY)
    store.settle()
    slow.is_gone = False
    store.close()
    assert slow.missing(KEY, SPANS) == []


def test_forgetting_and_reading_do_not_wait_for_the_writes_of_others(tmp_path: Path, slow: SlowRemote) -> None:
    disk = DiskTier(tmp_path / "disk", GIB)
    store = Store(host=HostTier(GIB), disk=disk, remote=slow)
    put(store, OTHER, 1)
    store.put_picture(OTHER, make_picture())
    assert slow.is_asked.wait(60)
    put(store, KEY)
    store.put_picture(KEY, make_picture(2))
    assert np.array_equal(store.picture(KEY), make_picture(2))
    assert store.forget(KEY) == []
    assert store.find(KEY) is Lookup.MISS
    slow.may_store.set()
    store.settle()
    assert store.missing(KEY) == SPANS
    assert slow.missing(KEY, SPANS) == SPANS
    assert is_found(store, OTHER, 1)


def test_memory_holds_no_more_than_its_limit_while_a_tier_is_slow(slow: SlowRemote) -> None:
    store = Store(host=HostTier(2 * SLOT), remote=slow)
    taken = [offer(store, other_key(index), index) for index in range(4)]
    assert taken == [[True, True]] * 2 + [[False, False]] * 2
    assert store.status()["host"].num_bytes == 2 * SLOT
    slow.may_store.set()
    store.close()


@pytest.mark.parametrize("has_memory", [True, False])
def test_nothing_is_written_of_a_template_that_was_forgotten_meanwhile(
    remote: RemoteTier, monkeypatch: pytest.MonkeyPatch, has_memory: bool
) -> None:
    """The writer looks at what is missing, then the template is forgotten, then the writer goes on."""
    is_asked, may_answer = threading.Event(), threading.Event()

    def missing(key: Key, spans: Sequence[range]) -> list[range]:
        is_asked.set()
        assert may_answer.wait(60)
        return list(spans)

    monkeypatch.setattr(remote, "missing", missing)
    store = Store(host=HostTier(GIB) if has_memory else None, remote=remote)
    assert offer(store, KEY) == [True, True]
    store.put_picture(KEY, make_picture())
    assert is_asked.wait(60)
    assert store.forget(KEY) == []
    may_answer.set()
    store.settle()
    assert (remote.usage().num_templates, remote.load_picture(KEY)) == (0, None)
