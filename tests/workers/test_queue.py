"""The queue of a worker: jobs that wait for activations, or for room."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.changed import choose_by_blocks
from helpers.edits import make_edit, prepare
from helpers.workers import (
    SIZE,
    batches,
    denoiser_of,
    found,
    head_of,
    jobs,
    make_config,
    make_denoiser,
    memory_status,
    register_on_disk,
)

from instgenie.cache.disk import DiskTier
from instgenie.cluster import wire
from instgenie.engine.own import reuse_own
from instgenie.jobs.activations import Key, Span
from instgenie.models.model import Model
from instgenie.workers.queue import partial_steps


def test_partial_pictures_are_spread_over_the_steps() -> None:
    assert partial_steps(28, 3) == (7, 14, 21)
    assert partial_steps(4, 1) == (2,)
    assert partial_steps(2, 3) == (1,)
    assert partial_steps(1, 3) == ()
    assert partial_steps(10, 0) == ()


@pytest.mark.parametrize(
    ("head", "tier"),
    [
        (head_of("t"), "disk"),
        (head_of("t", tenant="you"), None),
        (head_of("t", weights="others"), None),
        (head_of("u"), None),
    ],
)
def test_activations_that_another_process_left_on_disk(
    small: Model, tmp_path: Path, head: wire.TemplateHead, tier: Any
) -> None:
    register_on_disk(small, tmp_path, "t")
    denoiser, tape = make_denoiser(small, disk=str(tmp_path))
    tape.rounds.append([jobs(small, ("a", 4), template=head, is_sure=False)])
    denoiser.run()
    assert found(tape) == {"a": tier}
    [denoised] = tape.of(wire.Denoised)
    num_tokens = SIZE[0] * SIZE[1] // small.patch**2
    assert (denoised.num_computed_tokens < num_tokens) == (tier is not None)
    assert denoiser.num_interruptions == 0


def test_the_tier_reported_is_that_when_the_job_was_announced(small: Model, tmp_path: Path) -> None:
    register_on_disk(small, tmp_path, "t")
    denoiser, tape = make_denoiser(small, disk=str(tmp_path))
    key = denoiser.templates.keys.find(head_of("t"))
    denoiser.mailbox.handlers[wire.Fetch](wire.Fetch("a", head_of("t")), [])
    assert denoiser.templates.store.get(key) is not None
    both = [jobs(small, (name, 4), template=head_of("t")) for name in "ab"]
    tape.rounds.append(both)
    denoiser.run()
    assert found(tape) == {"a": "disk", "b": "host"}


class SlowDisk:
    """Loads only once `go` is set, and counts the loads."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.num_loads = 0
        load = DiskTier.load

        def slow_load(tier: DiskTier, key: Key, steps: range) -> Span | None:
            assert self.go.wait(60)
            self.num_loads += 1
            return load(tier, key, steps)

        patch.setattr(DiskTier, "load", slow_load)


def test_a_job_that_waits_for_the_disk_lets_others_go_first(
    small: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_on_disk(small, tmp_path, "t")
    disk = SlowDisk(monkeypatch)
    denoiser, tape = make_denoiser(small, disk=str(tmp_path))
    tape.rounds.append([jobs(small, (name, 4), template=head_of("t")) for name in "ab"])
    tape.rounds.extend([[jobs(small, ("c", 3))], [], [], []])
    hand_over = denoiser.hand_over

    def note(running: Any) -> None:
        disk.go.set()
        hand_over(running)

    denoiser.hand_over = note  # type: ignore[method-assign]
    denoiser.run()
    assert batches(tape) == ["c", "c", "c", "ab", "ab", "ab", "ab"]
    assert found(tape) == {"a": "disk", "b": "disk"}
    assert disk.num_loads == 1  # for both
    assert denoiser.num_interruptions == 0


def test_a_job_waits_for_room(small: Model, tmp_path: Path) -> None:
    register_on_disk(small, tmp_path, "t", "u")
    [num_bytes] = {tier.num_bytes for tier in memory_status(small, tmp_path, "t", "u")}
    denoiser, tape = make_denoiser(small, disk=str(tmp_path), host_bytes=num_bytes)
    tape.rounds.append([jobs(small, ("a", 4), template=head_of("t"))])
    send = tape.send

    def send_and_queue(message: wire.Message, frames: Sequence[wire.Frame] = ()) -> None:
        send(message, frames)
        if isinstance(message, wire.Joined) and message.jobs[0].id == "a":
            denoiser.templates.fetcher._pinner.submit(lambda: None).result()
            tape.rounds.append([jobs(small, ("b", 4), template=head_of("u"))])

    tape.send = send_and_queue  # type: ignore[method-assign]
    denoiser.run()
    assert batches(tape) == ["a"] * 4 + ["b"] * 4
    assert found(tape) == {"a": "disk", "b": "disk"}
    assert denoiser.templates.store.status()["host"].num_bytes <= num_bytes


def test_a_job_that_fits_nowhere_is_computed_in_full(small: Model, tmp_path: Path) -> None:
    register_on_disk(small, tmp_path, "t")
    denoiser, tape = make_denoiser(small, disk=str(tmp_path), host_bytes=1000)
    tape.rounds.append([jobs(small, ("a", 4), template=head_of("t"))])
    denoiser.run()
    assert found(tape) == {"a": None}
    assert len(tape.of(wire.Denoised)) == 1


def test_jobs_are_cut_into_parts_that_fit_when_they_have_their_templates(
    small: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for the rows of blocks of two jobs that read a template, and not for those of one without."""
    changed = choose_by_blocks(small, monkeypatch)
    dense = prepare(make_edit(size=SIZE, share=0.1), small)
    own_bytes = 2 * changed.bytes_of(reuse_own(dense))
    assert own_bytes < changed.bytes_of(dense)
    register_on_disk(small, tmp_path, "t")
    config = make_config(max_batch_size=4, disk=str(tmp_path), own_bytes=own_bytes)
    denoiser, tape = denoiser_of(replace(config, reuse_changed=0.6), small)
    tape.rounds.append([jobs(small, *((name, 4) for name in "abc"), template=head_of("t"), share=0.1)])
    denoiser.run()
    assert batches(tape) == ["ab"] * 4 + ["c"] * 4
