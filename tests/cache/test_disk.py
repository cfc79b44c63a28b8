"""The disk tier, with real files, real locks and real processes."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.spans import (
    GIB,
    KEY,
    SPANS,
    STEPS,
    check_pictures,
    equal,
    make_picture,
    make_span,
    no_long_files,
    other_key,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from instgenie.cache import disk
from instgenie.cache.disk import DiskTier
from instgenie.cache.folder import default_folder, make_folder
from instgenie.errors import CacheError
from instgenie.jobs.activations import Key


def one_file(tier: DiskTier) -> Path:
    [path] = tier.folder.glob("*/*.safetensors")
    return path


def grow_old(tier: DiskTier, key: Key, seconds: float) -> None:
    for path in tier._template(key).iterdir():
        os.utime(path, (time.time() - seconds,) * 2)


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "cache", GIB)


def test_a_stored_span_is_loaded_by_another_tier(tier: DiskTier) -> None:
    assert tier.missing(KEY, SPANS) == SPANS
    assert tier.load(KEY, STEPS) is None
    tier.store(KEY, make_span())
    other = DiskTier(tier.folder, GIB)
    assert other.missing(KEY, SPANS) == SPANS[1:]
    assert equal(other.load(KEY, STEPS), make_span())
    assert other.load(other_key(1), STEPS) is None
    assert other.missing(other_key(1), SPANS) == SPANS
    assert tier.num_bytes(KEY) >= make_span().num_bytes


def test_storing_again_replaces(tier: DiskTier) -> None:
    tier.store(KEY, make_span())
    tier.store(KEY, make_span(seed=1))
    assert equal(tier.load(KEY, STEPS), make_span(seed=1))


def test_files_are_plain_safetensors_readable_by_their_owner_only(tier: DiskTier) -> None:
    tier.store(KEY, make_span())
    path = one_file(tier)
    assert torch.equal(load_file(path)["rows.0000"], make_span().rows[0])
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    assert (header["format"], header["steps"], len(header["checksum"])) == ("1", "0 to 3", 8)
    assert json.loads(header["key"])["levels"] == [1.0, 0.5, 0.1]
    assert [oct(path.stat().st_mode)[-3:] for path in (tier.folder, path.parent, path)] == ["700", "700", "600"]
    assert {path.stat().st_mode & 0o777 for path in path.parent.iterdir()} == {0o600}


def flip(position: float) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(position * (len(content) - 1))] ^= 4
        path.write_bytes(content)

    return change


def rewrite(**changes: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            header = file.metadata()
        save_file(load_file(path), path, header | changes)

    return change


def reshape(path: Path) -> None:
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        save_file(tensors | {"rows.0000": tensors["rows.0000"].transpose(0, 1).contiguous()}, path, file.metadata())


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "cut in the header": lambda path: os.truncate(path, 100),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "not safetensors": lambda path: path.write_text("not tensors at all"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "first byte": flip(0.0),
    "header": flip(0.01),
    "a value": flip(0.7),
    "last value": flip(1.0),
    "another format": rewrite(format="0"),
    "another key": rewrite(key=other_key(1).text),
    "other steps": rewrite(steps="4 to 7"),
    "another checksum": rewrite(checksum="00000000"),
    "another shape": reshape,
    "no header": lambda path: save_file(load_file(path), path),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_is_a_miss_that_is_reported(
    damage: Callable[[Path], None], tier: DiskTier, caplog: pytest.LogCaptureFixture
) -> None:
    tier.store(KEY, make_span())
    path = one_file(tier)
    damage(path)
    assert tier.load(KEY, STEPS) is None
    assert str(path) in caplog.text
    assert not path.is_file()
    assert tier.missing(KEY, [STEPS]) == [STEPS]


@pytest.mark.parametrize("damage", ["empty", "cut short", "another format", "another key", "no header"])
def test_damage_is_missing_before_it_is_loaded(damage: str, tier: DiskTier, caplog: pytest.LogCaptureFixture) -> None:
    tier.store(KEY, make_span())
    DAMAGES[damage](one_file(tier))
    assert tier.missing(KEY, [STEPS]) == [STEPS]
    assert "removed" in caplog.text


def test_every_bit_counts(tier: DiskTier, caplog: pytest.LogCaptureFixture) -> None:
    """A flipped bit anywhere in a file is a miss, or does not change the span."""
    span = make_span(range(1), num_tokens=1)
    tier.store(KEY, span)
    path = one_file(tier)
    content = path.read_bytes()
    for position in range(0, 8 * len(content), 7):
        damaged = bytearray(content)
        damaged[position // 8] ^= 1 << position % 8
        path.write_bytes(damaged)
        loaded = tier.load(KEY, range(1))
        assert loaded is None or equal(loaded, span)


def test_the_least_recently_used_template_is_evicted_first_and_whole(tmp_path: Path) -> None:
    num_bytes = sum(make_span(steps).num_bytes for steps in SPANS)
    tier = DiskTier(tmp_path / "cache", int(3.4 * num_bytes))
    for index in range(3):
        for steps in SPANS:
            tier.store(other_key(index), make_span(steps))
    for index, age in enumerate((300, 200, 100)):
        grow_old(tier, other_key(index), age)
    with DiskTier(tier.folder, GIB).pin(other_key(0)):  # a use by another process
        pass
    for steps in SPANS:
        tier.store(other_key(3), make_span(steps))
    missing = [tier.missing(other_key(index), SPANS) for index in range(4)]
    assert missing == [[], SPANS, [], []]
    assert sum(stored.num_bytes for stored in tier.stored()) <= tier.max_bytes
    assert len(tier.stored()) == 3


def test_pinned_templates_stay(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "cache", int(2.4 * make_span().num_bytes))
    tier.store(other_key(0), make_span())
    tier.store(other_key(1), make_span())
    grow_old(tier, other_key(0), 100)
    with tier.pin(other_key(0)):
        grow_old(tier, other_key(0), 100)
        tier.store(other_key(2), make_span())
        assert [tier.missing(other_key(index), [STEPS]) for index in range(3)] == [[], [STEPS], []]
        with tier.pin(other_key(2)), pytest.raises(CacheError, match="no room"):
            tier.store(other_key(3), make_span())
    tier.store(other_key(3), make_span())
    assert tier.missing(other_key(3), [STEPS]) == []


def test_a_template_that_cannot_fit_evicts_nothing(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "cache", int(2.4 * make_span().num_bytes))
    tier.store(other_key(0), make_span())
    with pytest.raises(CacheError, match=r"no room for .* it may hold .* and holds .* free"):
        tier.reserve(KEY, 3 * make_span().num_bytes)
    with pytest.raises(CacheError, match="no room"):
        DiskTier(tier.folder, 2**60).reserve(KEY, 2**59)
    assert tier.missing(other_key(0), [STEPS]) == []


def test_foreign_files_stay(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, int(1.4 * make_span().num_bytes))
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "big.safetensors").write_bytes(bytes(make_span().num_bytes))
    (tmp_path / "note.txt").write_text("mine")
    for index in range(3):
        tier.store(other_key(index), make_span())
    assert len(tier.stored()) == 1
    assert {path.name for path in tmp_path.iterdir()} > {"letters", "note.txt"}
    assert (tmp_path / "letters" / "big.safetensors").is_file()


def test_partial_files_of_dead_processes_are_removed_but_not_those_of_live_ones(tier: DiskTier) -> None:
    tier.store(KEY, make_span())
    partial = one_file(tier).with_name("0123456789abcdef.partial")
    partial.write_bytes(b"half")
    with tier.pin(KEY):
        assert not partial.exists()
        partial.write_bytes(b"half")
        with DiskTier(tier.folder, GIB).pin(KEY):
            assert partial.exists()
    with tier.pin(KEY):
        assert not partial.exists()
    assert equal(tier.load(KEY, STEPS), make_span())


def test_a_pin_alone_leaves_nothing(tier: DiskTier) -> None:
    with tier.pin(KEY):
        assert tier.missing(KEY, SPANS) == SPANS
    assert list(tier.folder.iterdir()) == []


def test_unpinning_an_empty_template_keeps_spans_stored_meanwhile(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    evict = disk.evict

    def evict_late(template: Path, if_empty: bool = False) -> bool:
        tier.store(KEY, make_span())  # by another process, after the template was found empty
        return evict(template, if_empty)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "evict", evict_late)
        with tier.pin(KEY):
            pass
    assert equal(tier.load(KEY, STEPS), make_span())
    tier.drop(KEY)
    assert list(tier.folder.iterdir()) == []


def test_a_dropped_template_is_gone_pinned_or_not(tier: DiskTier) -> None:
    for index in range(2):
        tier.store(other_key(index), make_span())
    tier.drop(other_key(0))
    with tier.pin(other_key(1)):
        loaded = tier.load(other_key(1), STEPS)
        tier.drop(other_key(1))
        assert tier.missing(other_key(1), [STEPS]) == [STEPS]
    assert equal(loaded, make_span())
    assert list(tier.folder.iterdir()) == []
    tier.drop(KEY)


def test_an_evicted_template_is_there_until_it_is_spilled(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "cache", int(2.4 * make_span().num_bytes))
    seen: list[tuple[Key, bool]] = []
    tier.spill = lambda key: seen.append((key, equal(tier.load(key, STEPS), make_span())))
    for index in range(3):
        tier.store(other_key(index), make_span())
        grow_old(tier, other_key(index), 100 - index)
    assert seen == [(other_key(0), True)]
    with tier.pin(other_key(1)), tier.pin(other_key(2)), pytest.raises(CacheError, match="no room"):
        tier.store(KEY, make_span())
    assert len(seen) == tier.num_evictions == 1
    assert tier.usage().num_templates == 2


def test_files_without_a_readable_key_are_not_spilled(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "cache", int(1.4 * make_span().num_bytes))
    seen: list[Key] = []
    tier.spill = seen.append
    for change in (rewrite(key="{}"), rewrite(key=other_key(1).text), DAMAGES["cut short"]):
        tier.store(KEY, make_span())
        change(one_file(tier))
        tier.store(other_key(2), make_span())
        tier.drop(other_key(2))
    assert seen == []
    assert tier.usage().num_templates == 0


def test_a_span_that_was_loaded_outlives_its_file(tier: DiskTier) -> None:
    tier.store(KEY, make_span())
    loaded = tier.load(KEY, STEPS)
    shutil.rmtree(tier.folder)
    assert equal(loaded, make_span())
    assert tier.load(KEY, STEPS) is None
    tier.folder.mkdir()
    tier.store(KEY, make_span())
    assert equal(tier.load(KEY, STEPS), make_span())


def test_a_write_that_fails_keeps_the_old_file(tier: DiskTier) -> None:
    tier.store(KEY, make_span())
    with no_long_files(), pytest.raises(CacheError, match=r"cannot be written: .*too large"):
        tier.store(KEY, make_span(seed=1))
    assert equal(tier.load(KEY, STEPS), make_span())
    assert {path.suffix for path in one_file(tier).parent.iterdir()} == {".safetensors", ""}


WORK = """
import sys
from pathlib import Path
from helpers.spans import STEPS, equal, make_span, no_long_files, other_key
from instgenie.cache.disk import DiskTier
from instgenie.errors import CacheError

