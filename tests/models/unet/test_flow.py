"""Packed tokens of branches of several lengths attend as each branch does alone, however the lists are padded."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.edits import apart, close, make_edit
from torch import Tensor

from instgenie.engine.prepare import prepare
from instgenie.engine.register import register, reuse
from instgenie.jobs.activations import Kind
from instgenie.jobs.job import Job, Level
from instgenie.models.model import Model
from instgenie.models.unet import flow as unet_flow
from instgenie.models.unet.flow import Flow, attend, attend_apart, attend_whole, bounds_of_keys, lay_out, runs_flash
from instgenie.models.unet.model import UnetModel

NUM_ALL = 64
COUNTS = (5, 64, 17, 1)


def make_level(count: int, device: str = "cpu") -> Level:
    order = torch.randperm(NUM_ALL, generator=torch.Generator().manual_seed(count)).to(device)
    return Level(NUM_ALL, inside=order[:count], outside=order[count:])


def make_flow(counts: Sequence[int], share: int | None, cached: Sequence[bool] | None = None, on: str = "cpu") -> Flow:
    levels = tuple(make_level(count, on) for count in counts)
    return lay_out(levels, tuple(cached or [True] * len(counts)), share, len(set(counts)) == 1)


def draw(flow: Flow, num_keys: int, channels: int, dtype: torch.dtype, on: str = "cpu") -> tuple[Tensor, ...]:
    """q of all tokens [branches, all tokens, heads, head channels], k, v"""
    torch.manual_seed(0)
    shapes = [(flow.num_branches, num, 2, channels) for num in (flow.num_all, num_keys, num_keys)]
    return tuple(torch.randn(shape, device=on).to(dtype) for shape in shapes)


def attend_plainly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x.double().transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def read(flow: Flow, packed: Tensor) -> Tensor:
    """What whoever reads the tokens that flow finds."""
    assert flow.origin is not None
    return packed[flow.origin[flow.origin >= 0]]


@pytest.mark.parametrize("num_keys", [NUM_ALL, 7])
@pytest.mark.parametrize("share", [None, 24])
@pytest.mark.parametrize("cached", [(True,) * 4, (True, False, True, True), (False, True, True, False)])
def test_branches_attend_as_alone(share: int | None, cached: tuple[bool, ...], num_keys: int) -> None:
    flow = make_flow(COUNTS, share, cached)
    assert flow.index is not None
    assert flow.origin is not None
    whole, k, v = draw(flow, num_keys, 8, torch.float64)
    packed = whole.flatten(0, 1)[flow.index]
    expected = attend_plainly(whole, k, v)[flow.origin >= 0]
    bounds = bounds_of_keys(flow.num_branches, num_keys, torch.device("cpu"))
    for found in (attend(flow, packed, k, v, bounds), attend_whole(flow, packed, k, v)):
        assert len(found) == flow.num_flowing
        torch.testing.assert_close(read(flow, found), expected)


def test_lists_are_filled_up_together() -> None:
    flow = make_flow(COUNTS, share=12)
    assert flow.num_flowing == 4 * NUM_ALL * 12 // 32 > sum(COUNTS)
    assert flow.bounds is not None
    assert flow.bounds.tolist() == [0, 5, 69, 86, 87]
    mixed = make_flow(COUNTS, share=16, cached=(True, True, False, True))
    assert mixed.num_flowing == 3 * NUM_ALL * 16 // 32 + NUM_ALL
    equal = make_flow((9, 9), share=16)
    assert (equal.is_even, equal.num_flowing) == (True, 2 * NUM_ALL * 16 // 32)
    assert equal.index is not None
    assert [(part // NUM_ALL).unique().tolist() for part in equal.index.chunk(2)] == [[0], [1]]  # each of its own
    assert make_flow(COUNTS, None, (False,) * 4).index is None


def test_an_empty_list_beside_others() -> None:
    flow = make_flow((6, 0), share=8)
    assert flow.index is not None
    assert flow.origin is not None
    assert (flow.origin[0] >= 0).sum() == 6
    assert (flow.origin[1] < 0).all()
    whole, k, v = draw(flow, NUM_ALL, 8, torch.float64)
    found = attend(flow, whole.flatten(0, 1)[flow.index], k, v, bounds_of_keys(2, NUM_ALL, whole.device))
    torch.testing.assert_close(read(flow, found), attend_plainly(whole, k, v)[flow.origin >= 0])


def make_jobs(model: Model, shares: Sequence[float], kind: Kind = "kv") -> list[Job]:
    edits = [make_edit(size=(64, 64), share=share, steps=2) for share in shares]
    return [
        reuse(prepare(edit, model), register(edit.picture, model, edit.size, edit.steps, kind=kind)) for edit in edits
    ]


@torch.inference_mode()
@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_batches_of_other_masks_are_one_pass(models: dict[str, Model], family: str) -> None:
    """Where it is about as many tokens in all; and each is computed as alone."""
    model = models[family]
    assert isinstance(model, UnetModel)
    mixes = [make_jobs(model, shares) for shares in ((0.1, 0.5), (0.2, 0.4))]
    first, second = (model.pack(jobs, pads=True) for jobs in mixes)
    assert first.signature == second.signature
    assert first.columns.keys() == second.columns.keys()
    assert first.signature != model.pack(make_jobs(model, (0.7, 0.7)), pads=True).signature
    found = second.deal(model.run(first.over(second.columns, second.rows)))
    expected = [model.predict([job])[0] for job in mixes[1]]
    for ours, theirs in zip(found, expected, strict=True):
        assert max(map(apart, ours, theirs)) <= close(model)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["sd", "sdxl"])
@pytest.mark.parametrize("turns", [(0, 0, 0), (0, 0, 1), (1, 0, 0)])
def test_plans_that_turn_where_lists_are_filled_up(
    models: dict[str, Model], family: str, turns: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that take turns together and against each other. What fills lists up is nothing that anybody reads."""
    model = models[family]
    jobs = [
        replace(job, plan=tuple(block % 2 == turn for block in range(model.num_blocks)))
        for job, turn in zip(make_jobs(model, (0.1, 0.5, 0.3), "y"), turns, strict=True)
    ]
    expected = [model.predict([job])[0] for job in jobs]

    def spoil(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
        attended = attend_apart(q, k, v, bounds)
        attended[int(bounds[-1]) :] = torch.nan
        num_spoilt.append(len(attended) - int(bounds[-1]))
        return attended

    num_spoilt: list[int] = []
    monkeypatch.setattr(unet_flow, "attend_apart", spoil)
    packed = model.pack(jobs, pads=True)
    for ours, theirs in zip(packed.deal(model.run(packed)), expected, strict=True):
        assert max(map(apart, ours, theirs)) <= close(model)
    assert sum(num_spoilt) > 0 or model.device.type == "cuda"


@torch.inference_mode()
@pytest.mark.gpu
@pytest.mark.parametrize("num_keys", [NUM_ALL, 7])
@pytest.mark.parametrize("channels", [8, 40, 64, 160])
def test_one_launch_for_all_branches(channels: int, num_keys: int) -> None:
    """Captured with one mask, replayed with others."""
    mixes = [make_flow(counts, 16, on="cuda") for counts in (COUNTS, (30, 2, 3, 61), (1, 0, 64, 10))]
    whole, k, v = draw(mixes[0], num_keys, channels, torch.bfloat16, "cuda")
    bounds = bounds_of_keys(4, num_keys, whole.device)
    assert runs_flash(whole)
    assert mixes[0].index is not None
    columns = {name: column.clone() for name, column in mixes[0].columns.items()}
    twin, packed = mixes[0].over(columns), whole.flatten(0, 1)[mixes[0].index]
    attend(twin, packed, k, v, bounds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(twin, packed, k, v, bounds)
    for flow in mixes:
        assert flow.index is not None
        assert flow.origin is not None
        for name, column in flow.columns.items():
            columns[name].copy_(column)
        packed.copy_(whole.flatten(0, 1)[flow.index])
        graph.replay()
        expected = attend_plainly(whole, k, v)[flow.origin >= 0]
        torch.testing.assert_close(read(flow, out).double(), expected, rtol=2**-7, atol=2**-7)
