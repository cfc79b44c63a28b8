"""Spans as bytes: any damage is noticed. Files are tested with the disk tier."""

import json

import pytest
from helpers.spans import KEY, STEPS, equal, make_span, other_key
from safetensors.torch import load, save

from instgenie.cache.format import DamagedError, decode, encode


def test_a_span_survives_encoding() -> None:
    assert equal(decode(encode(KEY, make_span()), KEY, STEPS), make_span())


def test_bytes_are_the_same_as_in_a_file() -> None:
    data = encode(KEY, make_span())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    assert (header["format"], header["steps"], header["key"]) == ("1", "0 to 3", KEY.text)


def test_every_bit_counts() -> None:
    """A flipped bit anywhere is noticed, or does not change the span."""
    span = make_span(range(1), num_tokens=1)
    data = encode(KEY, span)
    num_noticed = 0
    for position in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[position // 8] ^= 1 << position % 8
        try:
            assert equal(decode(bytes(damaged), KEY, range(1)), span)
        except DamagedError:
            num_noticed += 1
    assert num_noticed > 0.9 * 8 * len(data)


def test_every_length_counts() -> None:
    data = encode(KEY, make_span(range(1), num_tokens=1))
    for length in range(len(data)):
        with pytest.raises(DamagedError):
            decode(data[:length], KEY, range(1))
    with pytest.raises(DamagedError):
        decode(data + b"\0", KEY, range(1))


def test_undamaged_bytes_of_another_span_are_refused() -> None:
    data = encode(KEY, make_span())
    with pytest.raises(DamagedError, match="key is not the expected one"):
        decode(data, other_key(1), STEPS)
    with pytest.raises(DamagedError, match="steps is not the expected one"):
        decode(data, KEY, range(4, 8))
    with pytest.raises(DamagedError, match="format is not the expected one"):
        decode(save(load(data)), KEY, STEPS)
