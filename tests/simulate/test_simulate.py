"""The simulator: cases that can be worked out by hand, and properties that always hold."""

from collections import Counter
from typing import get_args

import pytest

from instgenie.bench.workload import WorkloadRecipe, draw_workload
from instgenie.cost.latency import DEFAULTS
from instgenie.cost.network import BlockShape, NetworkShape
from instgenie.cost.pricing import JobShape
from instgenie.scheduling.names import Batching, RoutingPolicy
from instgenie.simulate.cluster import ClusterShape, make_job, simulate
from instgenie.simulate.service import LinearService, PlannedService, SideSeconds, Sums
from instgenie.simulate.worker import SimulatedJob, TemplateMemory

SECOND = LinearService(per_step=1.0, per_token=0.0, side=SideSeconds(prepare=0.5, decode=0.25))
POLICIES: tuple[RoutingPolicy, ...] = get_args(RoutingPolicy)
BATCHINGS: tuple[Batching, ...] = get_args(Batching)


def jobs_at(*times: float, num_steps: int = 2) -> list[SimulatedJob]:
    return [make_job(index, at, num_steps, 100, 10, "cat") for index, at in enumerate(times)]


def finish_times(shape: ClusterShape, jobs: list[SimulatedJob], service: LinearService = SECOND) -> list[float]:
    simulate(shape, service, jobs)
    return [job.finished for job in jobs]


def test_one_edit_takes_what_its_parts_take() -> None:
    [job] = jobs_at(10.0)
    assert simulate(ClusterShape(1), SECOND, [job]) == [job]
    assert (job.prepared, job.joined, job.denoised, job.finished) == (10.5, 10.5, 12.5, 12.75)
    assert job.latency == 2.75


def test_edits_join_at_the_next_step_and_share_it() -> None:
    """The second is prepared at 1.0, in the middle of the first step (0.5 to 1.5)."""
    assert finish_times(ClusterShape(1), jobs_at(0.0, 0.5)) == [2.75, 3.75]


def test_a_batch_is_not_larger_than_its_limit() -> None:
    """Prepared at 0.5, 1.0 and 1.5; of two places, the third gets the one that the first leaves at 2.5."""
    assert finish_times(ClusterShape(1, max_batch_size=2), jobs_at(0.0, 0.0, 0.0)) == [2.75, 3.75, 4.75]


def test_no_job_joins_a_static_batch() -> None:
    """The first runs alone from 0.5 to 2.5; the others, prepared at 1.0 and 1.5, from then to 4.5, and are finished
    one after the other."""
    shape = ClusterShape(1, batching="static-pipelined")
    assert finish_times(shape, jobs_at(0.0, 0.0, 0.0)) == [2.75, 4.75, 5.0]


def test_threads_encode_while_the_next_is_decoded() -> None:
    """A worker of one process decodes and encodes edits denoised at 3.0 one after the other; with threads, two that
    are denoised at 4.5 are decoded by 4.75 and 5.0, and encoded half a second later."""
    service = LinearService(1.0, 0.0, SideSeconds(prepare=0.5, decode=0.25, finish_thread=0.5))
    jobs = jobs_at(0.0, 0.0)
    assert finish_times(ClusterShape(1, batching="static", max_batch_size=2), jobs, service) == [3.75, 4.5]
    shape = ClusterShape(1, batching="static-pipelined", max_batch_size=2)
    assert finish_times(shape, jobs_at(0.0, 0.0, 0.0), service)[1:] == [5.25, 5.5]


def test_threads_may_be_the_bottleneck() -> None:
    """Four of them encode a picture every second."""
    service = LinearService(1.0, 0.0, SideSeconds(decode=0.25, finish_thread=4.0))
    finished = finish_times(ClusterShape(1, batching="static-pipelined"), jobs_at(0.0, 0.0, 0.0, num_steps=1), service)
    assert finished == [5.25, 6.25, 7.25]


