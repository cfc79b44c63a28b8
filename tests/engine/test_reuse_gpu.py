"""Own reuse, and templates with a stride and in four bits, on a GPU: captured passes give the same numbers as
uncaptured ones, and no step waits for the device."""

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.cached import KINDS, register_for
from helpers.cuda import waiting_is_an_error
from helpers.edits import apart, close, make_edit, prepare, run
from helpers.names import FAMILIES
from torch import Tensor

from instgenie.bench.ours import move_to_host
from instgenie.cache.host import HostTier
from instgenie.engine import register as registering
from instgenie.engine.graphs import Graphs
from instgenie.engine.loop import Engine
from instgenie.engine.own import OwnActivations, reuse_own
from instgenie.engine.register import make_key, observe_span, reuse, template_job
from instgenie.jobs.activations import Activations, CacheDtype, Kind
from instgenie.jobs.job import Job
from instgenie.kernels import switch
from instgenie.models.loading.load import load
from instgenie.models.model import Model

pytestmark = pytest.mark.gpu
SOME = ("blend_guided", "sdxl")


def make_engine(model: Model, kind: Kind = "kv", graphs: Graphs | None = None) -> Engine:
    engine = Engine(model, graphs=graphs)
    engine.own = OwnActivations(model, kind)
    return engine


def run_in(engine: Engine, given: list[Job]) -> list[Tensor]:
    jobs = [replace(job) for job in given]
    for job in jobs:
        engine.join(job)
    while engine.jobs:
        engine.step()
    return [job.latents for job in jobs]


def make_owns(model: Model) -> list[Job]:
    edits = [
        make_edit(steps=6, own_steps=(0, 3)),
        make_edit(steps=6, share=0.2, seed=1, true_guidance=2.0, own_steps=(0, 1)),
    ]
    return [reuse_own(prepare(edit, model)) for edit in edits]


def make_strided(model: Model, kind: Kind, cache_dtype: CacheDtype) -> list[tuple[Job, Activations]]:
    """Two jobs with every third step of six, and their templates."""
    edits = [make_edit(steps=6), make_edit(steps=6, share=0.2, seed=1, picture_seed=1)]
    templates = [register_for(model, edit, kind, cache_dtype=cache_dtype, stride=3) for edit in edits]
    return [(reuse(prepare(edit, model), one), one) for edit, one in zip(edits, templates, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", SOME)
def test_jobs_that_keep_their_own_rows_are_captured(family: str, kind: Kind, folders: dict[str, Path]) -> None:
    """The dense passes that store rows, and those that read them, in each round with other rows."""
    model = load(str(folders[family]), "cuda")
    jobs, graphs = make_owns(model), Graphs(model)
    expected = run_in(make_engine(model, kind), jobs)
    for _ in range(3):
        found = run_in(make_engine(model, kind, graphs), jobs)
        assert max(map(apart, found, expected)) <= close(model)
    assert len(graphs.captured) >= 3
    assert not graphs.reasons


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_own_rows_of_kernels_are_those_of_the_references(family: str, kind: Kind, folders: dict[str, Path]) -> None:
    model = load(str(folders[family]), "cuda", "float32")
    jobs, graphs = make_owns(model), Graphs(model)
    with switch.kernels(enabled=False):
        expected = run_in(make_engine(model, kind), jobs)
    found = run_in(make_engine(model, kind, graphs), jobs)
    assert max(map(apart, found, expected)) <= close(model)


@pytest.mark.parametrize("cache_dtype", ["model", "fp8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", SOME)
def test_strided_templates_are_captured_in_every_tier(
    family: str, kind: Kind, cache_dtype: CacheDtype, folders: dict[str, Path]
) -> None:
    """Rows in main memory and on the GPU give bit-identical results; captured and uncaptured passes close ones."""
    model = load(str(folders[family]), "cuda")
    made = make_strided(model, kind, cache_dtype)
    near = [job for job, _ in made]
    host = HostTier(2**30)
    far = [reuse(job, move_to_host(whole, host, model)) for job, whole in made]
    expected = run(model, near)
    near_graphs, far_graphs = Graphs(model), Graphs(model)
    for _ in range(2):
        on_gpu, in_host = (
            run_in(make_engine(model, kind, graphs), jobs) for graphs, jobs in ((near_graphs, near), (far_graphs, far))
        )
        assert max(map(apart, on_gpu, in_host)) == 0
        assert max(map(apart, on_gpu, expected)) <= close(model)
    assert far_graphs.captured
    assert not far_graphs.reasons


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_that_keep_and_read_own_rows_do_not_wait(family: str, captured: bool, folders: dict[str, Path]) -> None:
    model = load(str(folders[family]), "cuda")
    graphs = Graphs(model) if captured else None
    engine = make_engine(model, graphs=graphs)
    for _ in range(2):
        run_in(engine, make_owns(model))  # captures, and asks for memory
    jobs = make_owns(model)
    for job in jobs:
        engine.join(job)
    while engine.jobs:
        with waiting_is_an_error():
            engine.step()


@pytest.mark.parametrize("cache_dtype", ["model", "fp8", "int4"])
def test_a_registration_looks_for_numbers_with_one_wait(
    cache_dtype: CacheDtype, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the check at its end runs without a wait."""
    model, edit = load(str(folders["blend"]), "cuda"), make_edit(steps=4)
    job, key = template_job(edit, model), make_key(edit, model, "kv", cache_dtype)
    observe_span(job, model, key, range(4))
    seen: list[Tensor] = []
    monkeypatch.setattr(registering, "check_finite", lambda bounds, steps: seen.append(bounds))
    with waiting_is_an_error():
        observe_span(job, model, key, range(4))
    [bounds] = seen
    assert bounds.shape == (sum(model.run_lengths), 2)
    assert bounds.isfinite().all()
