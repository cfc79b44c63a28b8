"""The router: which worker gets an edit."""

from dataclasses import replace

import pytest

from instgenie.cost.table import linear_costs
from instgenie.scheduling.backlog import LoadSums
from instgenie.scheduling.names import RoutingPolicy
from instgenie.scheduling.pace import NUM_KNOWN, Pace
from instgenie.scheduling.router import MAX_SCANNED, Router, Work, WorkerLoad

WORK = Work(num_steps=10, num_tokens=1000, num_masked_tokens=100, template="cat")


def make_load(worker: int, *edits: tuple[int, int], templates: tuple[str, ...] = ()) -> WorkerLoad:
    """Each edit is given as its steps and its tokens per step."""
    load = WorkerLoad(worker, max_batch_size=4, templates=dict.fromkeys(templates, "host"))
    for index, edit in enumerate(edits):
        add(load, f"{worker}-{index}", *edit)
    return load


def add(load: WorkerLoad, edit: str, num_steps: int, num_tokens: int) -> None:
    load.add(edit, num_steps, num_tokens, load.costs.price(num_tokens, num_tokens, None))


def test_mask_aware_counts_what_is_computed_not_requests() -> None:
    loads = [make_load(0, (10, 1000)), make_load(1, *[(10, 50)] * 3)]
    assert Router("mask_aware").choose(WORK, loads) == 1
    assert Router("requests").choose(WORK, loads) == 0


def test_mask_aware_goes_where_the_activations_are() -> None:
    loads = [make_load(0), make_load(1, (10, 300), templates=("cat",))]
    assert Router("mask_aware").choose(WORK, loads) == 1
    assert Router("tokens").choose(WORK, loads) == 0


def test_mask_aware_leaves_the_activations_when_the_queue_there_is_long() -> None:
    loads = [make_load(0), make_load(1, *[(10, 1000)] * 4, templates=("cat",))]
    assert Router("mask_aware").choose(WORK, loads) == 0


def test_a_worker_without_the_activations_of_a_ready_template_is_charged_for_the_registration() -> None:
    """Registering costs as much as one dense edit, which the queue at the worker that has the template must exceed."""
    ready = replace(WORK, must_reuse=True)
    for num_queued, chosen in ((1, 1), (2, 0)):
        loads = [make_load(0), make_load(1, *[(10, 900)] * num_queued, templates=("cat",))]
        assert Router("mask_aware").choose(ready, loads) == chosen
    idle, holder = make_load(0), make_load(1, templates=("cat",))
    assert (idle.tokens_of(ready), idle.price_of(ready)) == (100, holder.price_of(ready))
    assert (idle.has_to_register(ready), holder.has_to_register(ready), idle.has_to_register(WORK)) == (
        True,
        False,
        False,
    )
    both = replace(ready, num_tokens=2000, num_masked_tokens=200, num_edits=2)
    assert idle.registration_compute(both) == idle.registration_compute(ready)  # once for all edits


def test_a_worker_with_pictures_to_finish_is_busy() -> None:
    """Neither worker has steps to take, but one has four pictures to finish."""
    loads = [make_load(0, *[(10, 1000)] * 4), make_load(1)]
    for index in range(4):
        loads[0].hand_over(f"0-{index}")
    assert [load.num_unfinished for load in loads] == [4, 0]
    router = Router()
    assert {router.choose(WORK, loads) for _ in range(2)} == {0, 1}  # finishing has not been measured
    for load in loads:
        load.measure_side_stage("finish", 2.0)
        load.measure_side_stage("prepare", 0.1)
    assert {router.choose(WORK, loads) for _ in range(2)} == {1}
    for index in range(4):
        loads[0].remove(f"0-{index}")
    add(loads[1], "1-0", 10, 1000)
    assert {router.choose(WORK, loads) for _ in range(2)} == {0}


def test_among_equals_the_one_chosen_least_recently() -> None:
    """Its edits are nearest to their end."""
    loads = [make_load(worker, (10, 1000)) for worker in range(3)]
    router = Router()
    assert [router.choose(WORK, loads) for _ in range(3)] == [0, 1, 2]
    add(loads[1], "more", 10, 1000)
    assert [router.choose(WORK, loads) for _ in range(2)] == [0, 2]
    loads[1].remove("more")
    assert router.choose(WORK, loads) == 1


def test_round_robin_takes_turns() -> None:
    loads = [make_load(0, (100, 1000)), make_load(1), make_load(2)]
    router = Router("round_robin")
    chosen = [router.choose(WORK, loads) for _ in range(6)]
    assert chosen[:3] == chosen[3:]
    assert sorted(chosen[:3]) == [0, 1, 2]


@pytest.mark.parametrize("policy", ["mask_aware", "tokens", "requests", "round_robin"])
def test_equal_workers_share(policy: RoutingPolicy) -> None:
    loads = [make_load(worker) for worker in range(3)]
    router = Router(policy)
    assert {router.choose(WORK, loads) for _ in range(9)} == {0, 1, 2}


