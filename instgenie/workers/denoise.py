"""The denoise process of a worker: takes steps, and registers templates in between. Knows no picture and no prompt.

Before every step finished jobs leave, and the policy decides which waiting jobs join and which running ones wait for
them. A job whose activations are still loading lets others go first; the loop never waits for one. Other ways of
batching exist to compare with:

    static            one batch after the other, each prepared, denoised and finished by this one process
    static-pipelined  one batch after the other, prepared and finished by processes of their own
    naive             every job joins as soon as there is room; this process prepares and finishes between steps
"""

import logging
import sys
import time
from collections.abc import Sequence
from concurrent.futures import wait

import torch

from instgenie.cluster.config import ProcessConfig
from instgenie.cluster.popularity import Popularity
from instgenie.cluster.wire import (
    Cancel,
    CountEdit,
    Denoise,
    Dropped,
    EditCounted,
    Fetch,
    FetchLoras,
    Finish,
    Forget,
    Frame,
    Keep,
    List,
    Prepare,
    PrepareTemplate,
    Priced,
    Recall,
    Register,
    Stop,
)
from instgenie.cost.latency import calibrated_name
from instgenie.cost.learning import LearntCosts
from instgenie.cost.table import Price
from instgenie.engine.changed import make_changed
from instgenie.engine.control_graphs import make_control_graphs
from instgenie.engine.controls import ControlShelf, LocalControls, StepControls
from instgenie.engine.copying import Copying
from instgenie.engine.graphs import make_graphs
from instgenie.engine.loop import Engine
from instgenie.engine.merging import Merging
from instgenie.engine.own import OwnActivations
from instgenie.engine.planning import make_planning
from instgenie.engine.pricing import price_of, price_steps
from instgenie.engine.warm import warm_up_finishing, warm_up_loras, warm_up_preparing, warm_up_steps
from instgenie.jobs.job import Job
from instgenie.models.family import PartKind
from instgenie.models.model import Model
from instgenie.scheduling.names import ONE_PROCESS
from instgenie.scheduling.policies import make_policy
from instgenie.scheduling.policy import Situation
from instgenie.workers.budget import with_budget
from instgenie.workers.comparisons import SideTask, SideWork
from instgenie.workers.control_prices import with_controls
from instgenie.workers.controls import ControlsLostError, RemoteControls, news_of, settle_controls
from instgenie.workers.far_branches import Companion, repeats_branch, settle_branches, split_branches
from instgenie.workers.keyed import KeyedJobs
from instgenie.workers.keys import Keys
from instgenie.workers.line import Line
from instgenie.workers.locker import Locker
from instgenie.workers.lora_desk import LoraDesk
from instgenie.workers.mailbox import Handler, Mailbox
from instgenie.workers.own_room import OwnRoom
from instgenie.workers.process import await_begin, run_process, say_ready
from instgenie.workers.queue import JobGroup, TrackedJob, WaitingQueue
from instgenie.workers.registrar import PendingTemplate, Registrar
from instgenie.workers.templates import Templates, open_store, serve_peers

SECONDS_BETWEEN_BEATS = 0.25
MAX_CONTROL_RETRIES = 5  # steps of one edit that are repeated because a process of ControlNets has died

log = logging.getLogger(__name__)

PARTS: frozenset[PartKind] = frozenset({"network"})


