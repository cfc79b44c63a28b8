"""diffusers' pipeline as a system, plain and compiled."""

import pytest
import torch
from helpers.edits import make_edit

from instgenie.bench.stock import compiled_system, reference_system, stock_system
from instgenie.errors import ModelError
from instgenie.models.model import Model


@pytest.mark.parametrize("family", ["blend", "sdxl", "klein", "qwen"])
def test_blocks_are_compiled_for_one_system_alone(family: str, models: dict[str, Model]) -> None:
    """The compiled code is not run here: compiling takes minutes."""
    model = models[family]
    edits = [make_edit(steps=2, size=(64, 64))]
    system = compiled_system(model)
    seen: list[bool] = []
    block = next(module for module in model.network.modules() if "TransformerBlock" in type(module).__name__)
    hook = model.network.register_forward_pre_hook(lambda *_: seen.append(block._compiled_call_impl is not None))
    with torch.compiler.set_stance("force_eager"):
        system.run(edits)
    num_calls = len(seen)
    stock_system(model).run(edits)
    hook.remove()
    assert num_calls > 0
    assert seen == [True] * num_calls + [False] * num_calls


def test_a_pipeline_that_keeps_the_reference_sees_it_once(models: dict[str, Model]) -> None:
    """Its first pass has the tokens of the picture, the later ones do not."""
    model = models["klein"]
    edits = [make_edit(steps=3, size=(64, 64), seed=seed) for seed in (1, 2)]
    seen: list[int] = []

    def note(_: object, given: object, options: dict[str, torch.Tensor]) -> None:
        seen.append(options["hidden_states"].shape[1])

    system = reference_system(model)
    hook = model.network.register_forward_pre_hook(note, with_kwargs=True)
    timing = system.run(edits)
    hook.remove()
    assert seen == [512, 256, 256] * 2
    assert 0 < timing.denoise < timing.edit
    with pytest.raises(ModelError, match="family 'sd3': diffusers has no pipeline for it that keeps K and V"):
        reference_system(models["sd3"])
