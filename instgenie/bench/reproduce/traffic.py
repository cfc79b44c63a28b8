"""The same workloads on real clusters and on simulated ones.

A real cluster first gets a burst, which measures the rate it sustains, and then practice edits that arrive at the same
times as the measured ones, so that its processes compete for the machine in the same way. A latency model is fitted to
the practice steps, and that model is all the simulator knows of the cluster when it predicts the measured edits.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from instgenie.bench.latencies import Latencies
from instgenie.bench.reproduce.lab import Lab
from instgenie.bench.reproduce.serving import Run, Served, Session, Step, in_session
from instgenie.bench.workload import Arrival, WorkloadRecipe, draw_workload
from instgenie.cluster.config import CacheConfig, ClusterConfig
from instgenie.cost.latency import Latency, StepSample, fit_latency
from instgenie.cost.pricing import JobShape
from instgenie.jobs.quality import DEFAULT, SETTINGS
from instgenie.scheduling.names import Batching
from instgenie.simulate.cluster import make_job
from instgenie.simulate.service import PlannedService, Service, SideSeconds
from instgenie.simulate.worker import SimulatedJob

MAX_QUEUE = 10_000
MIN_EDITS = 4
MAX_BATCH_SIZE = ClusterConfig.max_batch_size
MASKS = "production"
SHARES = ("waiting", "preparing", "steps", "finishing")  # stages of an edit


def recipe(lab: Lab, num_edits: int, rate: float, seed: int) -> WorkloadRecipe:
    return WorkloadRecipe(
        num_edits=num_edits,
        rate=rate,
        mask_ratios=MASKS,
        num_templates=lab.scale.num_templates,
        sizes=(lab.size,),
        steps=(lab.scale.serve_steps,),
        seed=seed,
    )


def served(lab: Lab, batching: Batching = "continuous", reuse: bool = True, num_workers: int = 1) -> Run:
    """Run a real cluster under load, once per setting. Clusters of one worker all get the same edits. Several workers
    on one machine sustain less than as many times the rate of one, so they get a share of their own measured rate."""
    name = f"{batching} {'reuse' if reuse else 'dense'} {num_workers}"
    if name not in lab.runs:
        is_ours = batching == "continuous" and reuse
        rate = None if is_ours or num_workers > 1 else served(lab).rate
        config = ClusterConfig(
            model=lab.name,
            devices=(lab.device,) * num_workers,
            max_queue=MAX_QUEUE,
            cache=CacheConfig(gpu_bytes=lab.scale.gpu_bytes),
            batching=batching,
            reuse=reuse,
        )
        lab.tell(f"a real cluster: {batching}, {num_workers} workers")
        lab.runs[name] = in_session(config, lambda session: send(lab, session, rate))
    return lab.runs[name]


async def send(lab: Lab, session: Session, rate: float | None) -> Run:
    """Send the workload at `rate`, or at a share of the rate that a burst reached. Clusters that are also simulated get
    practice edits first; with CUDA graphs all clusters do."""
    config, num_workers = session.cluster.config, len(session.cluster.workers)
    await session.register(draw_workload(recipe(lab, 10 * lab.scale.num_templates, 1.0, seed=0)))
    if rate is None:
        at_once = draw_workload(recipe(lab, num_workers * lab.scale.num_burst, float("inf"), seed=3))
        if lab.scale.all_practise:
            await session.run(at_once)
        burst = await session.run(at_once)
        rate = lab.scale.load * len(burst) / max(one.latency for one in burst)
    num_edits = min(lab.scale.serve_edits * num_workers, max(int(lab.scale.serve_seconds * rate), MIN_EDITS))
    run = Run(config, rate, [], [], [], [])
    others, workload = (draw_workload(recipe(lab, num_edits, rate, seed)) for seed in (1, 2))
    session.watch.steps.clear()
    if config.batching == "continuous" or lab.scale.all_practise:
        timed = [replace(other, at=arrival.at) for other, arrival in zip(others, workload, strict=True)]
        practice = await session.run(timed)
        run = replace(run, practice=practice, practice_steps=list(session.watch.steps))
        session.watch.steps.clear()
    answers = await session.run(workload)
    return replace(run, served=answers, steps=list(session.watch.steps))


# figures of a run


def run_latencies(run: Run) -> Latencies:
    return Latencies.of([one.latency for one in run.served])


def fitted(lab: Lab, run: Run) -> Latency:
    return fit_latency(lab.device, lab.name, lab.network, [sample(lab, step) for step in run.practice_steps], [])


def sample(lab: Lab, step: Step) -> StepSample:
    num_dense = dense_steps(lab)
    jobs = [
        (job.num_tokens, job.num_masked_tokens, any(job.plan) and num_taken >= num_dense)
        for job, num_taken in step.jobs
    ]
    return step_sample(lab.shape, jobs, step.seconds)


def step_sample(shape: JobShape, jobs: Iterable[tuple[int, int, bool]], seconds: float) -> StepSample:
    """A measured step; of each job its tokens, its masked tokens, and whether it read activations."""
    demands = [
        shape.demand(num_tokens, num_masked, in_gpu=True) if is_cached else shape.dense_demand(num_tokens)
        for num_tokens, num_masked, is_cached in jobs
    ]
    plan = (any(demand.kind for demand in demands),) * len(shape.network.blocks)
    return StepSample(tuple(demands), plan, seconds)


def side_seconds(run: Run) -> SideSeconds:
    facts = [one.facts for one in run.practice]
    decoding = [one.finish_seconds - one.finish_thread_seconds for one in facts]
    decode, decode_token = fit_line([one.num_masked_tokens for one in facts], decoding)
    return SideSeconds(
        prepare=statistics.fmean(one.prepare_seconds for one in facts),
        decode=decode,
        decode_token=decode_token,
        finish_thread=statistics.fmean(one.finish_thread_seconds for one in facts),
        between=statistics.fmean(step.between for step in run.practice_steps),
    )


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Fit a line by least squares; neither its start nor its slope is negative."""
    x, y = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((one - x) ** 2 for one in xs)
    slope = sum((one - x) * (other - y) for one, other in zip(xs, ys, strict=True)) / spread if spread else 0.0
    slope = min(max(slope, 0.0), y / x)
    return y - slope * x, slope


