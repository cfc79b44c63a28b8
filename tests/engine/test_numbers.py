"""Values that are no finite numbers: an edit that meets one fails, instead of showing black or arbitrary pixels."""

import pytest
import torch
from helpers.edits import make_edit

from instgenie.engine.finish import finish
from instgenie.engine.loop import Engine
from instgenie.engine.prepare import prepare
from instgenie.engine.register import keep_rows, register, reuse
from instgenie.errors import ModelError
from instgenie.jobs.activations import CacheDtype
from instgenie.models.model import Model


@pytest.mark.parametrize("cache_dtype", ["model", "fp8", "int4"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_edit_that_reads_no_number_fails(models: dict[str, Model], cache_dtype: CacheDtype, bad: float) -> None:
    model, edit = models["blend"], make_edit(steps=2)
    activations = register(edit.picture, model, edit.size, 2, edit.guidance, cache_dtype=cache_dtype)
    engine = Engine(model)
    good, broken = (reuse(prepare(edit, model), activations) for _ in range(2))
    engine.join(good)
    engine.step()
    values = activations.at(1, 0, 0, model.device).clone()
    values[..., 3] = bad
    activations.kept(1, 0, 0).copy_(keep_rows(values, cache_dtype))
    engine.join(broken)
    while engine.jobs:
        engine.step()
    with pytest.raises(ModelError, match=r"\d+ of \d+ values that the model computed are not finite"):
        finish(broken, model)
