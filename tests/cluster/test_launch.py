"""Launchers: child processes on this machine, and processes that are reached over TCP and have no parent to check."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import psutil
import pytest
import zmq
from helpers.clusters import (
    TENANT,
    Run,
    are_equal,
    collect,
    edit,
    edit_alone,
    is_alive,
    kill,
    make_config,
    make_order,
    pictures,
    pid_of,
    register,
    until,
)

from instgenie.cluster import wire
from instgenie.cluster.cluster import Cluster
from instgenie.cluster.config import ProcessConfig, Role
from instgenie.cluster.environment import process_environment
from instgenie.cluster.launch import LocalLauncher, process_command
from instgenie.cluster.orders import Event, Failed, Finished
from instgenie.errors import ClosedError
from instgenie.models.model import Model

GIB = 2**30


class TcpProcess:
    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.child = child

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def is_alive(self) -> bool:
        return self.child.poll() is None

    async def wait(self) -> int:
        while self.is_alive:
            await asyncio.sleep(0.01)
        return self.child.returncode

    def kill(self) -> None:
        self.child.kill()


class TcpLauncher:
    """Starts processes as another machine would: over TCP, in sessions of their own, without a parent. The first two
    starts fail."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.num_failures = 2
        self.is_closed = False

    secret = ""
    shares_devices = True

    def worker_bytes(self, num_workers: int, worker: int | None = None) -> float:
        return 2.0 * GIB

    def open(self) -> str:
        return "tcp://127.0.0.1:*"

    def endpoint(self, bound: str) -> str:
        return bound.replace("127.0.0.1", "localhost")

    async def start(self, worker: int, role: Role, config: ProcessConfig) -> TcpProcess:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError("the node is away")
        command = process_command(role, config)
        self.commands.append(command)
        return TcpProcess(subprocess.Popen(command, env=process_environment(), cwd="/", start_new_session=True))

    def release(self) -> bool:
        return False

    def close(self) -> None:
        self.is_closed = True


def test_a_cluster_over_tcp_without_a_parent(
    run: Run, folders: dict[str, Path], environment: None, models: dict[str, Model]
) -> None:
    """Starts that fail are tried again, edits come out as the engine makes them, and a killed process costs no edit."""
    order, launcher = make_order(steps=36), TcpLauncher()

    async def play() -> tuple[list[Event], int]:
        cluster = Cluster(make_config(folders["sd"], batching="naive"), launcher)
        await cluster.start()
        await until(lambda: cluster.status().workers[0].processes[0].message)
        assert cluster.status().workers[0].processes[0].message == "could not be started: the node is away"
        assert cluster.healthy
        await cluster.until_ready()
        assert cluster.status().workers[0].processes[0].num_starts == 3
        own = await edit(cluster, order)
        await register(cluster, TENANT, order)
        cached = await edit(cluster, order)
        collecting = asyncio.create_task(edit(cluster, order))
        await until(lambda: cluster.status().workers[0].running)
        kill(cluster, "denoise")
        events = own + cached + await collecting
        pid = pid_of(cluster, "denoise")
        assert await cluster.stop(60)
        return events, pid

    events, pid = run(play())
    own, cached, again = pictures(events)
    assert are_equal([own, again], [edit_alone(order, models["sd"]), cached])
    facts = [event.facts for event in events if isinstance(event, Finished)]
    assert [(one.cache_tier, one.num_attempts) for one in facts] == [(None, 1), ("host", 1), ("host", 2)]
    configs = [json.loads(command[-1]) for command in launcher.commands]
    assert {config["parent"] for config in configs} == {None}
    assert {config["endpoint"].rsplit(":", 1)[0] for config in configs} == {"tcp://localhost"}
    assert {config["cache"]["host_bytes"] for config in configs} == {GIB}
    assert launcher.is_closed
    assert not is_alive(pid)


class StuckLauncher(TcpLauncher):
    """Never gets a process started."""

    async def start(self, worker: int, role: Role, config: ProcessConfig) -> TcpProcess:
        await asyncio.sleep(3600)
        raise OSError


class BrokenLauncher(TcpLauncher):
    async def start(self, worker: int, role: Role, config: ProcessConfig) -> TcpProcess:
        raise ValueError("a mistake in the launcher")


