"""Registrations between the steps of a worker."""

from pathlib import Path

from helpers.workers import files, head_of, jobs, make_denoiser, register_on_disk, registering

from instgenie.cluster import wire
from instgenie.models.model import Model


def test_a_template_waits_for_an_idle_moment(small: Model) -> None:
    denoiser, tape = make_denoiser(small)
    tape.rounds.append([registering(small, "t"), jobs(small, ("a", 2))])
    denoiser.run()
    kinds = [type(message) for message, _ in tape.sent]
    assert kinds.index(wire.Denoised) < kinds.index(wire.Registered)
    assert denoiser.num_interruptions == 0
    assert tape.of(wire.Registered)[-1].num_registered_steps == 4


def test_an_urgent_template_does_not_wait(small: Model) -> None:
    denoiser, tape = make_denoiser(small)
    tape.rounds.append([registering(small, "t", urgent=True), jobs(small, ("a", 3))])
    denoiser.run()
    kinds = [type(message) for message, _ in tape.sent]
    assert kinds.index(wire.Denoised) > kinds.index(wire.Registered)
    assert denoiser.num_interruptions == 1


def test_a_template_larger_than_the_budget_fails(small: Model) -> None:
    denoiser, tape = make_denoiser(small, host_bytes=1000)
    tape.rounds.append([registering(small, "t")])
    denoiser.run()
    [failed] = tape.of(wire.JobFailed)
    assert (failed.id, failed.kind) == (head_of("t").id, "out_of_memory")


def test_a_registration_computes_only_missing_spans(small: Model, tmp_path: Path) -> None:
    assert [one.num_registered_steps for one in register_on_disk(small, tmp_path, "t", steps=12)] == [4, 8, 12]
    files(tmp_path)[1].unlink()
    assert [one.num_registered_steps for one in register_on_disk(small, tmp_path, "t", steps=12)] == [12]
    assert len(files(tmp_path)) == 3
    assert {path.stat().st_mode & 0o777 for path in files(tmp_path)} == {0o600}
