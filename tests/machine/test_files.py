"""Files that appear complete or not at all."""

import os
from pathlib import Path

import pytest

from instgenie.machine.files import complete_file


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_appears_under_its_name_when_it_is_complete(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with complete_file(path, durable) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
        assert partial.suffix == ".partial"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def write_half(path: Path) -> None:
    path.write_text("half")
    raise OSError("no room for the second half")


def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(OSError, match="second"), complete_file(path) as partial:
        write_half(partial)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_writers_of_one_file_do_not_share_a_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    with complete_file(path) as first, complete_file(path) as second:
        assert first != second
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"  # its block ended last


def test_durable_bytes_reach_the_disk_before_the_name_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.txt"
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append((os.fstat(descriptor).st_size, path.exists())))
    with complete_file(path, durable=True) as partial:
        partial.write_text("new")
    assert synced == [(3, False)]
