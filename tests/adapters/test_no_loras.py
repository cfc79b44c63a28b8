"""Passes without LoRAs launch what they would launch if there were none at all; a LoRA adds its own products alone."""

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.cached import register_for
from helpers.edits import make_edit, prepare
from helpers.loras import applied, save_lora
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from instgenie.adapters.applied import AppliedLoras
from instgenie.engine.loop import Engine
from instgenie.engine.own import reuse_own
from instgenie.engine.register import reuse
from instgenie.jobs.job import Job
from instgenie.models.layers import linear
from instgenie.models.model import Model

LAYERS = {
    "blend": "transformer_blocks.0.attn.to_out.0",
    "sdxl": "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_out.0",
    "sd3": "transformer_blocks.0.attn.to_out.0",
    "klein": "single_transformer_blocks.0.attn.to_qkv_mlp_proj",
    "zimage": "layers.0.attention.to_out.0",
}
FEW = tuple(LAYERS)
VIEWS = (
    "aten.slice.Tensor", "aten.reshape.default", "aten.flatten.using_ints", "aten.numpy_T.default", "aten.view.default",
    "aten.view.dtype",
)  # fmt: skip
READING = ("aten.resolve_conj.default", "aten.resolve_neg.default", "aten.empty.memory_format")  # of the reference
BOUNDS = ("aten.arange.default", "aten.searchsorted.Tensor", "aten.floor_divide.default")  # once per kind of rows


class Launches(TorchDispatchMode):
    """Records the operations that a device would be asked for, with the shapes of their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, *(one.shape for one in args if isinstance(one, Tensor))))
        return func(*args, **(kwargs or {}))


def join_all(model: Model, jobs: Sequence[Job]) -> Engine:
    engine = Engine(model)
    for job in jobs:
        engine.join(replace(job))
    return engine


def fill_caches(model: Model, jobs: Sequence[Job], num_steps: int = 3) -> None:
    """Take the first steps of jobs: after that models hold what they keep."""
    engine = join_all(model, jobs)
    for _ in range(num_steps):
        engine.step()


def launches(model: Model, jobs: Sequence[Job], num_steps: int = 3) -> list[list[tuple[Any, ...]]]:
    """Of the first steps of jobs, each step by itself."""
    engine, steps = join_all(model, jobs), []
    for _ in range(num_steps):
        with Launches() as found:
            engine.step()
        steps.append(found.seen)
    return steps


@pytest.fixture(params=FEW)
def few(request: pytest.FixtureRequest, models: dict[str, Model]) -> tuple[str, Model]:
    return request.param, models[request.param]


def batches(model: Model) -> dict[str, list[Job]]:
    edits = [make_edit(steps=4, share=0.2 + 0.2 * seed, seed=seed, true_guidance=2.0) for seed in range(3)]
    dense = [prepare(edit, model) for edit in edits]
    kv, y = (
        [reuse(replace(job), register_for(model, edit, kind)) for job, edit in zip(dense, edits, strict=True)]
        for kind in ("kv", "y")
    )
    own = reuse_own(prepare(replace(edits[2], own_steps=(0, 2)), model))
    return {"dense": dense[:1], "cached": kv[:1], "projected": y[:1], "batched": [dense[0], kv[1], own], "all": kv + y}


def test_a_pass_without_loras_launches_nothing_for_them(
    few: tuple[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = few
    jobs = batches(model)
    for batch in jobs.values():
        fill_caches(model, batch)
    found = {name: launches(model, batch) for name, batch in jobs.items()}
    monkeypatch.setattr(linear.Owners, "add", lambda owners, layer, rows, out: out)
    monkeypatch.setattr(linear, "patched", lambda module, owners: nullcontext())
    assert found == {name: launches(model, batch) for name, batch in jobs.items()}


def test_a_lora_adds_two_products_per_layer_and_edit(few: tuple[str, Model], tmp_path: Path) -> None:
    """One layer is patched, for one of three edits; all other launches are those of the pass without it."""
    name, model = few
    file = save_lora(tmp_path / "one.safetensors", model, [LAYERS[name]])
    first, *others = batches(model)["batched"]

    def counted(loras: AppliedLoras | None) -> Counter[str]:
        jobs = [replace(first, loras=loras), *others]
        fill_caches(model, jobs, num_steps=2)
        [*_, step] = launches(model, jobs, num_steps=2)
        return Counter(str(func) for func, *_ in step)

    without, with_one = counted(None), counted(applied(model, (file, 0.5)))
    more = {op: num for op, num in (with_one - without).items() if op not in VIEWS + READING}
    assert all(more.pop(op, 1) == 1 for op in BOUNDS)
    assert more == {"aten.linear.default": 1, "aten.addmm_.default": 1}
    assert not without - with_one
