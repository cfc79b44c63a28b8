"""Edits and registrations with a cache folder: hits and misses, damage, interrupts."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.commands import EDIT, edit_here
from safetensors import safe_open

from instgenie.cli import main
from instgenie.editor import Editor


def cached_files() -> list[Path]:
    return sorted(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.safetensors"))


def test_the_second_edit_of_a_photograph_hits(
    desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", str(folders["fill"]), "--box", "20,10,40,30"]
    assert edit_here(*model, "--register") == 0
    first = capsys.readouterr()
    assert "cache    miss" in first.out
    assert "computed 24 of 24 tokens" in first.out
    assert "registering" in first.err
    assert edit_here(*model, "--prompt", "a blue dog", "--seed", "3", "--strength", "0.7", "--quality", "fast") == 0
    second = capsys.readouterr()
    assert "cache    hit (disk)" in second.out
    assert "computed 9 of 24 tokens" in second.out
    assert "load 0." in second.out
    assert "registering" not in second.err
    assert edit_here(*model, "--no-cache") == 0
    off = capsys.readouterr()
    assert "cache    off" in off.out
    assert "computed 24 of 24 tokens" in off.out


def test_reuse_can_be_pinned(desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", str(folders["fill"]), "--box", "20,10,40,30"]
    assert edit_here(*model, "--reuse", "off") == 0
    off = capsys.readouterr()
    assert ("cache    off" in off.out, "registering" in off.err, cached_files()) == (True, False, [])
    assert edit_here(*model, "--reuse", "template") == 0
    assert "cache    hit (disk)" in capsys.readouterr().out
    assert edit_here("--model", str(folders["fill"]), "--reuse", "template") == 2
    assert "the edit cannot use a template" in capsys.readouterr().err


def test_registering_where_it_cannot_help_is_left_out(
    desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", str(folders["fill"])]
    assert edit_here(*model, "--register") == 0
    assert "cache    not used: nothing to reuse" in capsys.readouterr().out
    assert edit_here(*model, "--box", "20,10,40,30") == 0, "nobody asked for it"
    assert "cache    miss" in capsys.readouterr().out
    assert cached_files() == []


REGISTER = ["register", "photo.jpg", "--device", "cpu", "--size", "48x32", "--steps", "3"]


def test_register_then_edit(desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", str(folders["sdxl"]), "--cache-dir", "kept"]
    assert main([*REGISTER, *model, "--size", "64x32", "--kind", "y"]) == 0
    printed = capsys.readouterr()
    assert "registered 3 of 3 steps" in printed.out
    assert "in kept" in printed.out
    assert "3/3" in printed.err
    assert main([*REGISTER, *model, "--size", "64x32", "--kind", "y"]) == 0
    assert "already registered: 3 steps" in capsys.readouterr().out
    assert edit_here(*model, "--size", "64x32", "--box", "20,10,40,30") == 0
    assert "cache    hit (disk)" in capsys.readouterr().out
    assert cached_files() == []


def test_a_registration_without_room_is_one_line(
    desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--model", str(folders["fill"]), "--cache-gib", "0.0000001"]
    assert main([*REGISTER, *small]) == 2
    assert "has no room for" in capsys.readouterr().err
    assert edit_here(*small, "--box", "20,10,40,30", "--register") == 0
    assert "not registered: " in capsys.readouterr().err
    assert Path("photo.edit.png").is_file()
    assert cached_files() == []


def test_an_interrupt_while_registering_leaves_the_edit(
    desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Editor, *_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Editor, "register", interrupted)
    assert edit_here("--model", str(folders["fill"]), "--box", "20,10,40,30", "--register") == 0
    assert "registering was interrupted" in capsys.readouterr().err
    assert Path("photo.edit.png").is_file()


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, bytes]]:
    with safe_open(path, framework="np") as file:
        return file.metadata(), {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


def test_a_damaged_cache_is_a_miss_that_mends_itself(
    desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    arguments = ["--model", str(folders["fill"]), "--box", "20,10,40,30", "--steps", "6", "--register"]
    assert edit_here(*arguments) == 0
    [first, second] = cached_files()
    inode, content = first.stat().st_ino, read_tensors(second)
    damaged = bytearray(second.read_bytes())
    damaged[-1] ^= 1
    second.write_bytes(damaged)
    capsys.readouterr()
    assert edit_here(*arguments) == 0
    assert "cache    miss" in capsys.readouterr().out
    assert "checksum is wrong" in caplog.text
    assert [first, second] == cached_files()
    assert (first.stat().st_ino, read_tensors(second)) == (inode, content)
    assert edit_here(*arguments) == 0
    assert "cache    hit (disk)" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["edit", "register"])
def test_cache_folders_that_are_none(command: str, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = EDIT if command == "edit" else []
    assert main([command, "photo.jpg", *prompt, "--cache-dir", "text.png"]) == 2
    assert "text.png cannot be a cache folder" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([command, "photo.jpg", *prompt, "--cache-gib", "-1"])
    assert "'-1' is not a number of GiB" in capsys.readouterr().err


def test_an_edit_does_without_the_users_cache_folder(
    desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(desk / "text.png"))
    assert edit_here("--model", str(folders["fill"]), "--box", "20,10,40,30") == 0
    printed = capsys.readouterr()
    assert "no cache: " in printed.err
    assert "cache    off" in printed.out


def test_a_killed_registration_goes_on_and_comes_to_the_same(desk: Path, folders: dict[str, Path]) -> None:
    """Files are equal to the last bit if the processes have equally many threads, which decides how sums round."""
    arguments = ["register", "photo.jpg", "--model", str(folders["sdxl"]), "--size", "96x64", "--steps", "32"]
    assert "registered 32 of 32 steps" in run_alone(*arguments, "--cache-dir", "whole")
    killed = kill_registration(*arguments, "--cache-dir", "killed")
    num_left = 32 - 4 * len(killed)
    assert 0 < num_left < 32
    assert f"registered {num_left} of 32 steps" in run_alone(*arguments, "--cache-dir", "killed")
    assert all(path.stat().st_ino == inode for path, inode in killed.items())
    whole, resumed = (
        {path.name: read_tensors(path) for path in Path(folder).glob("*/*.safetensors")}
        for folder in ("whole", "killed")
    )
    assert len(whole) == 8
    assert whole == resumed
    assert {path.suffix for path in Path("killed").glob("*/*")} == {".safetensors", ""}


def start_alone(*arguments: str) -> subprocess.Popen[str]:
    """Start our command in a process of its own, with one thread."""
    command = [sys.executable, "-m", "instgenie", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def run_alone(*arguments: str) -> str:
    with start_alone(*arguments) as process:
        printed, _ = process.communicate()
    assert process.returncode == 0
    return printed


def kill_registration(*arguments: str) -> dict[Path, int]:
    """Kill the process when it has stored a few spans; return the files of that moment and their inodes."""
    with start_alone(*arguments) as process:
        while len(list(Path("killed").glob("*/*.safetensors"))) < 3:
            assert process.poll() is None
            time.sleep(0.001)
        process.kill()
        process.communicate()  # until nobody writes any more: what was forked in its place dies a moment later
    assert process.returncode == -signal.SIGKILL
    return {path: path.stat().st_ino for path in Path("killed").glob("*/*.safetensors")}
