"""The systems that edits are timed through, over one set of weights: ours, diffusers' own pipeline, and other ways to
make it faster. Each is a function from edits to seconds.

| name | what it does |
|---|---|
| diffusers | the stock pipeline: one static batch, every token |
| diffusers compiled | the same with its blocks compiled |
| step skipping | TeaCache: every token, but half of the steps reuse the blocks' previous residual |
| first-block cache | diffusers' own hooks: half of the steps run only the first block |
| crop and stitch | edits the mask's box and a margin as if it were the picture |
| FISEdit-style | computes only masked tokens, but one edit after the other: its kernels take one mask |
| dense | our engine, every token |
| cached | our engine, masked tokens only |
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

import torch
from diffusers import FluxTransformer2DModel
from diffusers.hooks import FirstBlockCacheConfig

from instgenie.bench.baselines import StepSkipping, crop, find_threshold
from instgenie.bench.metrics import mask_box
from instgenie.bench.ours import cached_jobs, dense_jobs, own_system
from instgenie.bench.stock import compiled_system, stock_system
from instgenie.bench.timing import Caching, System, Timing
from instgenie.bench.variants import MARGINS
from instgenie.engine.graphs import make_graphs
from instgenie.engine.prepare import prepare
from instgenie.jobs.activations import Activations
from instgenie.machine.clock import now
from instgenie.models.flux.model import FluxModel, as_flux, is_flux
from instgenie.models.model import Model
from instgenie.types import Edit

DIFFUSERS, COMPILED, SKIPPING, FIRST_BLOCK = "diffusers", "diffusers compiled", "step skipping", "first-block cache"
CROP, FISEDIT, DENSE, CACHED = "crop and stitch", "FISEdit-style", "dense", "cached"
NAMES = (DIFFUSERS, COMPILED, SKIPPING, FIRST_BLOCK, CROP, FISEDIT, DENSE, CACHED)
FLUX_ONLY = (SKIPPING, FIRST_BLOCK, CROP)
SEES_MASKS = (CROP, FISEDIT, CACHED)  # their time depends on the mask
SHARE_OF_STEPS = 0.5  # computed by step skipping and first-block cache
FIRST_BLOCK_THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8)


def suiting(names: Sequence[str], model: Model) -> list[str]:
    """Return the systems that exist for the model's family."""
    return [name for name in names if is_flux(model) or name not in FLUX_ONLY]


def make_system(name: str, model: Model, activations: Activations, tuning: Sequence[Edit]) -> System:
    """Make a system for edits of the picture that the activations belong to. Tuning edits set the thresholds of
    systems that skip work."""
    if name in FLUX_ONLY:
        return FLUX_SYSTEMS[name](as_flux(model), tuning)
    return {
        DIFFUSERS: lambda: stock_system(model),
        COMPILED: lambda: replace(compiled_system(model), name=COMPILED),
        FISEDIT: lambda: one_by_one(cached_system(model, activations)),
        DENSE: lambda: own_system(DENSE, None, model, dense_jobs(model), graphs=make_graphs(model)),
        CACHED: lambda: cached_system(model, activations),
    }[name]()


def cached_system(model: Model, activations: Activations) -> System:
    """Make the system of cached edits with activations next to the model."""
    caching = Caching(activations.kind, activations.key.cache_dtype, "gpu", "cached")
    return own_system(CACHED, caching, model, cached_jobs(model, activations), graphs=make_graphs(model))


def one_by_one(system: System) -> System:
    def run(edits: Sequence[Edit]) -> Timing:
        timings = [system.run([edit]) for edit in edits]
        return Timing(sum(one.edit for one in timings), sum(one.denoise for one in timings))

    return System(FISEDIT, system.caching, run)


def within(name: str, system: System, context: Callable[[], AbstractContextManager[None]]) -> System:
    """Wrap a system so that each run happens inside a context."""

    def run(edits: Sequence[Edit]) -> Timing:
        with context():
            return system.run(edits)

    return System(name, system.caching, run)


def first_block_system(model: FluxModel, tuning: Sequence[Edit]) -> System:
    """Take the lowest threshold at which at most the wanted share of the steps runs all blocks."""
    stock = stock_system(model)
    for threshold in FIRST_BLOCK_THRESHOLDS:
        system = within(FIRST_BLOCK, stock, partial(first_block_cache, model.transformer, threshold))
        if count_steps(system, model, tuning[:1]) <= SHARE_OF_STEPS * tuning[0].steps:
            break
    return system


@contextmanager
def first_block_cache(transformer: FluxTransformer2DModel, threshold: float) -> Iterator[None]:
    transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    try:
        with transformer.cache_context("cond"):  # the inpainting pipelines name none
            yield
    finally:
        transformer.disable_cache()


def count_steps(system: System, model: FluxModel, edits: Sequence[Edit]) -> int:
    """Count the steps in which the last block runs."""
    steps: list[None] = []
    last = model.transformer.single_transformer_blocks[-1].attn
    hook = last.register_forward_pre_hook(lambda *_: steps.append(None))
    system.run(edits)
    hook.remove()
    return len(steps)


def skipping_system(model: FluxModel, tuning: Sequence[Edit]) -> System:
    tracks = StepSkipping(model.joint_network, 0.0).run([prepare(edit, model) for edit in tuning])
    threshold = find_threshold([track.changes for track in tracks], SHARE_OF_STEPS * tuning[0].steps)

    def run(edits: Sequence[Edit]) -> Timing:
        start = now(model.device)
        jobs = [prepare(edit, model) for edit in edits]
        prepared = now(model.device)
        StepSkipping(model.joint_network, threshold).run(jobs)
        end = now(model.device)
        return Timing(edit=end - start, denoise=end - prepared)

    return System(SKIPPING, None, run)


def crop_system(model: FluxModel, tuning: Sequence[Edit]) -> System:
    """Edit crops at the resolution they have in the picture. Crops of one batch differ in size; our dense engine
    batches them all the same."""

    def make(edit: Edit) -> Edit:
        own = replace(edit, size=None)
        top, left, bottom, right = mask_box(torch.from_numpy(edit.mask), MARGINS[0], square=True)
        side = min(max(bottom - top, right - left), model.own_size)
        return crop(
            own, MARGINS[0], max(-(-side // model.size_multiple) * model.size_multiple, 2 * model.size_multiple), model
        ).edit

    return own_system(CROP, None, model, lambda edit: prepare(make(edit), model))


FLUX_SYSTEMS: dict[str, Callable[[FluxModel, Sequence[Edit]], System]] = {
    SKIPPING: skipping_system,
    FIRST_BLOCK: first_block_system,
    CROP: crop_system,
}
