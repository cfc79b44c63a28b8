"""Our engine as a system: dense, or with activations next to the model or in main memory."""

from collections.abc import Callable, Sequence

from instgenie.bench.timing import Caching, System, Timing
from instgenie.cache.host import HostTier
from instgenie.engine.graphs import Graphs
from instgenie.engine.loading.loader import Loader
from instgenie.engine.loop import Engine
from instgenie.engine.own import OwnActivations, reuse_own
from instgenie.engine.planning import Planning
from instgenie.engine.prepare import prepare
from instgenie.engine.register import make_activations, reuse
from instgenie.jobs.activations import Activations, Span
from instgenie.jobs.job import Job
from instgenie.jobs.quality import Quality, with_quality
from instgenie.machine.clock import now
from instgenie.models.model import Model
from instgenie.types import Edit

MakeJob = Callable[[Edit], Job]


def own_system(
    name: str,
    caching: Caching | None,
    model: Model,
    make_job: MakeJob,
    planning: Planning | None = None,
    loader: Loader | None = None,
    graphs: Graphs | None = None,
    keeps_text: bool = False,
) -> System:
    def run(edits: Sequence[Edit]) -> Timing:
        start = now(model.device)
        engine = Engine(model, len(edits), planning, loader, graphs, OwnActivations(model, keeps_text=keeps_text))
        for edit in edits:
            engine.join(make_job(edit))
        prepared = now(model.device)
        while engine.jobs:
            engine.step()
        end = now(model.device)
        return Timing(edit=end - start, denoise=end - prepared)

    return System(name, caching, run)


def dense_jobs(model: Model) -> MakeJob:
    return lambda edit: prepare(edit, model)


def cold_jobs(model: Model, quality: Quality) -> MakeJob:
    """Jobs of pictures that were never seen: they read what their own dense steps leave behind."""
    return lambda edit: reuse_own(prepare(with_quality(edit, quality), model))


def cached_jobs(model: Model, activations: Activations) -> MakeJob:
    return lambda edit: reuse(prepare(edit, model), activations)


def move_to_host(near: Activations, host: HostTier, model: Model) -> Activations:
    """Copy activations that lie next to the model into main memory."""
    key = near.key
    host.store(key, Span(key.slots, near.rows, near.time))
    span = host.load(key, key.slots)
    assert span is not None
    return make_activations(key, span, model)