class Denoiser:
    def __init__(self, config: ProcessConfig, model: Model, line: Line) -> None:
        self.model = model
        self.line = line
        self.policy = make_policy(config.scheduling, config.batching, weights=dict(config.weights))
        name = calibrated_name(config.model, config.quantization or config.weights_dtype)
        form = config.cache.dtype, config.cache.stride, config.cache.keeps_text
        self.costs = with_controls(price_steps(model, name, config.plan, *form), config, model)
        self.learnt = LearntCosts(self.costs)
        planning = make_planning(model, name, config.plan)
        own_bytes = sys.maxsize if config.cache.own_bytes is None else config.cache.own_bytes
        changed = make_changed(model, config.model, config.reuse_changed, own_bytes)
        own = OwnActivations(model, keeps_text=config.cache.keeps_text, changed=changed)
        graphs = make_graphs(model, config.graphs)
        merging = Merging(config.loras.merges)
        self.controls = make_controls(config, model, line)
        self.companion = make_companion(config, line)
        self.engine = Engine(
            model, config.max_batch_size, planning,
            graphs=graphs, own=own, merging=merging, copying=Copying(config.loras.weights_bytes),
            controls=self.controls, far=self.companion,
        )  # fmt: skip
        keys = Keys(model, *form)
        store = open_store(config.cache, model.device, has_peers=bool(config.peer_address))
        self.peer_server = serve_peers(store, config.peer_address, config.cache.peer_bytes_per_second)
        self.templates = Templates(store, model.device, keys, line.wake, config.cache.seconds_to_live)
        self.queue = WaitingQueue(model, self.templates, line, OwnRoom(model, own_bytes, own.num_text, changed))
        self.keyed = KeyedJobs(line, Locker(config.hold_bytes, config.hold_seconds))
        self.loras = LoraDesk(model, config.loras, line)
        self.queue.on_leave = self.forget
        self.running: dict[Job, TrackedJob] = {}
        self.registrar = Registrar(model, self.templates, line)
        self.popularity = Popularity(config.register_after, config.register_window)  # at all fronts
        self.side_work = SideWork(model, line, config.max_batch_size, config.batching)
        self.mailbox = Mailbox(line, self.handlers(does_side_work=config.batching in ONE_PROCESS))
        self.num_interruptions = 0
        self.num_joined = 0
        self.stepped_at: float | None = None  # end of the last step; None: other work came since
        self.is_stopped = False

    def handlers(self, does_side_work: bool) -> dict[type, Handler]:
        templates = self.templates
        handlers: dict[type, Handler] = {
            Denoise: self.accept,
            Register: self.registrar.accept,
            Cancel: lambda message, _: self.drop(message.id),
            Fetch: lambda message, _: self.queue.announce(message),
            FetchLoras: lambda message, _: self.loras.tiers.warm(message.loras),
            Forget: lambda message, _: templates.forget(templates.keys.find(message.template)),
            Keep: lambda message, _: templates.ask_for(templates.keys.find(message.template)),
            Recall: lambda message, _: templates.recall(templates.keys.find(message.template)),
            CountEdit: lambda message, _: self.count_edit(message),
            List: lambda message, _: templates.list_all(message.model),
            Stop: lambda *_: self.stop(),
        }
        return handlers | (dict.fromkeys((Prepare, PrepareTemplate, Finish), self.take_task) if does_side_work else {})

    def run(self) -> None:
        self.line.send(Priced(self.costs))
        while not self.is_stopped:
            self.hear(wait=self.is_idle)
            self.work_between_batches()
            self.join()
            self.step()
            self.register()
        self.close()

    def close(self) -> None:
        """Let the store finish writing, which may take long, and give signs of life meanwhile."""
        closing = self.templates.close()
        while not wait([closing], SECONDS_BETWEEN_BEATS).done:
            self.line.receive(wait=False)
        if self.peer_server:
            self.peer_server.close()

    # messages

    def hear(self, wait: bool) -> None:
        """Handle all messages that are there, then send what threads have to report."""
        self.mailbox.read_all(wait)
        for report in self.templates.reports():
            self.line.send(*report)

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to do but wait for messages or threads."""
        has_work = self.engine.pick() or self.queue.has_ready or self.side_work.is_pending(self.queue.num_jobs)
        return not (has_work or self.next_template() or self.is_stopped)

    def accept(self, message: Denoise, frames: Sequence[Frame]) -> None:
        for given in message.jobs:
            self.cancel(given.id)  # an older attempt
        message, frames = self.keyed.take_known(message, frames)
        accepted = self.queue.accept(message, frames)
        for tracked in accepted:
            self.loras.begin(tracked)
            self.controls.open(tracked.job)
        self.keyed.note(message.jobs, accepted)

    def forget(self, tracked: TrackedJob) -> None:
        """Let go of what is kept for a job that has ended, however it did."""
        self.keyed.leave(tracked)
        self.loras.release(tracked)
        self.controls.close(tracked.job)
        if self.companion:
            self.companion.close(tracked.job)

    def count_edit(self, message: CountEdit) -> None:
        has_come_back = self.popularity.note(message.template, message.request)
        self.line.send(EditCounted(message.template, has_come_back))

    def drop(self, id: str) -> None:
        self.cancel(id)
        self.line.send(Dropped(id))

    def cancel(self, id: str) -> None:
        """Drop an edit or a registration, wherever it is; an edit that somebody else asked for, too, goes on."""
        if self.keyed.give_up(id):
            return
        self.registrar.cancel(id)
        self.side_work.cancel(id)
        self.queue.cancel(id)
        for tracked in [tracked for tracked in self.running.values() if tracked.id == id]:
            self.engine.leave(tracked.job)
            self.leave(tracked)

    def stop(self) -> None:
        self.is_stopped = True

    # preparing and finishing, in a worker of one process

    def take_task(self, message: SideTask, frames: list[Frame]) -> None:
        if self.side_work.take(message, frames):
            self.interrupt()

    def work_between_batches(self) -> None:
        self.side_work.start_waiting()
        while not (self.engine.jobs or self.is_stopped) and self.side_work.advance(self.queue.num_jobs):
            self.hear(wait=self.side_work.is_waiting(self.queue.num_jobs))

    def interrupt(self) -> None:
        """Count an interruption of the steps by other work."""
        self.num_interruptions += bool(self.engine.jobs)

    # steps

    def join(self) -> None:
        """Let waiting groups join the batch, and running jobs leave it for them, as the policy decides."""
        self.policy.meet(job.terms.tenant for job in (*self.queue.jobs, *self.running.values()))
        tracked_jobs = [self.running[job] for job in self.engine.jobs]
        running = [tracked.priced(self.costs) for tracked in tracked_jobs]
        situation = Situation(running, self.engine.max_jobs, self.costs, time.monotonic())
        self.queue.sort(self.policy, situation)
        self.queue.settle()
        self.queue.grant_own_room(self.engine.jobs)
        num_ready = self.queue.num_ready
        if not num_ready:
            return
        decision = self.policy.decide(self.queue.groups, num_ready, situation)
        if decision.split:
            self.queue.split(decision.split)
        groups = self.queue.take(decision.joining)
        self.preempt([tracked_jobs[index] for index in decision.leaving], groups)
        for group in groups:
            for tracked in group.jobs:
                tracked.joined_at, tracked.is_preempted = time.perf_counter(), False
                split_branches(self.companion, tracked)
                self.running[tracked.job] = tracked
                self.engine.join(tracked.job)
            self.num_joined += group.num_jobs
            self.mailbox.report_joined(group)

    def preempt(self, leaving: Sequence[TrackedJob], joining: Sequence[JobGroup]) -> None:
        """Let running jobs wait for those that join, or for those that stay. They go on later with the latents they
        have."""
        for tracked in leaving:
            self.engine.leave(tracked.job)
            del self.running[tracked.job]
            tracked.run_seconds += time.perf_counter() - tracked.joined_at
            self.queue.give_back(tracked)
        if leaving:
            others = (*(group.jobs[0] for group in joining), *self.running.values())
            self.mailbox.report_preempted(leaving, by=others[0])

    def step(self) -> None:
        """Take a step and report on it. Its seconds include the device's work, but not loads for the next step."""
        self.settle_adapters()
        jobs = self.engine.pick()
        if not jobs:
            self.stepped_at = None
            return
        before = {job: job.latents for job in jobs if job.step + 1 in self.running[job].partials}
        predicted = self.costs.step_seconds(price_of(job, self.costs) for job in jobs)
        prices = [price_of(job, self.learnt.table) for job in jobs]
        start = time.perf_counter()
        result = self.engine.step(isolate_failures=True)
        self.synchronize()
        seconds = time.perf_counter() - start
        between = 0.0 if self.stepped_at is None else start - self.stepped_at
        self.stepped_at = start + seconds
        self.policy.pace.measure(predicted, seconds + between)
        self.policy.charge([self.running[job].terms.tenant for job in jobs], seconds)
        for job, error in result.failed.items():
            if not repeats(self.running[job], error, self.companion, self.engine):
                self.mailbox.report_failure(self.running[job], error)
                self.leave(self.running[job])
        self.registrar.stepped(seconds)
        stepped = [self.running[job] for job in jobs if job not in result.failed]
        counts = self.num_interruptions, self.num_joined
        self.mailbox.report_step(stepped, seconds, predicted, *counts, between)
        self.learn(prices, seconds + between)
        for job, latents in before.items():
            if job not in result.failed:
                self.mailbox.send_partial(self.running[job], latents)
        for job in result.finished:
            self.hand_over(self.running[job])

    def settle_adapters(self) -> None:
        """Give running jobs the LoRAs and ControlNets that have come. Jobs fail whose own cannot be loaded."""
        settle_branches(self.companion, self.running, self.engine)
        running = self.running.values()
        for tracked, error in (*self.loras.settle(running), *settle_controls(self.controls, running)):
            assert isinstance(tracked, TrackedJob)
            self.mailbox.report_failure(tracked, error)
            self.engine.leave(tracked.job)
            self.leave(tracked)
        if news := news_of(self.controls):
            self.line.send(news)

    def learn(self, prices: Sequence[Price], seconds: float) -> None:
        """Correct the costs of steps by a measured one."""
        if not self.learnt.measure(prices, seconds):
            return
        if self.costs.ratio != self.learnt.costs.ratio:
            self.policy.pace.restart(self.learnt.costs.ratio)
        self.costs = self.learnt.costs
        self.line.send(Priced(self.costs))

    def hand_over(self, tracked: TrackedJob) -> None:
        sent = self.mailbox.send_latents(tracked)
        self.keyed.hold(tracked, *sent)
        self.leave(tracked)
        self.side_work.handed_over(tracked.id)

    def leave(self, tracked: TrackedJob) -> None:
        del self.running[tracked.job]
        self.queue.release(tracked)

    def synchronize(self) -> None:
        """Wait for the stream that computes; loads for the next step go on in others."""
        if self.model.device.type == "cuda":
            torch.cuda.current_stream(self.model.device).synchronize()

    # templates

    def next_template(self) -> PendingTemplate | None:
        return self.registrar.next(is_idle=not (self.engine.jobs or self.side_work.away))

    def register(self) -> None:
        """Register a few steps of a template, if no job runs, an edit waits for it, or it has waited too long."""
        if pending := self.next_template():
            self.interrupt()
            self.engine.merging.undo()
            self.registrar.advance(pending)
            self.stepped_at = None


