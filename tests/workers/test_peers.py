"""Step loops that share templates: through each other's memory, through a remote tier, and across versions."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.workers import Tape, found, head_of, jobs, make_config, registering

from instgenie.cluster import wire
from instgenie.models.model import Model
from instgenie.workers.denoise import Denoiser

Make = Callable[..., tuple[Denoiser, Tape]]


@pytest.fixture
def make(small: Model, tmp_path: Path) -> Any:
    """Makes loops that serve peers. They end with the test, as processes would that are killed."""
    made: list[Denoiser] = []

    def start(**cache: Any) -> tuple[Denoiser, Tape]:
        tape = Tape()
        config = replace(make_config(**cache), peer_address=f"ipc://{tmp_path}/{len(made)}")
        denoiser = Denoiser(config, small, tape)  # type: ignore[arg-type]
        tape.is_busy = lambda: denoiser.queue.groups or denoiser.registrar.pending
        made.append(denoiser)
        return denoiser, tape

    yield start
    for denoiser in made:
        die(denoiser)
        denoiser.templates.store.close()


def die(denoiser: Denoiser) -> None:
    """End the service of peers, as the death of a process does."""
    if denoiser.peer_server:
        denoiser.peer_server.close()
        denoiser.peer_server = None


def play(denoiser: Denoiser, tape: Tape, *messages: Any) -> None:
    """Handle messages until there is nothing left to do, without ending the loop."""
    tape.rounds.append(list(messages))
    while tape.rounds or tape.is_busy() or denoiser.engine.jobs:
        denoiser.hear(wait=denoiser.is_idle)
        denoiser.join()
        denoiser.step()
        denoiser.register()


def job_of(small: Model, name: str, peers: tuple[str, ...] = (), is_sure: bool = True) -> Any:
    message, frames = jobs(small, (name, 4), template=head_of("t"), is_sure=is_sure)
    assert isinstance(message, wire.Denoise)
    told = wire.Denoise(tuple(wire.Denoising(**fields_of(job) | {"peers": peers}) for job in message.jobs))
    return told, frames


def fields_of(job: wire.Denoising) -> dict[str, Any]:
    return {name: getattr(job, name) for name in job.__struct_fields__}


def latents(tape: Tape) -> list[bytes]:
    return [frames[0] for message, frames in tape.sent if isinstance(message, wire.Denoised)]


@pytest.mark.parametrize("kept", [{}, {"stride": 3}, {"stride": 2, "dtype": "int4"}], ids=str)
def test_a_template_is_copied_from_a_peer_and_makes_the_same_latents(
    small: Model, make: Make, kept: dict[str, Any]
) -> None:
    (first, tape), (second, other) = make(**kept), make(**kept)
    play(first, tape, registering(small, "t"))
    play(first, tape, job_of(small, "a"))
    assert first.peer_server
    play(second, other, job_of(small, "a", (first.peer_server.address,)))
    assert (found(tape), found(other)) == ({"a": "host"}, {"a": "peer"})
    assert latents(other) == latents(tape)
    [fetched] = other.of(wire.Fetched)
    assert (fetched.tier, fetched.num_bytes) == ("peer", first.peer_server.num_bytes_sent - padding(first))
    assert not other.of(wire.Registered)
    die(first)
    play(second, other, job_of(small, "b", ("ipc:///nowhere",)))
    assert found(other)["b"] == "host"  # it has its own copy


def test_workers_that_keep_other_steps_or_bits_share_no_rows(small: Model, make: Make, tmp_path: Path) -> None:
    remote = (tmp_path / "remote").as_uri()
    (first, tape), *others = (make(remote=remote, **kept) for kept in ({}, {"stride": 2}, {"dtype": "int4"}))
    play(first, tape, registering(small, "t"))
    first.templates.store.settle()
    assert first.peer_server
    for denoiser, other in others:
        play(denoiser, other, job_of(small, "a", (first.peer_server.address,), is_sure=False))
        assert found(other) == {"a": None}
    assert first.peer_server.num_bytes_sent == 0


def padding(denoiser: Denoiser) -> int:
    [key] = denoiser.templates.store.memory[0].all()
    store = denoiser.templates.store
    span = store.get(key)
    assert span
    return store.num_bytes(key) - span.span.num_bytes


def test_a_peer_that_died_costs_a_registration_and_not_the_edit(small: Model, make: Make) -> None:
    (first, tape), (second, other) = make(), make()
    play(first, tape, registering(small, "t"))
    assert first.peer_server
    address = first.peer_server.address
    die(first)
    play(second, other, job_of(small, "a", (address,)))
    assert [message.id for message in other.of(wire.Missing)] == ["a"]
    play(second, other, registering(small, "t", urgent=True))
    play(second, other, job_of(small, "a"))
    assert found(other) == {"a": "host"}


def test_a_dead_peers_template_comes_from_the_remote_tier(small: Model, make: Make, tmp_path: Path) -> None:
    """The template is fresh: the second process was there before it, and its cluster does not know it."""
    remote = (tmp_path / "remote").as_uri()
    (first, tape), (second, other) = make(remote=remote), make(remote=remote)
    play(first, tape, registering(small, "t"))
    play(first, tape, job_of(small, "a"))
    first.templates.store.settle()
    assert first.peer_server
    address = first.peer_server.address
    die(first)
    play(second, other, job_of(small, "a", (address,), is_sure=False))
    assert found(other) == {"a": "remote"}
    assert latents(other) == latents(tape)


def test_memory_evicts_only_what_the_remote_tier_has(small: Model, make: Make, tmp_path: Path) -> None:
    """Cold templates live in the remote tier: memory has room for one, and all are found again."""
    measuring, tape = make()
    play(measuring, tape, registering(small, "t"))
    num_bytes = measuring.templates.store.memory[0].usage().num_bytes
    denoiser, tape = make(remote=(tmp_path / "remote").as_uri(), host_bytes=num_bytes)
    names = ["t", "u", "v"]
    for name in names:
        play(denoiser, tape, registering(small, name))
    store = denoiser.templates.store
    assert store.status()["host"].num_evictions == 2
    store.settle()
    keys = [denoiser.templates.keys.find(head_of(name)) for name in names]
    assert store.remote
    assert [store.remote.missing(key, key.spans) for key in keys] == [[], [], []]
    tiers = [one.tier for key in keys if (one := store.get(key))]
    assert tiers == ["remote"] * 3


def test_two_versions_side_by_side_share_a_store_and_no_rows(
    small: Model, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rolling upgrade: both versions register the same picture, and name each other as peers."""
    remote = (tmp_path / "remote").as_uri()
    loops = {"older": make(remote=remote), "newer": make(remote=remote)}
    addresses = tuple(loop.peer_server.address for loop, _ in loops.values() if loop.peer_server)
    for version, (loop, tape) in loops.items():
        monkeypatch.setattr("instgenie.engine.register.code_version", lambda version=version: version)
        play(loop, tape, job_of(small, "a", addresses, is_sure=False))
        assert found(tape) == {"a": None}  # the other version's rows are not read
        play(loop, tape, registering(small, "t"))
        play(loop, tape, job_of(small, "b", addresses))
        assert found(tape)["b"] == "host"
        [registered] = [one for one in tape.of(wire.Registered) if one.num_registered_steps == one.num_steps]
        assert registered.num_steps == 4
        loop.templates.store.settle()
        tape.is_busy = lambda tape=tape: not tape.of(wire.Listed)
        play(loop, tape, (wire.List("these"), []))
        [listed] = tape.of(wire.Listed)
        assert [listing.template.picture for listing in listed.templates] == ["t"]
    assert not any(tape.of(wire.Fetched) for _, tape in loops.values())
    assert len(list((tmp_path / "remote").iterdir())) == 2
    assert latents(loops["older"][1]) == latents(loops["newer"][1])  # here the code is in fact the same
