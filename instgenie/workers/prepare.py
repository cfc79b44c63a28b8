"""The prepare process of a worker: turns wishes and pixels into jobs. Takes no step.

It remembers recent encodings: templates by their picture, prompts by their text.
"""

import time
from dataclasses import replace

from instgenie.adapters.tiers import DISK_BYTES
from instgenie.cluster.config import ProcessConfig
from instgenie.cluster.wire import Frame, Prepare, Prepared, PrepareTemplate, read_mask, read_picture
from instgenie.engine.adapting import PromptLoras
from instgenie.engine.prepare import Encodings, prepare
from instgenie.engine.register import template_edit, template_job
from instgenie.engine.warm import warm_up_preparing
from instgenie.jobs.job import Job
from instgenie.models.family import PartKind
from instgenie.models.model import Model
from instgenie.telemetry import traces
from instgenie.workers.frames import job_frames
from instgenie.workers.inbox import Inbox
from instgenie.workers.line import Line
from instgenie.workers.process import failure, run_process, say_ready

PARTS: frozenset[PartKind] = frozenset({"vae", "text_encoder"})


class Preparer:
    def __init__(self, model: Model, line: Line, lora_disk_bytes: int = DISK_BYTES) -> None:
        self.model = model
        self.line = line
        self.encodings = Encodings()
        self.prompt_loras = PromptLoras(model, disk_bytes=lora_disk_bytes)

    def handle(self, message: Prepare | PrepareTemplate, frames: list[Frame]) -> bool:
        """Prepare an edit or a template, and send the job. Returns whether it succeeded."""
        start = time.perf_counter()
        try:
            job = self.make_job(message, frames)
            head, tensors = job_frames(job)
        except Exception as error:
            self.line.send(failure(message, error))
            return False
        num_masked = int(job.masked.sum())
        seconds = time.perf_counter() - start
        prepared = Prepared(message.id, message.attempt, head, len(job.masked), num_masked, job.num_steps, seconds)
        self.line.send(prepared, tensors)
        if isinstance(message, Prepare):
            facts = {"num_tokens": len(job.masked), "num_masked_tokens": num_masked}
            traces.record(message.trace, "prepare", seconds, attempt=message.attempt, **facts)
        return True

    def make_job(self, message: Prepare | PrepareTemplate, frames: list[Frame]) -> Job:
        picture = read_picture(frames[0], message.size)
        if isinstance(message, Prepare):
            mask = read_mask(frames[1], message.size)
            num_references = len(message.references)
            references = tuple(map(read_picture, frames[2 : 2 + num_references], message.references))
            images = tuple(read_picture(frame, message.size) for frame in frames[2 + num_references :])
            edit = message.wish.edit(picture, mask, self.model.steps, self.model.guidance, images)
            return prepare(replace(edit, references=references), self.model, self.encodings, self.prompt_loras)
        return template_job(template_edit(picture, self.model, None, message.steps, message.guidance), self.model)


def serve(config: ProcessConfig, model: Model, line: Line) -> None:
    warm_up_preparing(model)
    say_ready(line, model)
    run(Preparer(model, line, config.loras.disk_bytes), Inbox(line))


def run(preparer: Preparer, inbox: Inbox) -> None:
    """Prepare edits, and templates when no edit waits, until the process is told to stop."""
    while not inbox.is_done:
        if task := inbox.next():
            preparer.handle(*task)


def main(config: str) -> None:
    run_process(config, serve, PARTS)
