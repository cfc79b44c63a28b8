"""The systems that edits are timed through, over one set of weights: ours, diffusers' own pipeline, and what others do
to be faster than it. Each is a function from edits to seconds.

| name | what it does |
|---|---|
| diffusers | the stock pipeline: one static batch, every token |
| diffusers compiled | the same with its blocks compiled |
| step skipping | TeaCache: all tokens, but half of the steps add again what the blocks added before |
| first-block cache | diffusers' own hooks: in half of the steps the first block alone is run |
| crop and stitch | the mask's box and a margin is edited as if it were the picture |
| FISEdit-style | computes masked tokens alone, but one edit after the other: its kernels know one mask |
| dense | our engine, every token |
| cached | our engine, masked tokens alone |
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

import torch
from diffusers import FluxTransformer2DModel
from diffusers.hooks import FirstBlockCacheConfig

from instgenie.bench.baselines import StepSkipping, crop, find_threshold
from instgenie.bench.edit import (
    Reuse,
    Sample,
    System,
    compiled_system,
    now,
    own_system,
    stock_system,
    with_activations,
)
from instgenie.bench.metrics import mask_box
from instgenie.bench.variants import MARGINS
from instgenie.engine.graphs import make_graphs
from instgenie.engine.prepare import prepare
from instgenie.jobs.activations import Activations
from instgenie.models.flux.model import FluxModel
from instgenie.models.model import Model
from instgenie.types import Edit

DIFFUSERS, COMPILED, SKIPPING, FIRST_BLOCK = "diffusers", "diffusers compiled", "step skipping", "first-block cache"
CROP, FISEDIT, DENSE, CACHED = "crop and stitch", "FISEdit-style", "dense", "cached"
NAMES = (DIFFUSERS, COMPILED, SKIPPING, FIRST_BLOCK, CROP, FISEDIT, DENSE, CACHED)
FLUX_ONLY = (SKIPPING, FIRST_BLOCK, CROP)
SEES_MASKS = (CROP, FISEDIT, CACHED)  # how long they take depends on what is masked
SHARE_OF_STEPS = 0.5  # that step skipping and first-block cache compute
FIRST_BLOCK_THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8)


def suiting(names: Sequence[str], model: Model) -> list[str]:
    """Those of the systems that the model's family has."""
    return [name for name in names if isinstance(model, FluxModel) or name not in FLUX_ONLY]


def make_system(name: str, model: Model, activations: Activations, tuning: Sequence[Edit]) -> System:
    """The activations are of the picture that all edits are of. Tuning edits set the threshold of step skipping."""
    if name in FLUX_ONLY:
        assert isinstance(model, FluxModel)
        return FLUX_SYSTEMS[name](model, tuning)
    return {
        DIFFUSERS: lambda: stock_system(model),
        COMPILED: lambda: replace(compiled_system(model), name=COMPILED),
        FISEDIT: lambda: one_by_one(cached_system(model, activations)),
        DENSE: lambda: own_system(DENSE, None, model, lambda edit: prepare(edit, model), graphs=make_graphs(model)),
        CACHED: lambda: cached_system(model, activations),
    }[name]()


def cached_system(model: Model, activations: Activations) -> System:
    """Activations are where the model is."""
    how = Reuse(activations.kind, activations.key.cache_dtype, "gpu", "cached")
    return own_system(CACHED, how, model, with_activations(model, activations), graphs=make_graphs(model))


def one_by_one(system: System) -> System:
    def run(edits: Sequence[Edit]) -> Sample:
        samples = [system.run([edit]) for edit in edits]
        return Sample(sum(sample.edit for sample in samples), sum(sample.denoise for sample in samples))

    return System(FISEDIT, system.reuse, run)


def within(name: str, system: System, context: Callable[[], AbstractContextManager[None]]) -> System:
    """The system as it is inside a context."""

    def run(edits: Sequence[Edit]) -> Sample:
        with context():
            return system.run(edits)

    return System(name, system.reuse, run)


def first_block_system(model: FluxModel, tuning: Sequence[Edit]) -> System:
    """The lowest of the thresholds under which no more than the wanted share of the steps runs all blocks."""
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
    """In which the last block runs."""
    steps: list[None] = []
    last = model.transformer.single_transformer_blocks[-1].attn
    hook = last.register_forward_pre_hook(lambda *_: steps.append(None))
    system.run(edits)
    hook.remove()
    return len(steps)


def skipping_system(model: FluxModel, tuning: Sequence[Edit]) -> System:
    tracks = StepSkipping(model.transformer, 0.0).run([prepare(edit, model) for edit in tuning])
    threshold = find_threshold([track.changes for track in tracks], SHARE_OF_STEPS * tuning[0].steps)

    def run(edits: Sequence[Edit]) -> Sample:
        start = now(model.device)
        jobs = [prepare(edit, model) for edit in edits]
        prepared = now(model.device)
        StepSkipping(model.transformer, threshold).run(jobs)
        end = now(model.device)
        return Sample(edit=end - start, denoise=end - prepared)

    return System(SKIPPING, None, run)


def crop_system(model: FluxModel, tuning: Sequence[Edit]) -> System:
    """Crops are worked at the resolution they have in the picture; those of one batch differ in size, and our dense
    engine takes them together all the same."""

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