def mean_shares(run: Run) -> list[str]:
    """Return the mean seconds of each stage, in the order of `SHARES`."""
    facts = [one.facts for one in run.served]
    columns = (
        [one.queue_seconds for one in facts],
        [one.prepare_seconds for one in facts],
        [one.denoise_seconds for one in facts],
        [one.finish_seconds for one in facts],
    )
    return [f"{statistics.fmean(column):.2f}" for column in columns]


def service_of(lab: Lab, run: Run) -> PlannedService:
    """Model the service of the cluster: everything that can be cached is, with activations in GPU memory."""
    return PlannedService(fitted(lab, run), lab.shape, side_seconds(run), policy="cached", in_gpu=True)


# simulated edits


def dense_steps(lab: Lab) -> int:
    return SETTINGS[DEFAULT].dense_steps(lab.scale.serve_steps)


def jobs_of(lab: Lab, answers: Sequence[Served]) -> list[SimulatedJob]:
    """Make simulated jobs of served edits, with their arrival times."""
    return [
        make_job(
            index=index,
            at=one.arrival.at,
            num_steps=lab.scale.serve_steps,
            num_tokens=one.facts.num_tokens,
            num_masked=one.facts.num_masked_tokens,
            template=str(one.arrival.template),
            num_dense_steps=dense_steps(lab),
        )
        for index, one in enumerate(answers)
    ]


def drawn_jobs(lab: Lab, workload: Sequence[Arrival]) -> list[SimulatedJob]:
    return [
        make_job(
            index=index,
            at=arrival.at,
            num_steps=lab.scale.serve_steps,
            num_tokens=lab.num_tokens,
            num_masked=max(round(arrival.mask_ratio * lab.num_tokens), 1),
            template=str(arrival.template),
            num_dense_steps=dense_steps(lab),
        )
        for index, arrival in enumerate(workload)
    ]


def capacity(lab: Lab, service: Service) -> float:
    """Return the edits per second that a worker sustains: with a full batch of average masks, or as fast as one edit
    after the other can be prepared and finished, if that is slower."""
    mean = statistics.fmean(one.mask_ratio for one in draw_workload(recipe(lab, 2000, 1.0, seed=0)))
    masked, num_dense = round(mean * lab.num_tokens), dense_steps(lab)
    cached = service.step(((lab.num_tokens, MAX_BATCH_SIZE, MAX_BATCH_SIZE * masked, 0),))
    dense = service.step(((lab.num_tokens, 0, 0, MAX_BATCH_SIZE),))
    steps = ((lab.scale.serve_steps - num_dense) * cached + num_dense * dense) / MAX_BATCH_SIZE
    return 1 / max(steps, service.side.prepare, service.side.period(masked))
