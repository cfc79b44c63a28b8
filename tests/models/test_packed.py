"""The walker over packed batches: it finds and exchanges every tensor, and refuses what it cannot place."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers.edits import make_edit
from helpers.names import FAMILIES
from torch import Tensor

from instgenie.engine.prepare import prepare
from instgenie.engine.register import register, reuse
from instgenie.jobs.job import Job
from instgenie.kernels.roles import Column, LeftOut, Static
from instgenie.models.model import Model
from instgenie.models.packed import fields_of, name_columns, walk, with_columns


@dataclass(frozen=True, eq=False)
class Pair:
    """Without roles: all of it is columns."""

    first: Tensor
    second: Tensor


@dataclass(frozen=True, eq=False)
class Inner:
    count: Static[int]
    values: Column[Tensor]
    more: Column[Tensor | None] = None


@dataclass(frozen=True, eq=False)
class Outer:
    owner: LeftOut[object]
    names: Static[tuple[str, ...]]
    plain: Column[Tensor]
    pair: Column[Pair]
    inners: Column[tuple[Inner, ...]]
    by_flag: Column[dict[tuple[bool, ...], Inner]]
    by_number: Column[dict[int, Tensor]]
    maybe: Column[Pair | None] = None


def make_outer() -> Outer:
    a, b, c, d, e, f, g = torch.arange(7.0).split(1)
    inners = Inner(1, d), Inner(2, e, f)
    return Outer(object(), ("x",), a, Pair(b, c), inners, {(True, False): Inner(3, g)}, {7: a})


def test_every_tensor_is_found_and_named() -> None:
    walked = walk(make_outer())
    assert torch.cat(walked.columns).tolist() == [0, 1, 2, 3, 4, 5, 6, 0]
    names = ["plain", "pair.first", "pair.second", "inners.0.values", "inners.1.values", "inners.1.more"]
    assert name_columns(make_outer()) == [*names, "by_flag.0.values", "by_number.7"]


def test_every_tensor_is_exchanged() -> None:
    outer = make_outer()
    others = [column + 10 for column in walk(outer).columns]
    exchanged = with_columns(outer, others)
    assert all(map(torch.equal, walk(exchanged).columns, others))
    assert exchanged.inners[1].more is others[5]
    assert exchanged.owner is outer.owner
    assert walk(exchanged).signature == walk(outer).signature
    with pytest.raises(AssertionError):
        with_columns(outer, [*others, others[0]])


def test_a_signature_is_of_everything_but_values() -> None:
    outer = make_outer()
    same = walk(outer).signature
    assert hash(same) == hash(walk(replace(outer, owner=None, plain=torch.tensor([9.0]))).signature)
    assert walk(replace(outer, owner=None, plain=torch.tensor([9.0]))).signature == same
    changes: list[dict[str, Any]] = [
        {"names": ("y",)},
        {"plain": torch.zeros(2)},
        {"inners": outer.inners[:1]},
        {"inners": (outer.inners[0], replace(outer.inners[1], count=5))},
        {"inners": (outer.inners[0], replace(outer.inners[1], more=None))},
        {"by_flag": {(False, False): outer.by_flag[True, False]}},
        {"by_number": {8: outer.plain}},
        {"maybe": outer.pair},
    ]
    assert all(walk(replace(outer, **change)).signature != same for change in changes)


@dataclass(frozen=True, eq=False)
class Forgotten:
    known: Column[Tensor]
    forgotten: Tensor


@dataclass(frozen=True, eq=False)
class StaticTensor:
    tables: Static[tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class StaticColumns:
    inner: Static[Inner | None]


@dataclass(frozen=True, eq=False)
class Unknown:
    tables: Column[list[Tensor]]


@dataclass(frozen=True, eq=False)
class Counted:
    """Without roles, and not all of it tensors."""

    values: Tensor
    count: int


@dataclass(frozen=True, eq=False)
class Around:
    forgotten: Column[tuple[Forgotten, ...]]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Forgotten, "Forgotten.forgotten declares no role"),
        (StaticTensor, "StaticTensor.tables cannot be static"),
        (StaticColumns, "StaticColumns.inner cannot be static"),
        (Unknown, "Unknown.tables cannot be a column"),
        (Counted, "Counted.count cannot be a column"),
        (Around, "Forgotten.forgotten declares no role"),
    ],
)
def test_a_field_that_cannot_be_placed_is_an_error(kind: type, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        fields_of(kind)


def test_a_value_of_another_type_than_declared_is_an_error() -> None:
    for wrong in ([torch.zeros(1)], 3, "text"):
        wronged = replace(make_outer(), plain=wrong)
        with pytest.raises(TypeError, match="cannot be a column"):
            walk(wronged)
        with pytest.raises(TypeError, match="cannot be a column"):
            name_columns(wronged)


def tensors_in(value: object) -> list[Tensor]:
    """All tensors of an object and of what it holds, however they are declared; jobs and rows are passed over."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in tensors_in(item)]
    own = getattr(value, "__dict__", {})
    return [tensor for name, item in own.items() if name not in ("jobs", "rows") for tensor in tensors_in(item)]


@pytest.fixture(params=FAMILIES)
def jobs(request: pytest.FixtureRequest, models: dict[str, Model]) -> tuple[Model, list[Job]]:
    model = models[request.param]
    edits = [make_edit(steps=2, share=share, true_guidance=2.0) for share in (0.2, 0.4)]
    return model, [
        reuse(prepare(edit, model), register(edit.picture, model, edit.size, edit.steps, edit.guidance, "y"))
        for edit in edits
    ]


@torch.inference_mode()
def test_no_tensor_of_a_batch_is_forgotten(jobs: tuple[Model, list[Job]]) -> None:
    model, members = jobs
    packed = model.pack(members, pads=True)
    found = tensors_in(packed)
    assert {id(tensor) for tensor in found} == {id(column) for column in packed.columns}
    assert len(set(packed.names)) == len(packed.names) == len(packed.columns)
    others = [column.clone() for column in packed.columns]
    twin = packed.over(others, packed.rows)
    assert {id(tensor) for tensor in tensors_in(twin)} == {id(column) for column in others}
    assert not twin.jobs
    assert twin.signature == packed.signature
    assert torch.equal(model.run(twin), model.run(packed))
