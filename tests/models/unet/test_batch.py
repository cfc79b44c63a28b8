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
from instgenie.jobs.job import Job
from instgenie.jobs.tokens import Level
from instgenie.models.model import Model
from instgenie.models.packed import walk, with_columns
from instgenie.models.unet import attention
from instgenie.models.unet.attention import attend, attend_apart, attend_whole, runs_flash, suits_small
from instgenie.models.unet.layout import LevelLayout, bounds_of_keys, lay_out
from instgenie.models.unet.model import UnetModel

NUM_ALL = 64
COUNTS = (5, 64, 17, 1)


def make_level(count: int, device: str = "cpu") -> Level:
    order = torch.randperm(NUM_ALL, generator=torch.Generator().manual_seed(count)).to(device)
    return Level(NUM_ALL, inside=order[:count], outside=order[count:])


def make_layout(
    counts: Sequence[int], share: int | None, cached: Sequence[bool] | None = None, on: str = "cpu"
) -> LevelLayout:
    levels = tuple(make_level(count, on) for count in counts)
    return lay_out(levels, tuple(cached or [True] * len(counts)), share, len(set(counts)) == 1)


def draw(layout: LevelLayout, num_keys: int, channels: int, dtype: torch.dtype, on: str = "cpu") -> tuple[Tensor, ...]:
    """q of all tokens [branches, all tokens, heads, head channels], k, v"""
    torch.manual_seed(0)
    shapes = [(layout.num_branches, num, 2, channels) for num in (layout.num_all, num_keys, num_keys)]
    return tuple(torch.randn(shape, device=on).to(dtype) for shape in shapes)


def attend_plainly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x.double().transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def read(layout: LevelLayout, packed: Tensor) -> Tensor:
    """The results of computed tokens, without padding."""
    assert layout.origin is not None
    return packed[layout.origin[layout.origin >= 0]]


@pytest.mark.parametrize("num_keys", [NUM_ALL, 7])
@pytest.mark.parametrize("share", [None, 24])
@pytest.mark.parametrize("cached", [(True,) * 4, (True, False, True, True), (False, True, True, False)])
def test_branches_attend_as_alone(share: int | None, cached: tuple[bool, ...], num_keys: int) -> None:
    layout = make_layout(COUNTS, share, cached)
    assert layout.index is not None
    assert layout.origin is not None
    whole, k, v = draw(layout, num_keys, 8, torch.float64)
    packed = whole.flatten(0, 1)[layout.index]
    expected = attend_plainly(whole, k, v)[layout.origin >= 0]
    bounds = bounds_of_keys(layout.num_branches, num_keys, torch.device("cpu"))
    for found in (attend(layout, packed, k, v, bounds), attend_whole(layout, packed, k, v)):
        assert len(found) == layout.num_computed
        torch.testing.assert_close(read(layout, found), expected)


