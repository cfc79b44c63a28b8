"""The stages of an edit: prepare, gather, denoise, finish. Sends each edit to the process of its stage, and moves it on
when the process answers. Knows no socket.

An entry is with exactly one process at a time, and the result of a stage is kept until the next stage has answered, so
the death of a process costs one stage and no more. An answer counts only if it comes from the process that holds the
entry, for the current attempt.
"""

import time
from collections.abc import Sequence

from instgenie.cluster import wire
from instgenie.cluster.edits import Edits
from instgenie.cluster.entries import MAX_PARKS, ComputeMode, DenoisedJob, EditEntry, Entry, PreparedJob, TemplateEntry
from instgenie.cluster.forecast import seconds_left
from instgenie.cluster.library import Library
from instgenie.cluster.messages import Send, denoising, finish_message, prepare_message
from instgenie.cluster.orders import Facts
from instgenie.cluster.placement import Placement
from instgenie.cluster.processes import Process, Worker
from instgenie.cluster.reporter import Reporter
from instgenie.cluster.unasked import Unasked
from instgenie.scheduling.terms import NO_DEADLINE
from instgenie.types import ReuseFound


class Stages:
    def __init__(
        self,
        placement: Placement,
        library: Library,
        unasked: Unasked,
        edits: Edits,
        reporter: Reporter,
        send: Send,
    ) -> None:
        self.placement = placement
        self.workers = placement.workers
        self.library = library
        self.unasked = unasked
        self.edits = edits
        self.reporter = reporter
        self.send = send

    def seconds_left(self, entry: EditEntry) -> float | None:
        return seconds_left(entry.group, self.workers[entry.worker].load)

    # from the cluster to a process

    def dispatch(self, process: Process, entries: Sequence[Entry]) -> None:
        """Send entries, which are at one stage, to the process of that stage."""
        head = entries[0]
        if isinstance(head, TemplateEntry):
            self.library.dispatch(process, head)
            return
        edits = [entry for entry in entries if isinstance(entry, EditEntry)]
        match head.stage:
            case "prepare":
                self.library.registrations.passed(process.worker)
                self.send(process, *prepare_message(edits[0]))
            case "finish":
                self._dispatch_finish(process, edits[0])
            case _:
                self._dispatch_jobs(process, edits)

    def _dispatch_finish(self, process: Process, entry: EditEntry) -> None:
        assert entry.denoised is not None
        self.send(process, *finish_message(entry, entry.denoised.message.latents, None, entry.denoised.latents))

    def _dispatch_jobs(self, process: Process, entries: Sequence[EditEntry]) -> None:
        """Send jobs to be denoised, and park those that must use activations which the worker does not have."""
        load = self.workers[process.worker].load
        for entry in entries:
            if entry.mode is ComputeMode.CACHED and load.tier_of(entry.work) is None:
                self._wait_for_template(entry)
        if going := [entry for entry in entries if entry.id in process.held]:
            frames = [frame for entry in going if entry.prepared for frame in entry.prepared.tensors]
            head, peers = self.library.naming.head, self.library.peers.addresses
            finish_seconds = load.margin.seconds
            jobs = tuple(
                denoising(entry, head(entry), peers(entry.template, entry.worker), finish_seconds) for entry in going
            )
            self.send(process, wire.Denoise(jobs), frames)

    def _wait_for_template(self, entry: EditEntry) -> None:
        """Have the template registered on the edit's worker first, unless that was in vain a few times, or nobody asked
        for the template and the edit may not register it."""
        template = self.library.templates.get(entry.template or "")
        is_asked_for = (template and template.is_asked_for) or (entry.must_not_run_dense and entry.order.may_store)
        if not entry.may_store and not is_asked_for:
            self.edits.compute_in_full(entry, "its template was lost, and the edit may not store its picture")
        elif entry.num_parks < MAX_PARKS:
            self.library.park(entry)
        else:
            why = f"its template was registered {MAX_PARKS} times and each time lost its memory to others"
            self.edits.compute_in_full(entry, why)

    # prepare

    def on_prepared(self, process: Process, message: wire.Prepared, frames: list[wire.Frame]) -> None:
        entry = process.take_back(message.id, message.attempt)
        if entry:
            self.workers[process.worker].load.measure_side_stage("prepare", message.seconds)
        match entry:
            case TemplateEntry():
                self.library.prepared(entry, PreparedJob(message, frames))
            case EditEntry():
                entry.prepared = PreparedJob(message, frames)
                self.reporter.waited(entry, "prepare", message.seconds)
                entry.move("gather")
                self.edits.gather(entry.group)

    # denoise

    def on_fetched(self, process: Process, message: wire.Fetched, frames: list[wire.Frame]) -> None:
        load = self.workers[process.worker].load
        fixed, _ = load.costs.fetch.get(message.tier, (0.0, 0.0))
        load.fetch_rates.measure(message.tier, message.num_bytes, message.seconds - fixed)
        self.reporter.fetched(message.tier, message.num_bytes, message.seconds)

    def on_loras_kept(self, process: Process, message: wire.LorasKept, frames: list[wire.Frame]) -> None:
        worker = self.workers[process.worker]
        worker.lora_bytes = message.num_bytes
        worker.load.loras.hold(message.versions)
        for tier, num_bytes, seconds in message.loads:
            worker.load.loras.measure(num_bytes, seconds)
            self.reporter.lora_loaded(tier, num_bytes, seconds)

    def on_priced(self, process: Process, message: wire.Priced, frames: list[wire.Frame]) -> None:
        load = self.workers[process.worker].load
        if message.costs.ratio != load.costs.ratio:
            load.pace.restart(message.costs.ratio)
        load.costs = message.costs

    def on_found(self, process: Process, message: wire.TierFound, frames: list[wire.Frame]) -> None:
        entry = held_edit(process, message.id, message.attempt)
        if entry is None:
            return
        entry.tier = message.tier
        self.reporter.cache_query(entry)
        if message.tier is None:
            entry.run_dense(message.why_none)
        elif entry.template:
            entry.mode = ComputeMode.CACHED
            self.library.meet(entry.template, entry)
        self.placement.settle(entry, self.workers[process.worker])

    def on_missing(self, process: Process, message: wire.Missing, frames: list[wire.Frame]) -> None:
        entry = process.take_back(message.id, message.attempt)
        if isinstance(entry, EditEntry):
            entry.attempt += 1
            if not self.library.lacks(process.worker, message.template):
                self.edits.compute_in_full(entry, "its template was deleted")
            if entry.id in self.edits.entries:
                self.placement.put(entry)

    def on_joined(self, process: Process, message: wire.Joined, frames: list[wire.Frame]) -> None:
        for told, plan in zip(message.jobs, message.plans, strict=True):
            if entry := held_edit(process, told.id, told.attempt):
                self.edits.join_batch(entry, plan)

    def on_preempted(self, process: Process, message: wire.Preempted, frames: list[wire.Frame]) -> None:
        for told in message.jobs:
            if entry := held_edit(process, told.id, told.attempt):
                self.edits.leave_batch(entry)
                entry.num_preemptions += 1
                entry.waits_from = time.monotonic()
                self.reporter.preempted(entry, message.by)

    def on_stepped(self, process: Process, message: wire.BatchStepped, frames: list[wire.Frame]) -> None:
        worker = self.workers[process.worker]
        worker.step(message.seconds, message.predicted_seconds, message.between_seconds)
        worker.num_interruptions, worker.num_joined = message.num_interruptions, message.num_joined
        batch_size = len(message.jobs) + message.num_others
        self.reporter.batch_stepped(worker.index, message.seconds, batch_size, message.between_seconds)
        stepped = [(told.step, entry) for told in message.jobs if (entry := held_edit(process, told.id, told.attempt))]
        for step, entry in stepped:
            entry.step = step
            worker.load.step(entry.id)
        own_seconds = message.seconds * len(stepped) / max(batch_size, 1)
        worker.policy.charge([entry.order.tenant for _, entry in stepped], own_seconds)
        for _, entry in stepped:
            self.reporter.stepped(entry, self.seconds_left(entry))

    def on_glimpsed(self, process: Process, message: wire.Glimpsed, frames: list[wire.Frame]) -> None:
        """Have a partial picture finished, unless the finish process is down; it is not sent again."""
        entry = held_edit(process, message.id, message.attempt)
        finisher = self.workers[process.worker].processes.get("finish", process)
        if entry and finisher.is_ready:
            self.send(finisher, *finish_message(entry, message.latents, message.index, frames))

    def on_denoised(self, process: Process, message: wire.Denoised, frames: list[wire.Frame]) -> None:
        entry = process.take_back(message.id, message.attempt)
        if isinstance(entry, EditEntry):
            entry.denoised = DenoisedJob(message, frames)
            entry.waits_from = time.monotonic()
            self.edits.leave_batch(entry)
            self.workers[process.worker].load.hand_over(entry.id)
            entry.move("finish")
            self.placement.put(entry)

    # finish

    def on_painted(self, process: Process, message: wire.Painted, frames: list[wire.Frame]) -> None:
        [picture] = (bytes(frame) for frame in frames)
        if message.partial is not None:
            entry = self.edits.entries.get(message.id)
            if entry and entry.attempt == message.attempt:
                self.reporter.partial(entry, message.partial, picture)
            return
        answered = process.take_back(message.id, message.attempt)
        if isinstance(answered, EditEntry):
            worker = self.workers[process.worker]
            worker.load.margin.measure(time.monotonic() - answered.waits_from)
            self.reporter.waited(answered, "finish", message.seconds + message.thread_seconds)
            worker.load.measure_side_stage("finish", message.period)
            seconds = time.monotonic() - answered.accepted_at
            self.edits.finish(answered, picture, facts_of(answered, message, worker), seconds)
            self.unasked.consider(answered)

    def on_failed(self, process: Process, message: wire.JobFailed, frames: list[wire.Frame]) -> None:
        if entry := process.take_back(message.id, message.attempt):
            self.edits.fail(entry, message.kind, message.message, message.param)


