"""The router knows where LoRAs are, and what loading them costs beyond the steps that an edit takes meanwhile."""

from dataclasses import replace

from instgenie.scheduling.router import Router, Work, WorkerLoad, predicted_finish

MB = 10**6
WORK = Work(20, 1000, 200, loras=(("a", 200 * MB), ("b", 50 * MB)), num_free_steps=0)


def loads(num: int = 3) -> list[WorkerLoad]:
    return [WorkerLoad(worker, 8) for worker in range(num)]


def test_an_edit_goes_where_its_loras_are() -> None:
    workers = loads()
    workers[2].loras.hold(["a", "b", "c"])
    workers[1].loras.hold(["b"])
    finishes = [predicted_finish(WORK, load) for load in workers]
    assert finishes[2] < finishes[1] < finishes[0]
    assert Router().choose(WORK, workers) == 2
    assert abs(finishes[0] - finishes[2] - 0.25) < 0.01  # 250 MB at 1 GB/s


def test_a_load_that_the_first_steps_hide_costs_nothing_but_still_decides() -> None:
    workers = loads()
    workers[1].loras.hold(["a", "b"])
    hidden = replace(WORK, num_free_steps=20, loras=(("a", 1000), ("b", 1000)))
    finishes = [predicted_finish(hidden, load) for load in workers]
    assert finishes[0] - finishes[1] < 1e-9
    assert Router().choose(hidden, workers) == 1


def test_a_busy_holder_is_left_for_an_idle_worker() -> None:
    workers = loads(2)
    workers[0].loras.hold(["a", "b"])
    for number in range(200):
        workers[0].add(str(number), 20, 1000, workers[0].price_of(WORK))
    small = replace(WORK, loras=(("a", 1 * MB),))
    assert Router().choose(small, workers) == 1


def test_rates_are_measured_and_what_is_on_its_way_counts() -> None:
    load = WorkerLoad(0, 8)
    before = load.loras.load_seconds(WORK.loras)
    for _ in range(50):
        load.loras.measure(200 * MB, 2.0)
    assert before * 5 < load.loras.load_seconds(WORK.loras) < before * 11
    load.expect(WORK)
    assert load.loras.load_seconds(WORK.loras) == 0
    load.loras.hold([])
    assert load.loras.load_seconds(WORK.loras) > 0
