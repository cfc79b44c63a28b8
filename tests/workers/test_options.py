"""Options of `instgenie serve` that take effect in a worker: from the flag, through the command line of the process, to
the part that obeys."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from helpers.workers import Tape, found, head_of, jobs, registering

from instgenie.cache.memory import MemoryTier
from instgenie.cli import main
from instgenie.cluster import wire
from instgenie.cluster.cluster import Cluster
from instgenie.cluster.config import ControlConfig, LoraConfig, ProcessConfig, process_config
from instgenie.engine.graphs import make_graphs
from instgenie.models.model import Model
from instgenie.server.config import read_config
from instgenie.workers import budget, templates
from instgenie.workers.budget import with_budget
from instgenie.workers.denoise import Denoiser

GIB = 2**30


def config_of(**flags: str | bool) -> ProcessConfig:
    """The configuration of a process, as it reads it from its command line."""
    cluster = Cluster(read_config({"device": "cpu", **flags}, {}).cluster)
    made = process_config(cluster.config, "0.denoise.1", "cpu", "ipc://here")
    return msgspec.json.decode(msgspec.json.encode(made), type=ProcessConfig)


@pytest.mark.parametrize("plan", ["cached", "greedy", "exact"])
def test_plan(small: Model, plan: str) -> None:
    """A step loop plans by the policy that was asked for, and edits that reuse activations run with it."""
    tape = Tape()
    denoiser = Denoiser(config_of(plan=plan, host_cache_gib="1"), small, tape)  # type: ignore[arg-type]
    tape.is_busy = lambda: denoiser.queue.groups or denoiser.registrar.pending
    tape.rounds.extend([[registering(small, "picture")], [], [jobs(small, ("a", 4), template=head_of("picture"))]])
    planned: list[Any] = []
    if planning := denoiser.engine.planning:
        choose = planning.choose
        planning.choose = lambda *given: planned.append(choose(*given)) or planned[-1]  # type: ignore[method-assign, func-returns-value]
    denoiser.run()
    assert (planning.policy if planning else "cached") == plan
    assert bool(planned) == (plan != "cached")
    assert found(tape) == {"a": "host"}
    assert [message.id for message in tape.of(wire.Denoised)] == ["a"]


@pytest.mark.parametrize(("given", "expected"), [("1.5", GIB * 3 // 2), ("0", None), ("auto", 8 * GIB)])
def test_gpu_cache_gib(monkeypatch: pytest.MonkeyPatch, given: str, expected: int | None) -> None:
    """The tier gets the bytes that were asked for, or half of those that are free and that no
    adapter may take; a CPU worker has no such tier."""

    class PlainGpuTier(MemoryTier):
        name = "gpu"

        def __init__(self, device: torch.device, max_bytes: int) -> None:
            super().__init__(max_bytes)

    monkeypatch.setattr(templates, "GpuTier", PlainGpuTier)
    monkeypatch.setattr(budget, "available_bytes", lambda device: 16.0 * GIB)
    config = replace(config_of(gpu_cache_gib=given, host_cache_gib="0"), loras=LoraConfig(), controls=ControlConfig())

    def sizes(device: str) -> list[int]:
        cache = with_budget(config, config.cache.host_bytes, torch.device(device)).cache
        return [tier.max_bytes for tier in templates.open_store(cache, torch.device(device)).memory]

    assert sizes("cuda:0") == ([] if expected is None else [expected])
    assert sizes("cpu") == []


def test_dtype_graphs_and_the_size_of_the_disk(small: Model, tmp_path: Path) -> None:
    config = config_of(dtype="bfloat16", graphs=False, cache_dir=str(tmp_path), disk_cache_gib="0.5")
    assert (config.dtype, config.graphs) == ("bfloat16", False)
    assert make_graphs(small, config.graphs) is None
    disk = templates.open_store(config.cache, torch.device("cpu")).lasting[0]
    assert (disk.name, disk.max_bytes) == ("disk", GIB // 2)


@pytest.mark.parametrize("flags", [["--plan", "fast"], ["--gpu-cache-gib", "-1"], ["--gpu-cache-gib", "much"]])
def test_values_that_make_no_sense(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *flags]) == 2
    assert flags[0].removeprefix("--") in capsys.readouterr().err


def test_peer_bandwidth(tmp_path: Path) -> None:
    """A worker that has peers serves them with the bandwidth that was asked for; one without opens no socket."""
    config = config_of(peer_bandwidth="0.25", host_cache_gib="1")
    store = templates.open_store(config.cache, torch.device("cpu"), has_peers=True)
    server = templates.serve_peers(store, f"ipc://{tmp_path}/peer", config.cache.peer_bytes_per_second)
    assert server
    assert store.peers
    assert server._throttle.bytes_per_second == 0.25e9
    server.close()
    store.close()
    assert templates.serve_peers(store, "", 1e9) is None
    assert templates.serve_peers(store, "ipc:///no/such/folder", 1e9) is None
    assert templates.open_store(config.cache, torch.device("cpu")).peers is None


def test_lora_weights_gib(small: Model) -> None:
    """A step loop keeps as many bytes of weights with LoRAs as were asked for, by default none."""
    for flags, expected in (({}, 0), ({"lora_weights_gib": "1.5"}, GIB * 3 // 2)):
        denoiser = Denoiser(config_of(host_cache_gib="1", **flags), small, Tape())  # type: ignore[arg-type]
        assert denoiser.engine.copying.max_bytes == expected