def make_controls(config: ProcessConfig, model: Model, line: Line) -> StepControls:
    """ControlNets in processes of their own, if there are any, or in this one."""
    if config.control_addresses:
        names = [name for name, _ in config.controls.modules]
        return RemoteControls(model, config.control_addresses, names, line.wake, line.keep_alive)
    shelf = ControlShelf(model.device, model.dtype, config.controls.max_bytes)
    return LocalControls(model, shelf, line.wake, make_control_graphs(model.device, config.graphs))


def make_companion(config: ProcessConfig, line: Line) -> Companion | None:
    return Companion(config.guidance_address, line.wake, line.keep_alive) if config.guidance_address else None


def repeats(tracked: TrackedJob, error: Exception, companion: Companion | None, engine: Engine) -> bool:
    """Return whether a job goes on after a step that failed: a process that helped with it has died, and the step is
    repeated when another one is there."""
    return repeats_branch(companion, tracked, error, engine) or repeats_controls(tracked, error, engine)


def repeats_controls(tracked: TrackedJob, error: Exception, engine: Engine) -> bool:
    """The same for ControlNets. A job is given up after a few deaths."""
    if not isinstance(error, ControlsLostError) or tracked.num_control_retries >= MAX_CONTROL_RETRIES:
        return False
    tracked.num_control_retries += 1
    tracked.job.awaits_controls = True
    engine.join(tracked.job)
    log.warning("a step is repeated: %s", error, extra={"job": tracked.id, "step": tracked.job.step})
    return True


def serve(config: ProcessConfig, model: Model, line: Line) -> None:
    warm_up_steps(model, config.cache.dtype)
    if config.loras.is_on:
        warm_up_loras(model, config.cache.dtype, config.loras.weights_bytes)
    if config.batching in ONE_PROCESS:
        warm_up_preparing(model)
        warm_up_finishing(model)
    if begin := await_begin(line):
        denoiser = Denoiser(with_budget(config, begin.host_bytes, model.device), model, line)
        address = denoiser.peer_server.address if denoiser.peer_server else ""
        told = {"tells_layers": config.loras.is_on, "tells_controls": bool(config.controls.modules)}
        say_ready(line, model, address, **told)
        denoiser.run()


def main(config: str) -> None:
    run_process(config, serve, PARTS)
