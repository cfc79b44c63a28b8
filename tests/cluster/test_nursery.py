"""Forked processes: each is like one that was started anew, and none is lost or left behind. Most roles here are played
by code that a test sends as the configuration's model, so that a nursery has little to import."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest
from helpers.clusters import Run, is_alive, make_config, until

from instgenie.cluster import launch, nursery
from instgenie.cluster.config import ProcessConfig, Role, process_config, resolve
from instgenie.cluster.environment import process_environment
from instgenie.cluster.launch import LaunchedProcess, start_process
from instgenie.cluster.nursery import Nurseries

ROLES = f"""
    import json, sys, types

    if "instgenie.workers" in " ".join(sys.orig_argv):
        for role in {get_args(Role)}:
            module = types.ModuleType("instgenie.workers." + role)
            module.main = lambda config: exec(json.loads(config)["model"], {{}})
            sys.modules[module.__name__] = module
"""
FACTS = """
import gc, json, os, signal, sys, torch

found = {
    "ignored": [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN],
    "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "files": len(os.listdir("/proc/self/fd")),
    "links": [os.readlink(f"/proc/self/fd/{number}") for number in (1, 2)],
    "name": open("/proc/self/comm").read(),
    "input": sys.stdin.read(),
    "num_threads": [torch.get_num_threads(), len(os.listdir("/proc/self/task"))],
    "cores": sorted(os.sched_getaffinity(0)),
    "result": torch.nn.functional.conv2d(torch.ones(4, 8, 64, 64), torch.ones(8, 8, 3, 3)).sum().item(),
    "num_computing": len(os.listdir("/proc/self/task")),
}
with open("PLACE", "w") as file:
    json.dump(found, file)
"""
LONG = "import time; time.sleep(600)"
THREE_THREADS = {"OMP_NUM_THREADS": "3", "MKL_DYNAMIC": "FALSE"}  # else MKL takes no more than there are cores


@pytest.fixture(autouse=True)
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nurseries]:
    """Nurseries of the test's own, whose roles run what they are told."""
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(ROLES))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    own = Nurseries()
    monkeypatch.setattr(launch, "nurseries", own)
    yield own
    own.end_all()


@pytest.fixture
def with_torch(tmp_path: Path) -> None:
    """The roles import torch."""
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(ROLES) + "    import torch\n")


def configure(code: str) -> ProcessConfig:
    made = process_config(resolve(make_config(Path()), 2.0**30), "0.finish.1", "cpu", "ipc://nowhere")
    return replace(made, model=code, parent=os.getpid())


async def start(code: str, given: str = "", **variables: str) -> LaunchedProcess:
    """Start a finish process that runs the code, with this standard input."""
    reading, writing = os.pipe()
    os.write(writing, given.encode())
    os.close(writing)
    config = configure(code)
    with os.fdopen(reading) as stdin:
        return await start_process("finish", config, process_environment(config) | variables, stdin.fileno())


async def run_to_end(code: str, **variables: str) -> int:
    return await (await start(code, **variables)).wait()


def nursery_of(process: LaunchedProcess) -> psutil.Process:
    parent = psutil.Process(process.pid).parent()
    assert parent is not None
    assert parent.name() == "genie-nursery"
    return parent


