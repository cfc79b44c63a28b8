"""Spans and keys for tests of the cache."""

import contextlib
import resource
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from instgenie.cache.disk import DiskTier
from instgenie.cache.format import encode
from instgenie.cache.memory import step_specs
from instgenie.cache.remote import RemoteTier
from instgenie.cache.store import Store
from instgenie.jobs.activations import Key, Span, join
from instgenie.types import Pixels

GIB = 2**30
KEY = Key("picture", "model", (32, 48), 6, (1.0, 0.5, 0.1), 3.5, "kv", "torch.float32")
SPANS = KEY.spans
STEPS = SPANS[0]


def other_key(index: int) -> Key:
    return replace(KEY, picture=f"picture {index}")


def make_span(steps: range = STEPS, seed: int = 0, num_tokens: int = 24) -> Span:
    """A span with rows of two dtypes and a time without width, like a UNet's."""
    random = torch.Generator().manual_seed(seed)
    rows = (
        torch.randn(2, len(steps), 2, num_tokens, 16, generator=random),
        torch.randn(2, len(steps), 1, num_tokens, 8, generator=random).bfloat16(),
    )
    return Span(steps, rows, torch.empty(len(steps), 0))


def make_spans(seed: int = 0, num_tokens: int = 24) -> list[Span]:
    """All spans of a template."""
    return [make_span(steps, seed, num_tokens) for steps in SPANS]


def make_picture(seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (24, 32, 3), np.uint8)


def equal(one: Span | None, other: Span) -> bool:
    assert one is not None
    pairs = zip((*one.rows, one.time), (*other.rows, other.time), strict=True)
    return one.steps == other.steps and all(a.dtype == b.dtype and torch.equal(a.cpu(), b) for a, b in pairs)


def check_pictures(tier: DiskTier | RemoteTier, other: DiskTier | RemoteTier) -> None:
    """Two tiers over one place: a picture that one stores, the other finds beside the spans."""
    tier.store(KEY, make_span())
    tier.store(other_key(1), make_span())
    assert other.load_picture(KEY) is None
    assert other.pictures() == {}
    tier.store_picture(KEY, make_picture())
    assert np.array_equal(other.load_picture(KEY), make_picture())
    assert other.load_picture(other_key(1)) is None
    assert other.pictures() == {KEY: (24, 32)}
    assert other.missing(KEY, SPANS) == SPANS[1:]
    tier.drop(KEY)
    assert (other.load_picture(KEY), other.pictures()) == (None, {})


def put(store: Store, key: Key, seed: int = 0) -> None:
    for span in make_spans(seed):
        store.put(key, span)


def whole(seed: int = 0) -> Span:
    return join(KEY.num_steps, make_spans(seed), torch.device("cpu"))


def is_found(store: Store, key: Key, seed: int = 0) -> bool:
    found = store.get(key)
    return bool(found) and equal(found.span, whole(seed))


@contextlib.contextmanager
def no_long_files() -> Iterator[None]:
    """The system refuses to write any file of more than 1000 bytes, as it would on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


SLOT = KEY.num_steps * sum(spec.num_bytes for spec in step_specs(make_span()))  # bytes of a template in memory
FILES = sum(len(encode(KEY, span)) for span in make_spans())  # and in files
