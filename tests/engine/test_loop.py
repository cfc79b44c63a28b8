"""The step loop on a GPU: launches run ahead of the device, so nothing in a step may wait for it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers.edits import make_edit
from helpers.names import FAMILIES

from instgenie.bench.ours import move_to_host
from instgenie.cache.host import HostTier
from instgenie.engine.loop import Engine
from instgenie.engine.prepare import prepare
from instgenie.engine.register import register, reuse
from instgenie.jobs.activations import CacheDtype
from instgenie.models.loading.load import load


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["gpu", "host"])
@pytest.mark.parametrize("cache_dtype", ["model", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_do_not_wait_for_the_device(
    family: str, cache_dtype: CacheDtype, tier: str, folders: dict[str, Path]
) -> None:
    model = load(str(folders[family]), "cuda")
    edits = [make_edit(steps=3), make_edit(steps=3, share=0.2, seed=1, true_guidance=2.0)]
    template = edits[0].picture, model, edits[0].size, 3, edits[0].guidance
    activations = register(*template, cache_dtype=cache_dtype)
    host = HostTier(2**30)
    if tier == "host":
        activations = move_to_host(activations, host, model)
    engine = Engine(model)
    for edit in edits:
        engine.join(reuse(prepare(edit, model), activations))
    engine.step()  # finds out where masked tokens are
    with waiting_is_an_error():
        engine.step()