def test_a_forked_process_is_like_one_that_was_started_anew(
    run: Run, with_torch: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signals, files, folder, environment, cores, threads, name; a second process inherits nothing of the first."""
    (tmp_path / "elsewhere").mkdir()

    async def facts(name: str, **variables: str) -> dict[str, Any]:
        process = await start(FACTS.replace("PLACE", str(tmp_path / name)), "a word", **variables)
        assert await process.wait() == 0
        found: dict[str, Any] = json.loads((tmp_path / name).read_text())
        return found

    async def play() -> list[dict[str, Any]]:
        other = await start(LONG, **THREE_THREADS)
        monkeypatch.chdir(tmp_path / "elsewhere")
        forked = await facts("forked", **THREE_THREADS)
        assert nursery_of(other).children() == [psutil.Process(other.pid)]
        other.kill()
        await other.wait()
        monkeypatch.setattr(launch, "can_fork", lambda _: False)
        return [forked, await facts("anew", **THREE_THREADS)]

    forked, anew = run(play())
    assert forked.pop("num_threads") == [3, 1]
    assert anew.pop("num_threads")[0] == 3  # the others are numpy's, which has no use for them here
    assert forked.pop("num_computing") == 3
    anew.pop("num_computing")
    assert forked == anew
    assert (forked["input"], forked["name"]) == ("a word", "genie-finish\n")
    assert forked["folder"] == str(tmp_path / "elsewhere")
    assert forked["environment"]["CUDA_VISIBLE_DEVICES"] == ""
    assert "OPENBLAS_NUM_THREADS" not in forked["environment"]


def test_exit_codes_and_signals_are_reported(run: Run) -> None:
    async def play() -> list[int]:
        killed = await start(LONG)
        codes = [await run_to_end(code) for code in ("", "raise SystemExit(3)", "1 / 0", "import os; os.abort()")]
        nursery = nursery_of(killed)
        assert [child.pid for child in nursery.children()] == [killed.pid]  # the others are no zombies
        assert killed.is_alive
        killed.kill()
        codes.append(await killed.wait())
        assert not killed.is_alive
        killed.kill()  # nothing happens
        assert nursery.children() == []
        return codes

    assert run(play()) == [0, 3, 1, -signal.SIGABRT, -signal.SIGKILL]


def test_processes_whose_environments_differ_late_share_a_nursery(run: Run, tmp_path: Path) -> None:
    """A variable that something may read while it is imported makes a nursery of its own."""
    code = "import os; open({!r}, 'w').write(os.environ.get({!r}, 'none')); " + LONG

    async def play() -> list[int]:
        asked = [(nursery.NODE, "here"), (nursery.NODE, "there"), ("HF_HOME", "here"), ("HF_HOME", "there")]
        processes = [
            await start(code.format(f"{tmp_path}/{n}", name), **{name: v}) for n, (name, v) in enumerate(asked)
        ]
        plain = await start(code.format(f"{tmp_path}/4", nursery.NODE))
        await until(lambda: all((tmp_path / str(n)).exists() for n in range(5)))
        found = [nursery_of(process).pid for process in [*processes, plain]]
        assert len(set(found)) == 3 + 1  # the third made the first one retire, which takes no more requests
        assert found[0] == found[1]
        processes[0].kill()
        await processes[0].wait()
        assert is_alive(found[0])  # for its second process
        processes[1].kill()
        await until(lambda: not psutil.pid_exists(found[0]) or psutil.Process(found[0]).status() == "zombie")
        return found

    run(play())
    assert [(tmp_path / str(n)).read_text() for n in range(5)] == ["here", "there", "here", "there", "none"]


def test_a_start_that_is_given_up_leaves_no_process(run: Run) -> None:
    """Whether the process is forked by then or not."""

    async def play() -> None:
        waiting = asyncio.create_task(start(LONG))  # the nursery is still loading
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        process = await start(LONG)
        nursery = nursery_of(process)
        await until(lambda: [child.pid for child in nursery.children()] == [process.pid])
        process.kill()
        assert await process.wait() == -signal.SIGKILL

    run(play())


def test_the_death_of_a_nursery_ends_its_processes_and_the_next_start_makes_another(run: Run) -> None:
    async def play() -> None:
        processes = [await start(LONG) for _ in range(2)]
        first = nursery_of(processes[0])
        first.kill()
        assert [await process.wait() for process in processes] == [-signal.SIGKILL] * 2
        await until(lambda: not any(psutil.pid_exists(process.pid) for process in processes))
        again = await start(LONG)
        assert nursery_of(again) != first
        again.kill()
        await again.wait()

    run(play())


def test_a_nursery_that_dies_while_it_loads(run: Run, tmp_path: Path) -> None:
    """A start fails, and says so; it does not hang."""
    broken = textwrap.dedent(ROLES) + '\nsys.modules["instgenie.workers.finish"] = None\n'
    (tmp_path / "sitecustomize.py").write_text(broken)
    with pytest.raises(OSError, match="the nursery has died"):
        run(start(LONG))


@pytest.mark.parametrize("who", ["launcher", "nursery"])
def test_nothing_outlives_a_launcher_or_a_nursery_that_is_killed(who: str) -> None:
    code = f"""
        import asyncio, sys
        sys.path[:0] = {[str(Path(__file__).parent.parent), str(Path(__file__).parent)]!r}
        from test_nursery import LONG, nursery_of, start

        async def main():
            process = await start(LONG)
            print(nursery_of(process).pid, process.pid, flush=True)
            await process.wait()
            print("ended", flush=True)

        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pids = [int(word) for word in launcher.stdout.readline().split()]
        assert all(map(is_alive, pids))
        os.kill(launcher.pid if who == "launcher" else pids[0], signal.SIGKILL)
        assert launcher.stdout.read() == ("" if who == "launcher" else "ended\n")
    asyncio.run(until(lambda: not any(map(psutil.pid_exists, pids))))


def test_a_nursery_outlives_the_thread_that_started_it() -> None:
    """On Linux the end of a thread is the death of a parent to the processes that it started."""

    async def play() -> int:
        process = await start(LONG)
        parent = nursery_of(process).pid
        process.kill()
        await process.wait()
        return parent

    found = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(asyncio.run(play())))
        thread.start()
        thread.join()
    assert found[0] == found[1]


def test_a_nursery_with_threads_forks_nothing(run: Run, tmp_path: Path) -> None:
    """Its processes are started anew."""
    threads = "\nimport threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(ROLES) + threads)

    async def play() -> None:
        for _ in range(2):
            process = await start(LONG)
            assert psutil.Process(process.pid).ppid() == os.getpid()
            process.kill()
            assert await process.wait() == -signal.SIGKILL

    run(play())


CUDA = """
import torch
from safetensors.torch import save_file

generator = torch.Generator("cuda").manual_seed(7)
made = torch.randn(512, 512, generator=generator, device="cuda")
found = (made @ made.T).cpu()
save_file({"found": found, "devices": torch.tensor(torch.cuda.device_count())}, PLACE)
"""


@pytest.mark.gpu
def test_forked_processes_use_a_gpu(
    run: Run, with_torch: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them at once, and they compute what a process computes that was started anew."""
    import torch
    from safetensors.torch import load_file

    async def play() -> list[int]:
        monkeypatch.setattr(nursery, "FORKS_CUDA", True)
        config = replace(configure(""), device="cuda:0")
        variables = process_environment(config)
        places = [str(tmp_path / name) for name in ("one", "other", "anew")]
        configs = [replace(config, model=CUDA.replace("PLACE", repr(place))) for place in places]
        with open(os.devnull) as nothing:
            forked = [await start_process("finish", made, variables, nothing.fileno()) for made in configs[:2]]
            assert nursery_of(forked[0]) == nursery_of(forked[1])
            monkeypatch.setattr(launch, "can_fork", lambda _: False)
            anew = await start_process("finish", configs[2], variables, nothing.fileno())
        return [await process.wait() for process in (*forked, anew)]

    assert run(play()) == [0, 0, 0]
    one, other, anew = (load_file(tmp_path / name) for name in ("one", "other", "anew"))
    assert one["devices"] == 1
    assert torch.equal(one["found"], other["found"])
    assert torch.equal(one["found"], anew["found"])
