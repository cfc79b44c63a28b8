"""The laws of ControlNets, on every family. The truth is diffusers: its inpainting pipelines with ControlNets."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from helpers.cached import KINDS, register_for
from helpers.controlnets import control_image, controlled, controlnet_pipeline, save_controlnet
from helpers.edits import CLOSE, apart, close, far, make_edit, prepare, run, stock_arguments
from helpers.names import SHORT, TINY
from PIL import Image
from torch import Tensor

from instgenie.engine.control_graphs import ControlGraphs
from instgenie.engine.controls import LocalControls
from instgenie.engine.graphs import Graphs
from instgenie.engine.loop import Engine
from instgenie.engine.own import OwnActivations, reuse_own
from instgenie.engine.prepare import draw_noise
from instgenie.engine.register import reuse
from instgenie.jobs.activations import Kind
from instgenie.jobs.job import Job
from instgenie.models.flux.model import is_flux
from instgenie.models.loading.load import load
from instgenie.models.model import Model, unpack_latents
from instgenie.types import Edit

ONE: list[dict[str, Any]] = [{"scale": 0.8}]
WINDOW: list[dict[str, Any]] = [{"scale": 0.7, "start": 0.25, "end": 0.75}]
TWO: list[dict[str, Any]] = [{"scale": 0.5, "end": 0.5}, {"scale": 1.1, "start": 0.5}]
BOTH: list[dict[str, Any]] = [{"scale": 0.6}, {"scale": -0.4}]
GUIDED = {"true_guidance": 2.5, "negative_prompt": "sky"}


@pytest.fixture(params=[*(name for name, family in TINY.items() if family in ("flux", "unet")), SHORT])
def model(request: pytest.FixtureRequest, models: dict[str, Model]) -> Model:
    return models[request.param]


@pytest.fixture(scope="module")
def saved() -> dict[Model, list[Path]]:
    """The folders of two ControlNets for each model that a test has asked for."""
    return {}


@pytest.fixture
def nets(model: Model, saved: dict[Model, list[Path]], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    if model not in saved:
        folder = tmp_path_factory.mktemp("controlnets")
        saved[model] = [save_controlnet(folder / str(seed), model, seed) for seed in range(2)]
    return saved[model]


def with_controls(edit: Edit, nets: list[Path], uses: list[dict[str, Any]]) -> Edit:
    return controlled(edit, *zip(nets, uses, strict=False))


def stock_latents(model: Model, edit: Edit, nets: list[Path], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Run diffusers' pipeline. It samples from the autoencoder's distribution; its mean is taken instead."""
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
    height, width = edit.picture.shape[:2]
    grid = height // model.patch, width // model.patch
    noise = unpack_latents(draw_noise(edit.seed, grid, model), grid, model.latents_per_token).to(model.dtype)
    images = [Image.fromarray(image) for image in edit.control_images]
    uses = edit.controls
    is_one = len(uses) == 1
    told = {
        "control_image": images[0] if is_one else images,
        "controlnet_conditioning_scale": uses[0].scale if is_one else [use.scale for use in uses],
        "control_guidance_start": uses[0].start if is_one else [use.start for use in uses],
        "control_guidance_end": uses[0].end if is_one else [use.end for use in uses],
    }
    own = {"max_sequence_length": model.num_text_tokens} if is_flux(model) else {"negative_prompt": "sky"}
    if is_flux(model) and not is_one:
        own["control_mode"] = [None] * len(uses)
    pipeline = controlnet_pipeline(model, nets[: len(uses)])
    if not is_flux(model):
        encode = pipeline._encode_vae_image  # norms of a hole without detail depend on how it lies in memory
        pipeline._encode_vae_image = lambda image, generator: encode(image.contiguous(), generator)
    latents: Tensor = pipeline(**stock_arguments(edit), **told, **own, latents=noise).images
    return latents[0].float() if is_flux(model) else latents[0].flatten(1).T.float()


