"""The step loop of a worker: jobs join, step and leave."""

import pytest
import torch
from helpers.edits import make_edit
from helpers.workers import SHARED, SIZE, batches, head_of, jobs, make_denoiser, registering

from instgenie.cluster import wire
from instgenie.cost.learning import NUM_FIRST
from instgenie.cost.table import linear_costs
from instgenie.engine.loop import Engine
from instgenie.engine.prepare import prepare
from instgenie.engine.register import register, reuse
from instgenie.models.model import Model
from instgenie.workers.frames import read_tensor


def test_jobs_join_and_leave_at_every_step(small: Model) -> None:
    denoiser, tape = make_denoiser(small)
    denoiser.costs = SHARED
    tape.rounds.extend([[jobs(small, ("a", 4))], [jobs(small, ("b", 2))], [jobs(small, ("c", 1))], []])
    denoiser.run()
    assert batches(tape) == ["a", "ab", "ab", "ac"]
    assert [message.id for message in tape.of(wire.Denoised)] == ["b", "a", "c"]


def test_step_costs_are_reported_before_the_first_step(small: Model) -> None:
    """Each step is reported with its predicted seconds, which count only masked tokens of jobs with activations."""
    denoiser, tape = make_denoiser(small)
    tape.rounds.append([registering(small, "t")])
    tape.rounds.append([jobs(small, ("a", 4), template=head_of("t"))])
    tape.rounds.append([jobs(small, ("b", 1))])
    denoiser.run()
    first, _ = tape.sent[0]
    assert isinstance(first, wire.Priced)
    assert wire.decode(wire.encode(first)) == first
    job = prepare(make_edit(size=SIZE, steps=4), small)
    num_tokens, num_masked = len(job.masked), int(job.masked.sum())
    cached, dense = (first.costs.price(num_tokens, num_masked, tier) for tier in ("host", None))
    prices = {"a": cached, "b": dense}
    for step in tape.of(wire.BatchStepped):
        expected = first.costs.step_seconds(prices[told.id] for told in step.jobs)
        assert step.predicted_seconds == pytest.approx(expected), step
    assert cached.compute < dense.compute


def test_measured_steps_correct_the_costs(small: Model) -> None:
    """Corrected costs are reported, and the steps after that are predicted by them."""
    denoiser, tape = make_denoiser(small)
    tape.rounds.append([jobs(small, ("a", NUM_FIRST + 1))])
    denoiser.run()
    given, corrected = (message.costs for message in tape.of(wire.Priced))
    assert (given.ratio, denoiser.costs) == (1.0, corrected)
    assert corrected.ratio > 0
    assert corrected != given
    job = prepare(make_edit(size=SIZE, steps=4), small)
    dense = [costs.step_seconds([costs.price(len(job.masked), 0, None)]) for costs in (given, corrected)]
    *before, after = [step.predicted_seconds for step in tape.of(wire.BatchStepped)]
    assert before == pytest.approx([dense[0]] * NUM_FIRST)
    assert after == pytest.approx(dense[1])


def test_static_batches_end_before_the_next_begins(small: Model) -> None:
    denoiser, tape = make_denoiser(small, "static-pipelined")
    tape.rounds.extend([[jobs(small, ("a", 3))], [jobs(small, ("b", 2))], [jobs(small, ("c", 1))], []])
    denoiser.run()
    assert batches(tape) == ["a", "a", "a", "bc", "b"]


def test_a_group_joins_whole_and_no_other_overtakes_it(small: Model) -> None:
    denoiser, tape = make_denoiser(small)
    group = jobs(small, ("b", 1), ("c", 1))
    tape.rounds.extend([[jobs(small, ("a", 2)), group, jobs(small, ("d", 1))], []])
    denoiser.run()
    assert batches(tape) == ["a", "a", "bc", "d"]


def test_jobs_that_share_nothing_take_turns_unless_one_is_short(small: Model) -> None:
    denoiser, tape = make_denoiser(small)
    denoiser.costs = linear_costs(per_step=1e-9, per_token=1.0)
    tape.rounds.extend([[jobs(small, ("a", 4))], [jobs(small, ("b", 1))], [jobs(small, ("c", 2))], []])
    denoiser.run()
    assert batches(tape) == ["a", "ab", "a", "a", "c", "c"]


def test_a_group_that_would_wait_longer_than_it_runs_is_split(small: Model) -> None:
    denoiser, tape = make_denoiser(small)
    denoiser.costs = SHARED
    tape.rounds.extend([[jobs(small, ("a", 6)), jobs(small, ("b", 2), ("c", 2)), jobs(small, ("d", 1))], []])
    denoiser.run()
    assert batches(tape) == ["a", "ab", "ab", "ac", "ac", "ad"]


def test_a_group_larger_than_a_batch_joins_alone(small: Model) -> None:
    denoiser, tape = make_denoiser(small)
    tape.rounds.append([jobs(small, ("a", 1), ("b", 2), ("c", 1)), jobs(small, ("d", 1))])
    denoiser.run()
    assert batches(tape) == ["ab", "bc", "d"]


def test_a_job_uses_what_was_registered(small: Model) -> None:
    denoiser, tape = make_denoiser(small)
    job = jobs(small, ("a", 4), template=head_of("t"))
    tape.rounds.extend([[job], [registering(small, "t")], [], [job]])
    denoiser.run()
    assert tape.of(wire.Missing) == [wire.Missing("a", 1, head_of("t").id)]
    [(message, [frame])] = [sent for sent in tape.sent if isinstance(sent[0], wire.Denoised)]
    edit = make_edit(size=SIZE, steps=4)
    expected = reuse(prepare(edit, small), register(edit.picture, small, SIZE, 4, None))
    engine = Engine(small)
    engine.join(expected)
    while engine.jobs:
        engine.step()
    assert torch.equal(read_tensor(message.latents, frame), expected.latents)
    assert message.num_computed_tokens == expected.num_computed_tokens


def test_a_newer_attempt_takes_the_place_of_an_older(small: Model) -> None:
    denoiser, tape = make_denoiser(small)
    message, frames = jobs(small, ("a", 3))
    assert isinstance(message, wire.Denoise)
    [job] = message.jobs
    again = wire.Denoise((wire.Denoising("a", 2, job.job, None, False, 0),))
    tape.rounds.extend([[(message, frames)], [(again, frames)], []])
    denoiser.run()
    assert [(done.id, done.attempt) for done in tape.of(wire.Denoised)] == [("a", 2)]