@pytest.mark.parametrize(("batching", "finished"), [("static-pipelined", [1.3, 2.6, 2.9]), ("static", [1.3, 2.9, 3.2])])
def test_large_masks_take_longer_to_finish(batching: Batching, finished: list[float]) -> None:
    """The first is alone in its batch; the others share one, and the last waits for the large mask of the second."""
    service = LinearService(1.0, 0.0, SideSeconds(decode=0.2, decode_token=0.01))
    jobs = [make_job(index, 0.0, 1, 100, num_masked, "cat") for index, num_masked in enumerate((10, 40, 10))]
    assert finish_times(ClusterShape(1, batching=batching), jobs, service) == pytest.approx(finished)


def test_a_static_worker_prepares_and_finishes_between_batches() -> None:
    """Two are prepared by 1.0, run until 3.0 and are finished by 3.5; so are the others, by 4.5, 6.5 and 7.0."""
    shape = ClusterShape(1, batching="static", max_batch_size=2)
    assert finish_times(shape, jobs_at(0.0, 0.1, 0.2, 0.3)) == [3.25, 3.5, 6.75, 7.0]


@pytest.mark.parametrize("batching", ["continuous", "static", "naive"])
def test_templates_come_into_memory_however_jobs_are_batched(batching: Batching) -> None:
    """It takes 5 seconds to fetch one, and preparing half of one."""
    shape = ClusterShape(1, batching=batching, max_templates=1, fetch=5.0)
    assert finish_times(shape, jobs_at(0.0)) == [7.25]


def test_a_naive_worker_prepares_and_finishes_between_steps() -> None:
    """The first is prepared by 0.5 and steps until 1.5; the second is then prepared by 2.0, they step together until
    3.0, the first is finished by 3.25, and the second steps from then to 4.25."""
    assert finish_times(ClusterShape(1, batching="naive"), jobs_at(0.0, 0.6)) == [3.25, 4.5]


def test_dense_steps_cost_every_token() -> None:
    service = LinearService(per_step=1.0, per_token=0.01)
    cached, leading, dense = (make_job(0, 0.0, 3, 100, 10, "cat", num_dense_steps=num) for num in (0, 1, 3))
    assert finish_times(ClusterShape(1), [cached], service) == pytest.approx([3.3])
    assert finish_times(ClusterShape(1), [leading], service) == pytest.approx([2.0 + 1.1 + 1.1])
    assert finish_times(ClusterShape(1), [dense], service) == pytest.approx([6.0])
    assert finish_times(ClusterShape(1, reuse=False), jobs_at(0.0, num_steps=3), service) == pytest.approx([6.0])


def test_jobs_of_all_sizes_step_together() -> None:
    service = LinearService(per_step=1.0, per_token=0.01)
    jobs = [make_job(0, 0.0, 1, 100, 10, "cat"), make_job(1, 0.0, 1, 400, 40, "dog")]
    assert finish_times(ClusterShape(1), jobs, service) == pytest.approx([1.1, 1.1 + 1.4])


def test_a_job_whose_template_is_being_fetched_lets_others_go_first() -> None:
    """The cat is in memory from 5.0 on. The dog arrives before the second cat, but is fetched only at 11.0."""
    shape = ClusterShape(1, max_templates=2, fetch=5.0)
    arrivals = [(0.0, "cat"), (6.0, "dog"), (6.2, "cat")]
    jobs = [make_job(index, at, 2, 100, 10, template) for index, (at, template) in enumerate(arrivals)]
    assert finish_times(shape, jobs) == [5.0 + 2 + 0.25, 11.0 + 2 + 0.25, 7.0 + 2 + 0.25]
    memory = TemplateMemory(max_templates=1, fetch=5.0)
    assert [memory.use(name, now) for name, now in (("a", 0.0), ("a", 2.0), ("a", 9.0), ("b", 9.0), ("a", 10.0))] == [
        5.0, 5.0, 9.0, 14.0, 15.0,
    ]  # fmt: skip