def held_edit(process: Process, id: str, attempt: int) -> EditEntry | None:
    entry = process.holding(id, attempt)
    return entry if isinstance(entry, EditEntry) else None


def why_dense(entry: EditEntry, found: ReuseFound) -> str:
    """Why no template was used, and where its own dense steps were to serve the edit instead, why these did not. An
    edit that got the result of one with its key, begun by another front, may have found less or more than it looked
    for."""
    if found == "template":
        return ""
    if entry.order.key and entry.mode is ComputeMode.CACHED:
        return "an edit with the same key was begun before the template was ready"
    if entry.mode is ComputeMode.OWN and found == "none":
        return f"{entry.why_dense}, and the device has no room for what the edit's own dense steps would leave behind"
    return entry.why_dense


def facts_of(entry: EditEntry, painted: wire.Painted, worker: Worker) -> Facts:
    assert entry.prepared is not None
    assert entry.denoised is not None
    prepared, denoised = entry.prepared.message, entry.denoised.message
    height, width = entry.order.size
    finish_seconds = painted.seconds + painted.thread_seconds
    worked = prepared.seconds + denoised.seconds + finish_seconds
    num_saved = prepared.num_steps * (prepared.num_tokens - denoised.num_computed_tokens)
    return Facts(
        seed=entry.order.wish.seed,
        width=width,
        height=height,
        num_tokens=prepared.num_tokens,
        num_masked_tokens=prepared.num_masked_tokens,
        num_computed_tokens=denoised.num_computed_tokens,
        cache_tier=entry.tier,
        why_dense=why_dense(entry, denoised.reuse),
        reuse=denoised.reuse,
        crop=entry.order.whole.box if entry.order.whole else None,
        worker=entry.worker,
        num_attempts=entry.attempt,
        queue_seconds=max(time.monotonic() - entry.accepted_at - worked, 0.0),
        prepare_seconds=prepared.seconds,
        denoise_seconds=denoised.seconds,
        dense_seconds=denoised.seconds + num_saved * worker.load.seconds_per_token,
        finish_seconds=finish_seconds,
        finish_thread_seconds=painted.thread_seconds,
        predicted_seconds=entry.predicted,
        num_preemptions=entry.num_preemptions,
        loras=denoised.loras,
        num_control_retries=denoised.num_control_retries,
        guidance=denoised.guidance,
        num_steps=prepared.num_steps,
        in_time=None if entry.order.deadline == NO_DEADLINE else time.monotonic() <= entry.order.deadline,
    )
