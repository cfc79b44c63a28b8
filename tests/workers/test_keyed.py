"""Jobs with an idempotency key in the step loop: each key is denoised once."""

from typing import Any

import msgspec
import pytest
from helpers.workers import Tape, batches, jobs, make_denoiser

from instgenie.cluster import wire
from instgenie.models.model import Model
from instgenie.scheduling.terms import NO_DEADLINE, Terms
from instgenie.workers.denoise import Denoiser
from instgenie.workers.keyed import HeldLatents, shared_terms
from instgenie.workers.locker import Locker


def keyed(message: tuple[wire.Message, list[wire.Frame]], key: str) -> tuple[wire.Message, Any]:
    denoise, frames = message
    assert isinstance(denoise, wire.Denoise)
    given = tuple(msgspec.structs.replace(job, key=key) for job in denoise.jobs)
    return wire.Denoise(given), frames


def make(model: Model, max_bytes: int = 2**20, seconds: float = 60.0) -> tuple[Denoiser, Tape]:
    denoiser, tape = make_denoiser(model)
    denoiser.keyed.held = Locker(max_bytes, seconds)
    return denoiser, tape


def latents(tape: Tape) -> dict[str, bytes]:
    return {message.id: frames[0] for message, frames in tape.sent if isinstance(message, wire.Denoised)}


def test_a_job_follows_the_one_with_its_key(small: Model) -> None:
    denoiser, tape = make(small)
    one, other = (keyed(jobs(small, (name, 4)), "key") for name in "ab")
    tape.rounds.extend([[one], [], [other]])
    denoiser.run()
    assert batches(tape) == ["a", "a", "ab", "ab"]
    assert latents(tape)["a"] == latents(tape)["b"]
    assert [len(joined.jobs) for joined in tape.of(wire.Joined)] == [1, 1]
    assert denoiser.num_joined == 1
    assert denoiser.keyed.running == {}


def test_latents_are_held_for_the_next_who_asks(small: Model) -> None:
    denoiser, tape = make(small)
    tape.rounds.extend([[keyed(jobs(small, ("a", 2)), "key")], [], [], [keyed(jobs(small, ("b", 2)), "key")]])
    denoiser.run()
    assert batches(tape) == ["a", "a"]
    assert latents(tape)["a"] == latents(tape)["b"]


def test_without_a_key_each_job_is_run_and_nothing_is_held(small: Model) -> None:
    denoiser, tape = make(small)
    tape.rounds.extend([[jobs(small, ("a", 2))], [], [], [jobs(small, ("b", 2))]])
    denoiser.run()
    assert batches(tape) == ["a", "a", "b", "b"]
    assert not denoiser.keyed.held.names


def test_one_asker_leaves_and_the_other_stays(small: Model) -> None:
    """In both orders; the last one takes the job with it."""
    for first, second in (("a", "b"), ("b", "a")):
        denoiser, tape = make(small)
        both = [keyed(jobs(small, ("a", 6)), "key"), keyed(jobs(small, ("b", 6)), "key")]
        tape.rounds.extend([both, [(wire.Cancel(first), [])], [(wire.Cancel(second), [])]])
        denoiser.run()
        assert batches(tape) == ["ab", second]
        assert [dropped.id for dropped in tape.of(wire.Dropped)] == [first, second]
        assert not denoiser.keyed.running
        assert not denoiser.engine.jobs


def test_another_job_with_the_same_key_is_run(small: Model) -> None:
    denoiser, tape = make(small)
    tape.rounds.extend([[keyed(jobs(small, ("a", 2)), "key")], [], [], [keyed(jobs(small, ("b", 3)), "key")]])
    denoiser.run()
    assert batches(tape) == ["a", "a", "b", "b", "b"]


def test_the_latents_of_one_job_are_not_held_for_another_with_the_same_key(small: Model) -> None:
    """Both are there at once, and the second is cancelled after the first has ended."""
    denoiser, tape = make(small)
    both = [keyed(jobs(small, ("a", 2)), "key"), keyed(jobs(small, ("b", 5)), "key")]
    tape.rounds.extend([both, [], [], [(wire.Cancel("b"), [])], [keyed(jobs(small, ("c", 5)), "key")]])
    denoiser.run()
    assert list(latents(tape)) == ["a", "c"]
    assert "".join(batches(tape)).count("c") == 5


def test_latents_are_held_up_to_a_number_of_bytes_and_seconds(small: Model) -> None:
    denoiser, tape = make(small)
    now = [0.0]
    held = denoiser.keyed.held = Locker[HeldLatents](0, 60.0, lambda: now[0])
    tape.rounds.append([keyed(jobs(small, ("a", 1)), "a")])
    denoiser.run()
    assert not held.names
    [size] = map(len, latents(tape).values())
    held.max_bytes = 2 * size
    for name in "bcd":
        denoiser.is_stopped = False
        tape.rounds.append([keyed(jobs(small, (name, 1)), name)])
        denoiser.run()
        now[0] += 20
    assert held.names == ["c", "d"]
    now[0] = 85.0
    assert held.names == ["d"]


def test_answers_are_kept_up_to_a_number_of_bytes_and_seconds() -> None:
    now = [0.0]
    locker = Locker[list[bytes]](10, 60.0, lambda: now[0])
    for name in "abc":
        locker.put(name, [b"12", b"34"], 4)
        now[0] += 10
    assert locker.get("a") is None
    assert locker.get("b") == [b"12", b"34"]
    locker.put("b", [b"1"], 1)
    now[0] = 85.0
    assert locker.get("c") is None
    assert locker.get("b") == [b"1"]


@pytest.mark.parametrize(
    ("deadlines", "expected"),
    [
        ((50.0, 30.0), 30.0),  # whoever is served first
        ((5.0, 30.0), 30.0),  # the first asker's has passed
        ((5.0, 8.0), 8.0),  # both have
        ((NO_DEADLINE, 30.0), 30.0),
    ],
)
def test_a_job_that_two_ask_for_has_the_more_urgent_terms(deadlines: tuple[float, float], expected: float) -> None:
    one, other = (Terms(deadline, priority, "me", priority) for priority, deadline in enumerate(deadlines))
    assert shared_terms(one, other, now=10.0) == Terms(expected, 0, "me", 0)
    assert shared_terms(other, one, now=10.0).priority == 0
