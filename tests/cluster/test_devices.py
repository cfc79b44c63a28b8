"""Workers on several devices: what their processes see of the machine, and when they take the memory that is left."""

import asyncio
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.clusters import Run, until
from helpers.launching import LOADED, LOADING, READY, ScriptedLauncher

from instgenie.cluster import environment, wire
from instgenie.cluster.cluster import Cluster
from instgenie.cluster.config import UNTOLD_HOST_BYTES, CacheConfig, ClusterConfig, process_config, resolve
from instgenie.cluster.environment import process_environment, seen_device
from instgenie.cluster.launch import LocalLauncher
from instgenie.machine import cores
from instgenie.server import config as server_config
from instgenie.server.config import choose_devices

MEMORY = 2**30


@contextmanager
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[list[str], dict[str, str]]]]:
    """The commands and environments of processes, none of which is started."""
    seen = []

    async def start(*command: str, env: dict[str, str], **_: Any) -> None:
        seen.append((list(command), env))

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", start)
        yield seen


@pytest.mark.parametrize(
    ("inherited", "expected"),
    [(None, ["0", "1", "0"]), ("2,3", ["2", "3", "2"]), ("GPU-a, GPU-b", ["GPU-a", "GPU-b", "GPU-a"])],
)
def test_each_process_sees_its_own_device_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch, inherited: str | None, expected: list[str]
) -> None:
    """Three workers on a machine that has two devices. Inside its process each device is the first one."""
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    if inherited is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", inherited)
    monkeypatch.setattr(server_config, "count_gpus", lambda: 2)
    devices = choose_devices("auto", 3)
    assert devices == ("cuda:0", "cuda:1", "cuda:0")
    config = resolve(ClusterConfig(devices=devices), MEMORY)
    with launched(monkeypatch) as processes:
        for worker, device in enumerate(devices):
            for role in config.roles:
                made = process_config(config, f"{worker}.{role}.1", device, "ipc://here")
                run(LocalLauncher().start(worker, role, made))
    assert {made["OMP_WAIT_POLICY"] for _, made in processes} == {"PASSIVE"}
    seen = [(made["CUDA_VISIBLE_DEVICES"], '"device":"cuda:0"' in command[-1]) for command, made in processes]
    assert seen == [(id, True) for id in expected for _ in config.roles]
    assert ['"num_sharing":2' in command[-1] for command, _ in processes[::3]] == [True, False, True]


def test_a_process_on_the_cpu_sees_no_gpu_and_an_unknown_device_is_left_to_the_process() -> None:
    """A process that does not see its device says so; one that saw another would use that."""
    assert seen_device("cpu", {}) == ("cpu", "")
    assert seen_device("cuda:2", {"CUDA_VISIBLE_DEVICES": "4,5"}) == ("cuda:2", None)
    assert seen_device("cuda:0", {"CUDA_VISIBLE_DEVICES": ""}) == ("cuda:0", "")
    assert seen_device("auto", {}) == ("auto", None)


def test_workers_share_the_cores_and_their_threads_sleep_while_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "available_cores", lambda: 16)
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)

    def variables(num_workers: int) -> tuple[str, str]:
        config = resolve(ClusterConfig(devices=("cpu",) * num_workers), MEMORY)
        made = process_environment(process_config(config, "0.denoise.1", "cpu", "ipc://here"))
        return made["OMP_NUM_THREADS"], made["OMP_WAIT_POLICY"]

    assert [variables(number) for number in (1, 3, 64)] == [("16", "PASSIVE"), ("5", "PASSIVE"), ("1", "PASSIVE")]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert variables(3) == ("7", "ACTIVE")


def test_cores_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert cores.available_cores() == 8
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cores.available_cores() == 8
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert cores.available_cores() == 2
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    for given, expected in (("-1", 8), ("50000", 1), ("400000", 4)):
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(given)
        assert cores.available_cores() == expected


def test_cores_near_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "PCI_DEVICES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 9, 10})
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "local_cpulist").write_text("2-3,8-9\n")
    assert cores.cores_near("0000:1b:00.0") == {2, 9}
    assert cores.cores_near("0000:1c:00.0") == set()


def test_memory_is_taken_once_all_processes_on_the_device_have_loaded(run: Run) -> None:
    """Two workers share a device, the third has its own. A process that cannot load is not waited for."""

    def script(worker: int, role: str) -> list[wire.Message | None]:
        if (worker, role) == (1, "finish"):
            return [LOADING, READY]
        return [LOADED] if role == "denoise" else [READY]

    launcher = ScriptedLauncher(script)

    async def play() -> list[list[int]]:
        cluster = Cluster(ClusterConfig(model="tiny", devices=("cuda:0", "cuda:0", "cuda:1")), launcher)
        launcher.memory = MEMORY / 4  # the weights take the rest
        await cluster.start()
        try:
            await until(lambda: cluster.workers[2].is_ready)
            await until(lambda: all(cluster.workers[worker].denoiser.is_loaded for worker in (0, 1)))
            assert [worker.denoiser.has_begun for worker in cluster.workers] == [False, False, True]
            launcher.starts[1, "finish"][0].kill()
            await until(lambda: all(worker.is_ready for worker in cluster.workers))
            launcher.memory = 1000.0  # activations fill what is left
            launcher.starts[0, "denoise"][0].kill()
            await until(lambda: len(launcher.starts[0, "denoise"]) == 2 and cluster.workers[0].is_ready)
            assert cluster.host_bytes == 3 * MEMORY // 8
            return [process.budgets for process in launcher.starts[0, "denoise"] + launcher.starts[2, "denoise"]]
        finally:
            await cluster.stop(0)

    assert run(play()) == [[MEMORY // 8]] * 3


def test_a_budget_that_the_user_names_is_not_measured_again(run: Run) -> None:
    launcher = ScriptedLauncher(lambda _, role: [LOADED] if role == "denoise" else [READY])

    async def play() -> None:
        cluster = Cluster(ClusterConfig(model="tiny", devices=("cpu",), cache=CacheConfig(host_bytes=MEMORY)), launcher)
        launcher.memory = 1000.0
        await cluster.start()
        await cluster.until_ready()
        await cluster.stop(0)

    run(play())
    assert launcher.starts[0, "denoise"][0].budgets == [MEMORY]


def test_each_worker_gets_half_of_what_its_own_node_has(run: Run) -> None:
    """The nodes are unknown when the cluster starts, and one of them never tells its memory."""
    launcher = ScriptedLauncher(lambda _, role: [LOADED] if role == "denoise" else [READY])
    launcher.memory, launcher.node_memory = math.inf, {0: 100.0 * MEMORY, 1: 1.0 * MEMORY}

    async def play() -> None:
        cluster = Cluster(ClusterConfig(model="tiny", devices=("cpu", "cpu", "cpu")), launcher)
        await cluster.start()
        await until(lambda: all(worker.is_ready for worker in cluster.workers))
        assert cluster.host_bytes == 50 * MEMORY + MEMORY // 2 + UNTOLD_HOST_BYTES
        await cluster.stop(0)

    run(play())
    budgets = [launcher.starts[worker, "denoise"][0].budgets for worker in range(3)]
    assert budgets == [[50 * MEMORY], [MEMORY // 2], [UNTOLD_HOST_BYTES]]