def test_lists_are_padded_together() -> None:
    layout = make_layout(COUNTS, share=12)
    assert layout.num_computed == 4 * NUM_ALL * 12 // 32 > sum(COUNTS)
    assert layout.bounds is not None
    assert layout.bounds.tolist() == [0, 5, 69, 86, 87]
    mixed = make_layout(COUNTS, share=16, cached=(True, True, False, True))
    assert mixed.num_computed == 3 * NUM_ALL * 16 // 32 + NUM_ALL
    equal = make_layout((9, 9), share=16)
    assert (equal.bounds, equal.num_computed) == (None, 2 * NUM_ALL * 16 // 32)
    assert equal.index is not None
    assert [(part // NUM_ALL).unique().tolist() for part in equal.index.chunk(2)] == [
        [0],
        [1],
    ]  # each branch is padded with a token of its own
    assert make_layout(COUNTS, None, (False,) * 4).index is None


def test_an_empty_list_beside_others() -> None:
    layout = make_layout((6, 0), share=8)
    assert layout.index is not None
    assert layout.origin is not None
    assert (layout.origin[0] >= 0).sum() == 6
    assert (layout.origin[1] < 0).all()
    whole, k, v = draw(layout, NUM_ALL, 8, torch.float64)
    found = attend(layout, whole.flatten(0, 1)[layout.index], k, v, bounds_of_keys(2, NUM_ALL, whole.device))
    torch.testing.assert_close(read(layout, found), attend_plainly(whole, k, v)[layout.origin >= 0])


def make_jobs(model: Model, shares: Sequence[float], kind: Kind = "kv") -> list[Job]:
    edits = [make_edit(size=(64, 64), share=share, steps=2) for share in shares]
    return [
        reuse(prepare(edit, model), register(edit.picture, model, edit.size, edit.steps, kind=kind)) for edit in edits
    ]


@torch.inference_mode()
@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_batches_of_other_masks_are_one_pass(models: dict[str, Model], family: str) -> None:
    """If the total number of tokens is about the same; each job is computed as if alone."""
    model = models[family]
    assert isinstance(model, UnetModel)
    mixes = [make_jobs(model, shares) for shares in ((0.1, 0.5), (0.2, 0.4))]
    first, second = (model.pack(jobs, pads=True) for jobs in mixes)
    assert first.signature == second.signature
    assert first.names == second.names
    assert first.signature != model.pack(make_jobs(model, (0.7, 0.7)), pads=True).signature
    found = second.deal(model.run(first.over(second.columns, second.rows)))
    expected = [model.predict([job])[0] for job in mixes[1]]
    for ours, theirs in zip(found, expected, strict=True):
        assert max(map(apart, ours, theirs)) <= close(model)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["sd", "sdxl"])
@pytest.mark.parametrize("turns", [(0, 0, 0), (0, 0, 1), (1, 0, 0)])
def test_plans_that_alternate_with_padded_lists(
    models: dict[str, Model], family: str, turns: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs whose plans alternate in step and out of step. Padding is never read."""
    model = models[family]
    jobs = [
        replace(job, plan=tuple(block % 2 == turn for block in range(sum(model.run_lengths))))
        for job, turn in zip(make_jobs(model, (0.1, 0.5, 0.3), "y"), turns, strict=True)
    ]
    expected = [model.predict([job])[0] for job in jobs]

    def spoil(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
        attended = attend_apart(q, k, v, bounds)
        attended[int(bounds[-1]) :] = torch.nan
        num_spoilt.append(len(attended) - int(bounds[-1]))
        return attended

    num_spoilt: list[int] = []
    monkeypatch.setattr(attention, "attend_apart", spoil)
    packed = model.pack(jobs, pads=True)
    for ours, theirs in zip(packed.deal(model.run(packed)), expected, strict=True):
        assert max(map(apart, ours, theirs)) <= close(model)
    assert sum(num_spoilt) > 0 or model.device.type == "cuda"


@torch.inference_mode()
@pytest.mark.gpu
@pytest.mark.parametrize("num_keys", [NUM_ALL, 7])
@pytest.mark.parametrize("channels", [8, 40, 64, 160])
def test_one_launch_for_all_branches(channels: int, num_keys: int) -> None:
    """A graph is captured with one mask and replayed with others."""
    mixes = [make_layout(counts, 16, on="cuda") for counts in (COUNTS, (30, 2, 3, 61), (1, 0, 64, 10))]
    whole, k, v = draw(mixes[0], num_keys, channels, torch.bfloat16, "cuda")
    bounds = bounds_of_keys(4, num_keys, whole.device)
    assert runs_flash(whole)
    assert mixes[0].index is not None
    columns = [column.clone() for column in walk(mixes[0]).columns]
    twin, packed = with_columns(mixes[0], columns), whole.flatten(0, 1)[mixes[0].index]
    attend(twin, packed, k, v, bounds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(twin, packed, k, v, bounds)
    for layout in mixes:
        assert layout.index is not None
        assert layout.origin is not None
        for ours, theirs in zip(columns, walk(layout).columns, strict=True):
            ours.copy_(theirs)
        packed.copy_(whole.flatten(0, 1)[layout.index])
        graph.replay()
        expected = attend_plainly(whole, k, v)[layout.origin >= 0]
        torch.testing.assert_close(read(layout, out).double(), expected, rtol=2**-7, atol=2**-7)


def test_few_branches_take_cudnn_where_lists_are_padded_and_keys_many() -> None:
    assert suits_small(2, 77, 896)
    assert suits_small(2, 4096, 851)  # a list that is not padded: one shape of many
    assert not suits_small(2, 4096, 896)
    assert not suits_small(2, 4096, 4096)
    assert not suits_small(6, 77, 851)
