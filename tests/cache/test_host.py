"""Tiers in memory: the host tier on any machine, the gpu tier with a CUDA device."""

import os
import threading
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from helpers.spans import GIB, KEY, SPANS, STEPS, equal, make_span, make_spans, other_key
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from instgenie.cache.gpu import GpuTier
from instgenie.cache.host import HostTier
from instgenie.cache.memory import MemoryTier, step_specs
from instgenie.errors import CacheError
from instgenie.jobs.activations import Key, Span, join

CPU = torch.device("cpu")
SLOT = KEY.num_steps * sum(spec.num_bytes for spec in step_specs(make_span()))  # bytes of a template


def make_tier(name: str, max_bytes: int) -> MemoryTier:
    return GpuTier(torch.device("cuda"), max_bytes) if name == "gpu" else HostTier(max_bytes)


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def tier(request: pytest.FixtureRequest) -> MemoryTier:
    return make_tier(request.param, 2 * SLOT)


def fill(tier: MemoryTier, key: Key, seed: int = 0) -> None:
    for span in make_spans(seed):
        tier.store(key, span)


def test_spans_and_whole_templates_are_views(tier: MemoryTier) -> None:
    assert tier.load(KEY, STEPS) is None
    first, second = make_spans()
    tier.store(KEY, second)
    assert tier.missing(KEY, SPANS) == [STEPS]
    assert tier.load(KEY, KEY.slots) is None
    tier.store(KEY, first)
    assert tier.missing(KEY, [*SPANS, KEY.slots, range(2, 5)]) == []
    whole = tier.load(KEY, KEY.slots)
    assert equal(whole, join(6, make_spans(), CPU))
    again, part = tier.load(KEY, KEY.slots), tier.load(KEY, SPANS[1])
    assert whole
    assert again
    assert part
    assert whole.rows[0].data_ptr() == again.rows[0].data_ptr()
    assert part.rows[0].data_ptr() == whole.rows[0][:, 4:].data_ptr()
    assert equal(part, second)


def test_a_copy_is_kept(tier: MemoryTier) -> None:
    span = make_span()
    tier.store(KEY, span)
    span.rows[0].zero_()
    assert equal(tier.load(KEY, STEPS), make_span())


def test_spans_from_in_and_out_of_inference_mode(tier: MemoryTier) -> None:
    with torch.inference_mode():
        tier.store(KEY, make_span(SPANS[1]))
    tier.store(KEY, make_span())
    assert equal(tier.load(KEY, KEY.slots), join(6, make_spans(), CPU))


def test_the_least_recently_used_template_is_spilled_and_then_evicted(tier: MemoryTier) -> None:
    spilled: list[tuple[Key, bool]] = []
    tier.spill = lambda key: spilled.append((key, equal(tier.load(key, STEPS), make_span())))
    for index in range(2):
        fill(tier, other_key(index))
    tier.load(other_key(0), STEPS)
    fill(tier, other_key(2))
    assert spilled == [(other_key(1), True)]
    assert [len(tier.missing(other_key(index), SPANS)) for index in range(3)] == [0, 2, 0]
    assert (tier.usage().num_templates, tier.usage().num_bytes, tier.num_evictions) == (2, 2 * SLOT, 1)


def test_pinned_templates_stay(tier: MemoryTier) -> None:
    for index in range(2):
        fill(tier, other_key(index))
    with tier.pin(other_key(0)):
        with tier.pin(other_key(1)), tier.pin(other_key(1)):
            with pytest.raises(CacheError, match=r"no room for .* it may hold .* and holds .* 0 bytes of which"):
                tier.store(KEY, make_span())
            assert tier.num_evictions == 0
        fill(tier, KEY)
        assert tier.missing(other_key(0), SPANS) == []
        assert tier.missing(other_key(1), SPANS) == SPANS
    with pytest.raises(CacheError, match="no room"):
        tier.reserve(KEY, 3 * SLOT)
    assert tier.usage().num_templates == 2