def test_a_slow_worker_gets_less() -> None:
    loads = [make_load(0), make_load(1)]
    for predicted in (0.01, 0.05, 0.1) * 100:
        loads[0].pace.measure(predicted, 0.1 + 10 * predicted)
        loads[1].pace.measure(predicted, 0.01 + predicted)
    for _ in range(4):
        assert Router().choose(WORK, loads) == 1


def test_a_load_is_the_sum_of_the_remaining_work() -> None:
    load = make_load(0, (10, 100), (4, 50))
    assert (load.num_edits, load.num_steps, load.num_token_steps) == (2, 14, 1200)
    load.step("0-0")
    load.step("0-0")
    assert (load.num_edits, load.num_steps, load.num_token_steps) == (2, 12, 1000)
    add(load, "0-1", 1, 50)
    load.remove("0-0")
    load.remove("0-0")
    assert (load.num_edits, load.num_steps, load.num_token_steps) == (1, 1, 50)
    load.remove("0-1")
    assert load.seconds == 0


def test_pace_corrects_predictions() -> None:
    pace = Pace()
    assert pace.seconds(3, 0.25) == pytest.approx(0.25)
    for step in range(1000):
        predicted = 0.01 * (1 + 37 * step % 90)
        pace.measure(predicted, 0.02 + 3 * predicted)
    assert pace.per_step == pytest.approx(0.02, rel=1e-3)
    assert pace.per_second == pytest.approx(3, rel=1e-3)
    assert pace.seconds(10, 5.0) == pytest.approx(10 * 0.02 + 3 * 5.0, rel=1e-3)


@pytest.mark.parametrize("measured", [[(0.5, 0.5)] * 500, [(0.1, 0.9), (0.9, 0.1)] * 100, [(0.0, 0.0)] * 500])
def test_pace_never_promises_negative_time(measured: list[tuple[float, float]]) -> None:
    pace = Pace()
    for predicted, seconds in measured:
        pace.measure(predicted, seconds)
        assert pace.per_step >= 0
        assert pace.per_second >= 0
    seen = sum(seconds for _, seconds in measured[-2:]) / 2
    mean = sum(predicted for predicted, _ in measured[-2:]) / 2
    assert pace.seconds(1, mean) == pytest.approx(seen, rel=0.05, abs=1e-3)


@pytest.mark.parametrize("policy", ["mask_aware", "tokens", "requests"])
def test_among_many_workers_the_best_of_a_sample_is_chosen(policy: RoutingPolicy) -> None:
    """Nine in ten are busy; only one sample of 32 in thirty contains no idle worker."""
    loads = [make_load(worker, *[(10, 1000)] * (worker % 10)) for worker in range(2000)]
    router = Router(policy)
    chosen = [router.choose(WORK, loads) for _ in range(300)]
    assert sum(worker % 10 == 0 for worker in chosen) > 0.9 * 300
    assert len(set(chosen)) > 100


def test_among_many_workers_holders_of_the_template_are_sampled_too() -> None:
    loads = [make_load(worker) for worker in range(10 * MAX_SCANNED)]
    loads[77].templates["cat"] = "host"
    assert Router().choose(WORK, loads, [loads[77]]) == 77
    add(loads[77], "much", 1000, 1000)
    assert Router().choose(WORK, loads, [loads[77]]) != 77


def test_a_worker_that_took_no_step_is_judged_by_the_others() -> None:
    common = Pace()
    known, new = WorkerLoad(0, 4, pace=Pace(common)), WorkerLoad(1, 4, pace=Pace(common))
    for predicted in (0.01, 0.05, 0.1) * 100:
        known.pace.measure(predicted, 1.0 + 100 * predicted)
    for load in (known, new):
        add(load, "a", 10, 1000)
    assert new.seconds == pytest.approx(known.seconds, rel=1e-6)
    for _ in range(NUM_KNOWN):
        new.pace.measure(0.05, 1e-3)
    assert new.seconds < known.seconds / 10


def test_an_edit_without_a_template_costs_its_dense_steps() -> None:
    load = WorkerLoad(0, 8, costs=linear_costs(0.0, 1.0))
    dense, own = Work(10, 100, 20), Work(10, 100, 20, own_share=0.2)
    assert (load.tokens_of(dense), load.tokens_of(own)) == (100, 36)
    assert load.price_of(own).compute == pytest.approx(36)
    load.templates["cat"] = "host"
    assert load.tokens_of(replace(own, template="cat")) == 20


def test_parts_of_a_load_are_beside_the_work_of_other_fronts() -> None:
    """Which of its own edits go before another, a front knows; those of others may all do."""
    load = make_load(0, (10, 1000), (4, 100))
    load.share(LoadSums(num_edits=2, num_finishing=1, num_steps=20, num_token_steps=2000, compute=3.0, fetching=1.5))
    none, first = load.only(()), load.only(("0-0",))
    assert (none.num_edits, none.num_steps, none.compute) == (2, 20, 3.0)
    assert (first.num_edits, first.num_steps) == (3, 30)
    assert first.fetch_from("disk", WORK) == load.fetch_from("disk", WORK)
    assert (load.idle.num_edits, load.idle.num_steps, load.idle.num_unfinished, load.idle.link.seconds) == (0, 0, 0, 0)
    assert (load.num_edits, load.num_steps, load.link.seconds) == (4, 34, 1.5)
