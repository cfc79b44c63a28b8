"""The remote tier, over a real S3-compatible server and over plain files."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.s3 import BUCKET, URL, Server
from helpers.spans import GIB, KEY, SPANS, STEPS, check_pictures, equal, make_picture, make_span, other_key

from instgenie.cache.format import encode
from instgenie.cache.remote import RemoteTier, when
from instgenie.errors import CacheError
from instgenie.jobs.activations import Key
from instgenie.machine import backoff

NUM_BYTES = len(encode(KEY, make_span()))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.kill()


Make = Callable[..., RemoteTier]


@pytest.fixture(params=["s3", "file", "memory"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes tiers over one place, which is empty at first."""
    name = request.param
    if name == "s3":
        server = request.getfixturevalue("server")
        return lambda max_bytes=GIB: RemoteTier(f"s3://{BUCKET}{tmp_path}", max_bytes, server.options)
    url = f"file://{tmp_path}/templates" if name == "file" else f"memory://{tmp_path}"
    return lambda max_bytes=GIB: RemoteTier(url, max_bytes)


def paths(tier: RemoteTier) -> list[str]:
    return [path for path in tier._files.find(tier._root) if path.endswith(".safetensors")]


def test_a_stored_span_is_loaded_by_another_tier(make: Make) -> None:
    tier, other = make(), make()
    assert tier.missing(KEY, SPANS) == SPANS
    assert tier.load(KEY, STEPS) is None
    assert tier.usage().num_templates == 0
    tier.store(KEY, make_span())
    assert other.missing(KEY, SPANS) == SPANS[1:]
    assert equal(other.load(KEY, STEPS), make_span())
    assert other.load(other_key(1), STEPS) is None
    tier.store(KEY, make_span(seed=1))
    assert equal(other.load(KEY, STEPS), make_span(seed=1))
    assert other.num_bytes(KEY) == NUM_BYTES == tier.usage().num_bytes
    tier.drop(KEY)
    assert other.missing(KEY, SPANS) == SPANS
    tier.drop(KEY)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut short": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "a value": lambda data: data[:-9] + bytes([data[-9] ^ 4]) + data[-8:],
    "not safetensors": lambda _: b"not tensors at all",
    "another key": lambda _: encode(other_key(1), make_span()),
    "other steps": lambda _: encode(KEY, make_span(SPANS[1])),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_a_miss_that_is_reported(damage: str, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    tier = make()
    tier.store(KEY, make_span())
    [path] = paths(tier)
    tier._files.pipe_file(path, DAMAGES[damage](tier._files.cat_file(path)))
    assert tier.load(KEY, STEPS) is None
    assert path in caplog.text
    assert tier.missing(KEY, [STEPS]) == [STEPS]
    tier.store(KEY, make_span())
    assert equal(tier.load(KEY, STEPS), make_span())


def test_a_file_larger_than_the_limit_is_not_read(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    make().store(KEY, make_span())
    assert make(NUM_BYTES - 1).load(KEY, STEPS) is None
    assert "but at most" in caplog.text


def test_the_limit_holds_by_evicting_templates(make: Make) -> None:
    tier = make(2 * NUM_BYTES + 100)
    for index in range(4):
        tier.store(other_key(index), make_span())
    assert tier.usage().num_templates == 2
    assert tier.usage().num_bytes <= tier.max_bytes
    assert tier.num_evictions == 2
    with pytest.raises(CacheError, match=r"no room for .* it may hold .* and holds"):
        tier.reserve(KEY, 3 * NUM_BYTES)
    assert tier.usage().num_templates == 2


def test_pinned_templates_stay(make: Make) -> None:
    tier = make(2 * NUM_BYTES + 100)
    for index in range(2):
        tier.store(other_key(index), make_span())
    with tier.pin(other_key(0)):
        tier.store(KEY, make_span())
        assert tier.missing(other_key(0), [STEPS]) == []
        with tier.pin(KEY), pytest.raises(CacheError, match="no room"):
            tier.store(other_key(2), make_span())
    tier.store(other_key(2), make_span())
    assert tier.missing(other_key(2), [STEPS]) == []


def test_foreign_files_stay(make: Make) -> None:
    tier = make(NUM_BYTES + 100)
    tier._files.pipe_file(f"{tier._root}/letters/big.safetensors", bytes(NUM_BYTES))
    for index in range(2):
        tier.store(other_key(index), make_span())
    assert tier.usage().num_templates == 1
    assert any("letters" in path for path in paths(tier))


def test_a_use_protects_a_template_from_eviction(tmp_path: Path) -> None:
    tier = RemoteTier(f"file://{tmp_path}", 2 * NUM_BYTES + 100)
    for index in range(2):
        tier.store(other_key(index), make_span())
    for path in tmp_path.glob("*/*"):
        os.utime(path, (time.time() - 100,) * 2)
    tier.load(other_key(0), STEPS)
    tier.store(KEY, make_span())
    assert [tier.missing(other_key(index), [STEPS]) for index in range(2)] == [[], [STEPS]]


def test_files_are_readable_by_their_owner_only_and_no_partial_file_is_left(tmp_path: Path) -> None:
    tier = RemoteTier(f"file://{tmp_path}/templates", GIB)
    tier.store(KEY, make_span())
    [file] = (tmp_path / "templates").glob("*/*")
    assert file.stat().st_mode & 0o777 == 0o600
    file.unlink()
    file.mkdir()  # no file can be moved to this name
    (file / "file").write_text("")
    with pytest.raises(CacheError, match="cannot be written"):
        tier.store(KEY, make_span())
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("url", ["nosuch://place", "hdfs://nowhere:1/templates"])
def test_urls_that_cannot_be_used(url: str) -> None:
    with pytest.raises(CacheError, match="cannot be a cache"):
        RemoteTier(url, GIB)


def test_a_missing_bucket(server: Server) -> None:
    tier = RemoteTier("s3://nosuchbucket/templates", GIB, server.options)
    assert tier.load(KEY, STEPS) is None
    assert tier.missing(KEY, SPANS) == SPANS
    with pytest.raises(CacheError, match="bucket does not exist"):
        tier.store(KEY, make_span())


@pytest.fixture
def own_server() -> Iterator[Server]:
    server = Server()
    yield server
    server.kill()


def is_all_a_miss(tier: RemoteTier) -> bool:
    with pytest.raises(CacheError, match=r"cannot be written"):
        tier.store(KEY, make_span())
    tier.drop(KEY)
    return tier.load(KEY, STEPS) is None and tier.missing(KEY, SPANS) == SPANS


def wait_for(there: Callable[[], Any]) -> None:
    while not there():
        time.sleep(0.1)


def test_a_server_that_goes_away_and_comes_back(
    own_server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = RemoteTier(URL, GIB, own_server.options, patience=2)
    tier.store(KEY, make_span())
    usage = tier.usage()
    own_server.hang()
    monkeypatch.setattr(backoff, "LAST_PAUSE", 1.0)
    assert tier.load(KEY, STEPS) is None
    assert "no answer within 2.0 seconds" in caplog.text
    own_server.go_on()
    wait_for(lambda: tier.load(KEY, STEPS))
    own_server.kill()
    caplog.clear()
    monkeypatch.setattr(tier._server, "pause", 1000.0)
    assert is_all_a_miss(tier)
    assert tier.usage() == usage
    assert caplog.text.count("is left alone for") == 1, "it is asked once, not time and again"
    own_server.start()
    monkeypatch.setattr(tier._server, "silent_until", 0.0)
    tier.store(KEY, make_span())
    assert equal(tier.load(KEY, STEPS), make_span())


def test_the_pause_grows_until_the_first_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    tier = RemoteTier(f"file://{tmp_path}/file/below", GIB)
    for _ in range(3):
        tier._server.silent_until = 0.0
        with pytest.raises(CacheError):
            tier.store(KEY, make_span())
    assert [f"for {pause} seconds" in caplog.text for pause in (1, 2, 4)] == [True] * 3
    (tmp_path / "file").unlink()
    tier._server.silent_until = 0.0
    tier.store(KEY, make_span())
    assert tier._server.pause == backoff.FIRST_PAUSE


def test_times_of_all_protocols() -> None:
    assert when({"mtime": 3.5}) == 3.5
    assert when({"updated": "1970-01-01T00:00:02Z"}) == 2.0
    assert when({"size": 1}) == 0.0


def test_tenants_have_keys_of_their_own(make: Make) -> None:
    mine, theirs = (Key(**vars(KEY) | {"tenant": tenant}) for tenant in ("mine", "theirs"))
    tier = make()
    tier.store(mine, make_span())
    assert tier.load(theirs, STEPS) is None
    [path] = paths(tier)
    tier._files.pipe_file(path.replace(mine.name, theirs.name), tier._files.cat_file(path))
    assert tier.load(theirs, STEPS) is None


def test_a_picture_lies_beside_the_spans(make: Make) -> None:
    check_pictures(make(), make())


def test_a_picture_that_is_damaged_is_a_miss(make: Make) -> None:
    tier, other = make(), make()
    tier.store(KEY, make_span())
    tier.store_picture(KEY, make_picture())
    path = f"{tier._template(KEY)}/picture.safetensors"
    data = tier._files.cat_file(path)
    tier._files.pipe_file(path, data[:-1] + bytes([data[-1] ^ 4]))
    assert other.load_picture(KEY) is None
    assert other.pictures() == {}
    assert equal(other.load(KEY, STEPS), make_span())