def test_a_loaded_span_outlives_its_template(tier: MemoryTier) -> None:
    fill(tier, KEY)
    loaded = tier.load(KEY, STEPS)
    with tier.pin(KEY):
        tier.drop(KEY)
        assert tier.missing(KEY, SPANS) == SPANS
    for index in range(4):
        fill(tier, other_key(index), seed=1)
    assert equal(loaded, make_span())
    assert tier.usage().num_templates == 2
    tier.drop(KEY)


def test_threads_fill_one_template(tier: MemoryTier) -> None:
    threads = [threading.Thread(target=tier.store, args=(KEY, span)) for span in make_spans() * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal(tier.load(KEY, KEY.slots), join(6, make_spans(), CPU))
    assert tier.usage().num_bytes == SLOT


@pytest.mark.gpu
def test_host_memory_is_page_locked_as_long_as_it_is_viewed(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(8):  # most likely at one address, which can be locked again only after it is unlocked
        tier = HostTier(GIB)
        fill(tier, KEY)
        loaded = tier.load(KEY, KEY.slots)
        assert loaded
        tier.drop(KEY)
        del tier
        assert all(rows.is_pinned() for rows in loaded.rows)
    assert not caplog.records


class Pool(RuleBasedStateMachine):
    """A tier of three slots against the simplest model of one."""

    keys = st.sampled_from([other_key(index) for index in range(5)])

    def __init__(self) -> None:
        super().__init__()
        self.tier = HostTier(3 * SLOT)
        self.kept: OrderedDict[Key, set[range]] = OrderedDict()  # the least recently used first
        self.pins: list[tuple[Key, object]] = []

    def is_pinned(self, key: Key) -> bool:
        return any(key == pinned for pinned, _ in self.pins)

    @rule(key=keys, steps=st.sampled_from(SPANS))
    def store(self, key: Key, steps: range) -> None:
        if key not in self.kept and len(self.kept) == 3:
            victim = next((other for other in self.kept if not self.is_pinned(other)), None)
            if not victim:
                with pytest.raises(CacheError):
                    self.tier.store(key, make_span(steps))
                return
            del self.kept[victim]
        self.tier.store(key, make_span(steps))
        self.kept.setdefault(key, set()).add(steps)
        self.kept.move_to_end(key)

    @rule(key=keys, steps=st.sampled_from(SPANS))
    def load(self, key: Key, steps: range) -> None:
        loaded = self.tier.load(key, steps)
        assert (loaded is not None) == (steps in self.kept.get(key, set()))
        if loaded:
            self.kept.move_to_end(key)

    @rule(key=keys)
    def pin(self, key: Key) -> None:
        pin = self.tier.pin(key)
        pin.__enter__()
        self.pins.append((key, pin))
        if key in self.kept:
            self.kept.move_to_end(key)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        _, pin = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        pin.__exit__(None, None, None)  # type: ignore[attr-defined]

    @rule(key=keys)
    def drop(self, key: Key) -> None:
        self.tier.drop(key)
        self.kept.pop(key, None)

    @invariant()
    def holds_the_same(self) -> None:
        for index in range(5):
            key = other_key(index)
            assert self.tier.missing(key, SPANS) == [steps for steps in SPANS if steps not in self.kept.get(key, set())]
        assert self.tier.usage().num_bytes == len(self.kept) * SLOT


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell resident memory")
def test_evicted_templates_give_their_memory_back_to_the_system() -> None:
    """Templates of different sizes come and go in threads of their own, as loads do."""
    tier = HostTier(60_000_000)
    widths = (900, 600, 750, 400, 300)
    spans = [Span(KEY.slots, (torch.ones(1, KEY.num_steps, 1, 1000, width),), torch.empty(6, 0)) for width in widths]
    before = resident_bytes()
    for index in range(30):
        thread = threading.Thread(target=tier.store, args=(other_key(index), spans[index % len(spans)]))
        thread.start()
        thread.join()
    assert tier.num_evictions > 20
    assert resident_bytes() - before < tier.usage().num_bytes + 10_000_000
