"""The laws with templates that keep fewer steps than an edit takes, in fewer bits."""

from dataclasses import replace

import pytest
import torch
from helpers.cached import KINDS, register_for
from helpers.edits import apart, close, make_edit, prepare, run

from instgenie.cache.disk import DiskTier
from instgenie.cache.store import Store
from instgenie.engine.graphs import Graphs
from instgenie.engine.loading.lanes import Transfer
from instgenie.engine.loading.loader import Loader
from instgenie.engine.loop import Engine
from instgenie.engine.register import make_activations, make_key, register, register_in, reuse
from instgenie.errors import EditError, ModelError
from instgenie.jobs.activations import Kind, parse_key
from instgenie.models.model import Model, TakeRows

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["blend", "sd"])
def test_a_step_reads_the_kept_step_that_serves_it(models: dict[str, Model], name: str, kind: Kind) -> None:
    model, edit = models[name], make_edit(steps=5)
    whole, strided = (register_for(model, edit, kind, num_steps_at_once=1, stride=stride) for stride in (1, 2))
    last = strided.last(3)
    assert strided.num_steps == 5
    assert strided.rows[0].shape[1] == 3
    for step, place in ((step, place) for step in range(5) for place in range(len(whole.rows))):
        serving = whole.at(min(step // 2 * 2 + 1, 4), place, 0, model.device)  # the middle of two; the last is alone
        assert torch.equal(strided.at(step, place, 0, model.device), serving)
        if step >= 2:  # an edit of lower strength takes the last steps
            assert torch.equal(last.at(step - 2, place, 0, model.device), serving)
    assert torch.equal(strided.time_at(2), whole.time[3])


@pytest.mark.parametrize("name", ["blend", "sd"])
def test_a_batch_of_strides_and_formats_is_each_alone(models: dict[str, Model], name: str) -> None:
    """Also through tables of addresses, as captured passes read them."""
    model = models[name]
    edits = [make_edit(steps=4, share=share, seed=seed) for seed, share in enumerate((0.1, 0.2, 0.3, 0.1))]
    ways = [("kv", "model", 1), ("kv", "int4", 2), ("kv", "fp8", 3), ("kv", "int4", 4)]
    jobs = [
        reuse(prepare(edit, model), register_for(model, edit, kind, cache_dtype=dtype, stride=stride))
        for edit, (kind, dtype, stride) in zip(edits, ways, strict=True)
    ]
    alone = [run(model, [replace(job)])[0] for job in jobs]
    together = run(model, [replace(job) for job in jobs])
    assert max(map(apart, together, alone)) <= close(model)
    own = [replace(job) for job in jobs]
    engine = Engine(model, graphs=Graphs(model))
    for job in own:
        engine.join(job)
    while engine.jobs:
        engine.step()
    assert max(map(apart, [job.latents for job in own], alone)) <= close(model)


def test_strided_kv_is_strided_y(models: dict[str, Model]) -> None:
    model, edit = models["blend"], make_edit(steps=4)
    kv, y = (reuse(prepare(edit, model), register_for(model, edit, one, stride=3)) for one in KINDS)
    assert apart(run(model, [kv])[0], run(model, [y])[0]) <= close(model)


def test_only_kept_steps_are_computed_and_stored(
    models: dict[str, Model], tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, edit = models["blend"], make_edit(steps=9)
    num_seen, observe = [0], type(model).observe

    def count(self: Model, jobs, kind: Kind, keep: TakeRows, *others: int) -> None:
        num_seen[0] += len(jobs)
        observe(self, jobs, kind, keep, *others)

    monkeypatch.setattr(type(model), "observe", count)
    store, progress = Store(disk=DiskTier(tmp_path, 2**30)), []
    result = register_in(
        store, edit.picture, model, edit.size, 9, edit.guidance, cache_dtype="int4", stride=2,
        on_step=lambda done, total: progress.append((done, total)),
    )  # fmt: skip
    store.settle()
    assert num_seen == [5]
    assert (result.num_steps, result.num_computed_steps, progress) == (9, 9, [(0, 9), (8, 9), (9, 9)])
    key = make_key(edit, model, "kv", "int4", 2)
    assert [path.name for path in sorted((tmp_path / key.name).glob("0*"))] == [
        "0000-0003.safetensors",
        "0004-0004.safetensors",
    ]
    found = store.get(key, CPU)
    assert found is not None
    expected = register_for(model, edit, "kv", cache_dtype="int4", stride=2)
    assert all(map(torch.equal, make_activations(key, found.span, model).rows, expected.rows))
    assert store.get(make_key(edit, model, "kv", "int4", 3), CPU) is None
    again = register_in(store, edit.picture, model, edit.size, 9, edit.guidance, cache_dtype="int4", stride=2)
    assert again.num_computed_steps == 0
    store.close()


def test_what_is_loaded_stays_for_the_steps_that_read_it(models: dict[str, Model]) -> None:
    model, edit = models["blend"], make_edit(steps=6)
    loader, loaded = Loader(model), []
    start = loader.lane.start

    def count(buffer: int, transfers: list[Transfer]) -> None:
        loaded.append(buffer)
        start(buffer, transfers)

    loader.lane.start = count  # type: ignore[method-assign]
    job = reuse(prepare(edit, model), register_for(model, edit, "kv", cache_dtype="int4", stride=3))
    expected = run(model, [replace(job)])[0]
    engine = Engine(model, loader=loader)
    engine.join(job)
    while engine.jobs:
        engine.step()
    assert torch.equal(job.latents, expected)
    assert len(loaded) == 2 * sum(model.run_lengths)  # two kept steps serve six


def test_a_stride_is_part_of_the_key_and_none_is_every_step(models: dict[str, Model]) -> None:
    edit = make_edit(steps=6)
    every, fourth = (make_key(edit, models["blend"], "kv", stride=stride) for stride in (1, 4))
    assert "stride" not in every.text  # files without one are read as before
    assert parse_key(every.text) == every
    assert parse_key(fourth.text) == fourth
    assert every.name != fourth.name
    assert (every.num_kept, fourth.num_kept, fourth.spans) == (6, 2, [range(2)])
    with pytest.raises(EditError, match="stride 0"):
        register(edit.picture, models["blend"], edit.size, 6, edit.guidance, stride=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("cache_dtype", ["model", "fp8", "int4"])
def test_a_registration_refuses_what_is_no_number(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch, cache_dtype, bad: float
) -> None:
    model, edit = models["blend"], make_edit(steps=2)
    observe = type(model).observe

    def spoil(self: Model, jobs, kind: Kind, keep: TakeRows, *others: int) -> None:
        def spoiled(seen: torch.Tensor, _: int | None = None, /) -> None:
            seen = seen.clone()
            seen[..., 0, 7] = bad
            keep(seen)

        observe(self, jobs, kind, spoiled, *others)

    monkeypatch.setattr(type(model), "observe", spoil)
    with pytest.raises(ModelError, match=r"3 of 3 places, .* in the steps 0, 1"):
        register(edit.picture, model, edit.size, 2, edit.guidance, cache_dtype=cache_dtype)
