"""The output of a block is added by the norm of the next one."""

import pytest
import torch
from helpers.edits import make_edit
from torch import Tensor

from instgenie.engine.prepare import prepare
from instgenie.engine.register import register, reuse
from instgenie.jobs.activations import Kind
from instgenie.kernels.modulate import add_gated, norm_modulate
from instgenie.models.joint import residual
from instgenie.models.joint.residual import Residual
from instgenie.models.model import Model


def test_the_sum_is_the_same_early_and_late() -> None:
    torch.manual_seed(0)
    x, y, index = torch.randn(5, 16), torch.randn(5, 16), torch.tensor([0, 1, 1, 0, 1])
    gate, shift, scale = torch.randn(2, 48).split(16, dim=1)
    columns = shift, scale, index, 1e-6
    early, late = (Residual(x, gate, y, index) for _ in range(2))
    total = add_gated(x, gate, y, index)
    assert early.total.equal(total)
    for one in (early, late):
        normed = one.normed(*columns)
        assert isinstance(normed, Tensor)
        torch.testing.assert_close(normed, norm_modulate(total, *columns))
        assert one.total.equal(total)
    assert Residual(x).total is x


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["kv", "y"])
def test_few_sums_are_launches_of_their_own(
    models: dict[str, Model], kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text and image where they join, and the end; not two for every double block and one for every single block."""
    model, edit = models["fill"], make_edit(size=(32, 32), steps=2)
    job = reuse(prepare(edit, model), register(edit.picture, model, edit.size, 2, edit.guidance, kind))
    sums: list[int] = []

    def counting(x: Tensor, gate: Tensor, y: Tensor, rows: Tensor | None) -> Tensor:
        sums.append(len(x))
        return add_gated(x, gate, y, rows)

    monkeypatch.setattr(residual, "add_gated", counting)
    model.predict([job])
    assert len(sums) == 3