def test_a_start_that_hangs_does_not_keep_a_cluster_from_stopping(run: Run, tmp_path: Path) -> None:
    launcher = StuckLauncher()

    async def play() -> None:
        cluster = Cluster(make_config(tmp_path), launcher)
        await cluster.start()
        async with asyncio.timeout(60):
            await cluster.stop(0.1)

    run(play())
    assert launcher.is_closed


def test_a_process_that_connects_again_is_heard_before_its_first_connection_ends(run: Run, tmp_path: Path) -> None:
    async def play() -> None:
        cluster = Cluster(make_config(tmp_path), StuckLauncher())
        await cluster.start()
        denoiser = cluster.workers[0].denoiser
        await until(lambda: denoiser.num_starts)
        with zmq.Context() as context, context.socket(zmq.DEALER) as first, context.socket(zmq.DEALER) as second:
            for connection in (first, second):
                connection.setsockopt_string(zmq.IDENTITY, denoiser.name)
                connection.connect(cluster._supervisor._endpoint)
                denoiser.is_loaded = False
                connection.send(wire.encode(wire.Loaded()))
                await until(lambda: denoiser.is_loaded)
        await cluster.stop(0.1)

    run(play())


def test_a_cluster_whose_launcher_breaks_is_unhealthy(run: Run, tmp_path: Path) -> None:
    async def play() -> None:
        cluster = Cluster(make_config(tmp_path), BrokenLauncher())
        await cluster.start()
        await until(lambda: not cluster.healthy)
        await cluster.stop(0.1)

    run(play())


def test_local_sockets_are_in_a_private_folder() -> None:
    launcher = LocalLauncher()
    address = launcher.open()
    folder = Path(address.removeprefix("ipc://")).parent
    assert launcher.endpoint(address) == address
    assert folder.stat().st_mode & 0o777 == 0o700
    launcher.close()
    assert not folder.exists()


def test_workers_do_not_outlive_a_parent_that_is_killed(folders: dict[str, Path], environment: None) -> None:
    code = f"""
        import asyncio
        from instgenie.cluster.cluster import Cluster
        from instgenie.cluster.config import ClusterConfig

        async def main():
            cluster = Cluster(ClusterConfig(model={str(folders["sd"])!r}, devices=("cpu",), batching="naive"))
            await cluster.start()
            await cluster.until_ready()
            print(cluster.status().workers[0].pid, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    asyncio.run(until(lambda: not is_alive(pid)))


def test_a_model_that_is_not_there(run: Run, tmp_path: Path) -> None:
    async def play() -> None:
        cluster = Cluster(make_config(tmp_path, batching="naive"))
        await cluster.start()
        [ticket] = cluster.submit([make_order()])
        [failed] = await collect([ticket])
        assert isinstance(failed, Failed)
        assert "model_index.json" in failed.message
        assert not cluster.healthy
        with pytest.raises(ClosedError, match=r"model_index\.json"):
            await cluster.until_ready()
        await cluster.stop(1)

    run(play())


STUCK = """
    import sys

    class Stuck:
        def find_spec(self, name, *others):
            if name == "torch":
                import time
                print("loading", flush=True)
                time.sleep(3600)

    sys.meta_path.insert(0, Stuck())
"""


def test_processes_that_are_loading_do_not_outlive_a_parent_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are bound to their parent before they import anything that takes time; here that takes an hour."""
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(STUCK))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    code = """
        import asyncio
        from instgenie.cluster.cluster import Cluster
        from instgenie.cluster.config import ClusterConfig

        async def main():
            cluster = Cluster(ClusterConfig(model="builtin", devices=("cpu",), batching="naive"))
            await cluster.start()
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "loading\n"
        [child] = psutil.Process(parent.pid).children()
        parent.kill()
    try:
        child.wait(60)
    finally:
        if child.is_running():
            child.kill()


def test_the_folder_of_a_killed_server_is_deleted_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of living servers stay, and so do folders that are none of ours."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "instgenie-bench-1").mkdir()
    code = """
        import tempfile, time
        from instgenie.cluster.launch import LocalLauncher

        tempfile.tempdir = {!r}
        print(LocalLauncher().open(), flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(code.format(str(tmp_path)))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        folder = Path(other.stdout.readline().strip().removeprefix("ipc://")).parent
        first = LocalLauncher()
        first.open()
        assert folder.is_dir()
        other.kill()
    second = LocalLauncher()
    second.open()
    assert not folder.exists()
    assert len(list(tmp_path.iterdir())) == 3
    first.close()
    second.close()
    assert [path.name for path in tmp_path.iterdir()] == ["instgenie-bench-1"]