def test_edits_go_where_their_template_is_unless_others_wait_there() -> None:
    """Two steps of another cat take less than five seconds of fetching; twenty take more."""
    shape = ClusterShape(2, max_batch_size=1, max_templates=1, fetch=5.0)
    arrivals = [(0.0, "cat"), (20.0, "cat"), (40.0, "cat"), (40.1, "cat")]
    jobs = [make_job(index, at, 2, 100, 10, template) for index, (at, template) in enumerate(arrivals)]
    simulate(shape, SECOND, jobs)
    first, second, third, fourth = (job.worker for job in jobs)
    assert first == second == third == fourth
    long = [make_job(index, at, 20, 100, 10, "cat") for index, at in enumerate((0.0, 30.0, 30.1))]
    simulate(shape, SECOND, long)
    assert long[0].worker == long[1].worker != long[2].worker


def test_two_workers_take_one_each() -> None:
    for policy in POLICIES:
        jobs = jobs_at(0.0, 0.0)
        assert finish_times(ClusterShape(2, policy=policy), jobs) == [2.75, 2.75]
        assert {job.worker for job in jobs} == {0, 1}


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_edit_is_finished_once_and_in_order(policy: RoutingPolicy, batching: Batching) -> None:
    workload = draw_workload(WorkloadRecipe(num_edits=300, rate=8.0, num_templates=7))
    jobs = [
        make_job(
            index, arrival.at, 3 + index % 5, 256, max(round(256 * arrival.mask_ratio), 1), str(arrival.template), 1
        )
        for index, arrival in enumerate(workload)
    ]
    shape = ClusterShape(5, max_batch_size=3, policy=policy, batching=batching, max_templates=3, fetch=0.02)
    told: list[None] = []
    finished = simulate(shape, LinearService(0.05, 1e-4, SideSeconds(0.01, 0.02)), jobs, lambda: told.append(None))
    assert Counter(job.id for job in finished) == Counter(job.id for job in jobs)
    assert all(job.num_finished == 1 and job.step == job.work.num_steps for job in jobs)
    assert all(job.arrived < job.prepared <= job.joined < job.denoised < job.finished for job in jobs)
    assert [job.finished for job in finished] == sorted(job.finished for job in jobs)
    assert len(told) == 300
    assert {job.worker for job in jobs} == set(range(5))


def test_the_same_load_ends_the_same() -> None:
    ends = [finish_times(ClusterShape(100), jobs_at(*(0.01 * index for index in range(500)))) for _ in range(2)]
    assert ends[0] == ends[1]


def test_a_planned_step_is_as_long_as_the_planner_says() -> None:
    shape = BlockShape(per_token=100, per_text=10, per_rest=0, per_pair=2, per_branch=0, width=8, joint=True)
    network = NetworkShape((shape,) * 3, (3,), per_token=1, per_branch=0)
    service = PlannedService(DEFAULTS["cpu"], JobShape(network, num_text=4), in_gpu=True)

    def seconds(*sums: tuple[int, int, int, int]) -> float:
        return service.step(Sums(sums))

    few, many, dense = seconds((64, 1, 4, 0)), seconds((64, 1, 32, 0)), seconds((64, 0, 0, 1))
    assert few < many < dense
    assert seconds((64, 2, 36, 0)) == pytest.approx(few + many - 3 * DEFAULTS["cpu"].block, rel=1e-6)
    assert seconds((64, 1, 4, 0), (128, 1, 8, 1)) > seconds((64, 1, 4, 0), (128, 1, 8, 0))


def test_a_short_job_does_not_wait() -> None:
    jobs = [make_job(0, 0.0, 100, 100, 100, "cat"), make_job(1, 0.5, 2, 100, 100, "cat")]
    simulate(ClusterShape(1), LinearService(per_step=1e-3, per_token=1e-2), jobs)
    assert [round(job.finished) for job in jobs] == [102, 5]


def test_jobs_that_share_nothing_take_turns() -> None:
    """Together both would end at 20; one after the other, one of them ends at 10."""
    jobs = [make_job(index, 0.0, 10, 100, 100, "cat") for index in range(2)]
    simulate(ClusterShape(1), LinearService(per_step=1e-3, per_token=1e-2), jobs)
    assert sorted(round(job.finished) for job in jobs) == [10, 20]