@pytest.mark.parametrize("uses", [ONE, WINDOW, TWO, BOTH], ids=["one", "window", "two", "both"])
def test_law_controls_full_mask_is_diffusers(
    model: Model, nets: list[Path], uses: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_flux(model) and (model.is_fill or model.sees_picture):
        pytest.skip("diffusers has no pipeline of Flux Fill or Kontext with ControlNets")
    edit = make_edit(share=1.0, seed=7, guidance=2.5, negative_prompt="sky")
    guided = with_controls(edit, nets, uses)
    [latents] = run(model, [guided])
    tolerance = CLOSE * max(latents.abs().max().item(), 1) if model.dtype == torch.float32 else 3 * close(model)
    assert apart(latents, stock_latents(model, guided, nets, monkeypatch)) <= tolerance
    assert apart(latents, run(model, [edit])[0]) > far(model)


def eight_edits(nets: list[Path]) -> list[Edit]:
    edits = []
    for seed, uses in enumerate([ONE, [], WINDOW, BOTH, TWO, [], ONE, BOTH]):
        size = (64, 32) if seed % 4 == 3 else (32, 48)
        edit = make_edit(steps=2 + seed % 3, share=0.1 + 0.1 * seed, seed=seed, size=size, own_steps=(0,))
        edits.append(with_controls(edit, nets, uses) if uses else edit)
    return edits


def make_jobs(model: Model, nets: list[Path], kinds: Sequence[Kind] = KINDS) -> list[Job]:
    """Dense, registered and own jobs of several sizes, with one ControlNet, two and none."""
    jobs = []
    for number, edit in enumerate(eight_edits(nets)):
        job = prepare(replace(edit, **GUIDED) if number % 2 else edit, model)
        if number % 3 == 1:
            job = reuse(job, register_for(model, edit, kinds[number % 2]))
        jobs.append(reuse_own(job) if number % 3 == 2 else job)
    return jobs


def test_law_controls_batched_is_alone(model: Model, nets: list[Path]) -> None:
    jobs = make_jobs(model, nets)
    together, alone = run(model, jobs), [run(model, [job])[0] for job in jobs]
    assert max(map(apart, together, alone)) <= 5 * close(model)
    same_size = [latents for latents in alone if latents.shape == alone[0].shape]
    assert min(itertools.starmap(apart, itertools.combinations(same_size, 2))) > far(model, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_law_controls_cached_is_dense_where_rows_saw_them(model: Model, nets: list[Path], kind: Kind) -> None:
    """At the step that left an edit's own rows, they give the same prediction as computing every token."""
    edit = with_controls(make_edit(own_steps=(0,), **GUIDED), nets, BOTH)
    engine = Engine(model)
    engine.own = OwnActivations(model, kind)
    engine.join(job := reuse_own(prepare(edit, model)))
    start = job.latents
    engine.step()
    assert job.own_steps is not None
    later = replace(job.own_steps, steps=(job.num_steps - 1,))
    again = replace(job, step=0, latents=start, own_steps=later)
    dense = replace(again, activations=None, plan=(), own_steps=None)
    engine.controls.begin([again, dense])
    with torch.no_grad():
        expected, found = model.predict([dense])[0], model.predict([again])[0]
        without = model.predict([replace(again, residuals=None)])[0]
    for whole, own, plain in zip(expected, found, without, strict=True):
        inside = own if len(own) == len(job.inside) else own[job.inside]
        assert apart(whole[job.inside], inside) <= 5 * close(model)
        assert apart(own, plain) > far(model, 1)


def test_law_controls_kv_is_y(model: Model, nets: list[Path]) -> None:
    edit = with_controls(make_edit(steps=3, **GUIDED), nets, BOTH)
    kv, y = (run(model, [reuse(prepare(edit, model), register_for(model, edit, kind))])[0] for kind in KINDS)
    assert apart(kv, y) <= 5 * close(model)


def test_law_controls_captured_is_uncaptured(model: Model, nets: list[Path]) -> None:
    """In the second round all signatures are known; lists of masked tokens are padded in both. Passes of ControlNets
    are captured, too."""
    jobs = make_jobs(model, nets, kinds=("kv", "kv"))  # a pass is not captured if activations are of two kinds
    graphs, expected = Graphs(model), run(model, jobs)
    control_graphs = ControlGraphs(model.device, max_branches=99)
    controls = LocalControls(model, graphs=control_graphs)
    for _ in range(2):
        engine = Engine(model, graphs=graphs, controls=controls)
        copies = [replace(job) for job in jobs]
        for job in copies:
            engine.join(job)
        while engine.jobs:
            engine.step()
        pairs = zip(copies, expected, strict=True)
        assert max(apart(job.latents, latents) for job, latents in pairs) <= 5 * close(model)
    if not is_flux(model):  # one whose residuals enter in the middle is captured in two halves
        assert {has_residuals for *_, has_residuals in graphs.captured} == {True, False}
    assert control_graphs.num_captured > 1


@pytest.mark.gpu
def test_controlnets_run_on_streams_of_their_own(tmp_path: Path, models: dict[str, Model]) -> None:
    """They begin before the network and end when it needs them, whatever the network's stream does meanwhile."""
    model = load(models["sd"].name, "cuda", "float32")
    nets = [save_controlnet(tmp_path / str(seed), model, seed) for seed in range(2)]
    job = prepare(with_controls(make_edit(steps=3, **GUIDED), nets, BOTH), model)
    controls = LocalControls(model)
    assert controls.streams is not None
    controls.begin([job])  # loads them
    assert job.residuals is not None
    expected = [residual.clone() for residual in job.residuals.result()]
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)  # the stream of the steps is busy; they wait for their inputs there, and then run
    controls.begin([job])
    streams = {stream.stream_id for stream in controls.streams._of.values()}
    assert len(streams) == 2
    assert torch.cuda.current_stream().stream_id not in streams
    assert all(torch.equal(a, b) for a, b in zip(job.residuals.result(), expected, strict=True))


def test_residuals_of_masked_tokens_alone(model: Model, nets: list[Path]) -> None:
    """Where only masked tokens flow, no other residuals are computed for the steps."""
    edit = with_controls(make_edit(steps=2, share=0.1), nets, ONE)
    job = reuse(prepare(edit, model), register_for(model, edit, "kv"))
    engine = Engine(model)
    engine.controls.begin([job])
    assert job.residuals is not None
    shapes = {residual.shape[1] for residual in job.residuals.result() if residual.ndim == 3}
    assert shapes == ({len(job.inside)} if is_flux(model) else set())
    image = control_image(edit)
    assert image.shape == edit.picture.shape