tier = DiskTier(Path(sys.argv[1]), int(2.4 * make_span().num_bytes))
for turn in range(30):
    key = other_key(turn % 4)
    try:
        tier.store(key, make_span(seed=turn % 4))
    except CacheError as error:
        assert "no room" in str(error), error  # the other processes have pinned everything
    for index in range(4):
        loaded = tier.load(other_key(index), STEPS)
        assert loaded is None or equal(loaded, make_span(seed=index))
"""


def test_processes_share_a_folder(tier: DiskTier) -> None:
    """They store the same templates, evict each other's, and read files that may vanish; one of them is killed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WORK, str(tier.folder)]
    workers = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    while not list(tier.folder.glob("*/*.safetensors")):
        assert workers[0].poll() is None
        time.sleep(0.01)
    workers[0].kill()
    failures = [worker.communicate()[1] for worker in workers]
    assert [worker.returncode for worker in workers[1:]] == [0, 0], failures
    assert failures[1:] == ["", ""]
    tier.store(KEY, make_span())
    assert equal(tier.load(KEY, STEPS), make_span())


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "instgenie" / "templates"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unset in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert default_folder() == tmp_path / "home" / ".cache" / "instgenie" / "templates"


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CacheError, match="cannot be a cache folder"):
            make_folder(folder)


def test_a_picture_lies_beside_the_spans(tier: DiskTier) -> None:
    check_pictures(tier, DiskTier(tier.folder, GIB))


def test_a_picture_that_is_damaged_is_a_miss(tier: DiskTier) -> None:
    other = DiskTier(tier.folder, GIB)
    tier.store(KEY, make_span())
    tier.store_picture(KEY, make_picture())
    path = tier._template(KEY) / "picture.safetensors"
    flip(1.0)(path)
    assert other.load_picture(KEY) is None
    assert other.pictures() == {}
    assert equal(other.load(KEY, STEPS), make_span())


def test_a_picture_without_spans_does_not_stay(tier: DiskTier) -> None:
    tier.store_picture(KEY, make_picture())
    assert list(tier.folder.iterdir()) == []
