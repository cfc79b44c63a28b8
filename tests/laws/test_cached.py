"""The laws of the engine with cached jobs, on every family, against the dense engine."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.cached import KINDS, feasible, make_cached, on_trajectory, predict, register_for
from helpers.edits import CLOSE, apart, close, far, make_edit, prepare, run
from torch import Tensor

from instgenie.bench.metrics import psnr, ssim
from instgenie.cache.disk import DiskTier
from instgenie.cache.gpu import GpuTier
from instgenie.cache.host import HostTier
from instgenie.cache.memory import MemoryTier, cut
from instgenie.cache.peers import PeerTier
from instgenie.cache.remote import RemoteTier
from instgenie.cache.sharing import PeerServer
from instgenie.cache.store import Found, Store
from instgenie.cost.plan import check_plan
from instgenie.editor import Editor, make_store
from instgenie.engine.finish import finish
from instgenie.engine.loop import Engine
from instgenie.engine.register import make_activations, make_key, register, reuse
from instgenie.errors import EditError, PlanError
from instgenie.jobs.activations import Activations, Key, Kind, Span
from instgenie.jobs.job import Job
from instgenie.models.model import Model
from instgenie.pictures.examples import EXAMPLES, read_examples
from instgenie.types import Edit

GIB = 2**30


@torch.no_grad()
@pytest.mark.parametrize("true_guidance", [1.0, 2.5])
@pytest.mark.parametrize("kind", KINDS)
def test_law_3_one_step_on_the_trajectory(model: Model, kind: Kind, true_guidance: float) -> None:
    edit = make_edit(prompt="", seed=3, guidance=2.0, true_guidance=true_guidance)
    activations = register_for(model, edit, kind)
    for step in (0, 2):
        job = on_trajectory(model, edit, step)
        dense = predict(model, job)
        for plan in feasible(kind, activations.run_lengths):
            cached = predict(model, reuse(job, activations, plan))
            assert len(dense) == len(cached) == len(job.branches)
            for expected, found in zip(dense, cached, strict=True):
                assert found.abs().max() > 0.1
                assert apart(expected, found) <= close(model)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_law_3_can_fail(model: Model, kind: Kind) -> None:
    edit = make_edit(prompt="", seed=3)
    activations = register_for(model, edit, kind)
    job = on_trajectory(model, edit, step=1)
    dense, *_ = predict(model, job)
    other_rows = tuple(rows.roll(1, dims=1) for rows in activations.rows)
    other_step = replace(activations, rows=other_rows, time=activations.time.roll(1, dims=0))
    for wrong in (other_step, register_for(model, make_edit(picture_seed=1), kind)):
        assert apart(dense, predict(model, reuse(job, wrong))[0]) > far(model, 10)


@pytest.mark.parametrize("true_guidance", [1.0, 2.5])
def test_law_4_kv_is_y(model: Model, true_guidance: float) -> None:
    edit = make_edit(prompt="a blue dog on grass", true_guidance=true_guidance, negative_prompt="sky", steps=5)
    [kv, y] = run(model, [make_cached(model, edit, kind) for kind in KINDS])
    assert apart(kv, y) <= close(model)
    [dense] = run(model, [prepare(edit, model)])
    assert apart(kv, dense) > far(model, 10)


MIX: list[tuple[Kind | None, dict[str, object]]] = [
    ("kv", {"steps": 3, "share": 0.1, "seed": 1}),
    (None, {"steps": 3, "share": 0.3, "seed": 4, "true_guidance": 2.0}),
    ("kv", {"steps": 5, "share": 0.9, "size": (64, 32), "prompt": "a blue dog on grass", "true_guidance": 3.0}),
    ("y", {"steps": 4, "share": 0.4, "picture_seed": 1, "guidance": 9.0, "true_guidance": 1.5}),
    ("y", {"steps": 6, "share": 0.2, "seed": 3, "prompt": "flower", "dense_steps": 2}),
    ("kv", {"steps": 3, "share": 1.0, "size": (32, 32), "prompt": ""}),
]


@cache
def make_mixed(model: Model) -> list[Job]:
    """Dense and cached jobs of both kinds; the first kv job has a dense prefix, the first y job alternates."""
    edits = [(kind, make_edit(**fields)) for kind, fields in MIX]
    jobs = [make_cached(model, edit, kind) if kind else prepare(edit, model) for kind, edit in edits]
    blocks = range(sum(model.run_lengths))
    jobs[0] = replace(jobs[0], plan=tuple(block > 0 for block in blocks))
    jobs[3] = replace(jobs[3], plan=tuple(block % 2 == 0 for block in blocks))
    return jobs


@cache
def mixed_alone(model: Model) -> list[Tensor]:
    """The final latents of each mixed job that runs alone."""
    return [run(model, [job])[0] for job in make_mixed(model)]


@pytest.fixture
def mixed_jobs(model: Model) -> list[Job]:
    return [replace(job) for job in make_mixed(model)]


def test_law_2_batched_is_alone(model: Model, mixed_jobs: list[Job]) -> None:
    together, alone = run(model, mixed_jobs), mixed_alone(model)
    assert max(map(apart, together, alone)) <= close(model)
    same_size = [latents for latents in alone if latents.shape == alone[0].shape]
    assert min(itertools.starmap(apart, itertools.combinations(same_size, 2))) > far(model)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 2, 4, 0, 3, 1]])
def test_law_5_independent_of_arrival_and_of_others(model: Model, mixed_jobs: list[Job], order: list[int]) -> None:
    alone = mixed_alone(model)
    engine = Engine(model, max_jobs=3)
    arrivals = iter(order)
    engine.join(mixed_jobs[next(arrivals)])
    while engine.jobs:
        engine.step()
        if (arrival := next(arrivals, None)) is not None:
            engine.join(mixed_jobs[arrival])
    assert all(job.done for job in mixed_jobs)
    assert max(apart(job.latents, latents) for job, latents in zip(mixed_jobs, alone, strict=True)) <= close(model)


def find_in_all_tiers(activations: Activations, model: Model, folder: Path) -> dict[str, Activations]:
    """The same activations, read from every tier that this machine has."""
    disk, remote = DiskTier(folder / "disk", GIB), RemoteTier(f"file://{folder}/remote", GIB)
    stores = {"host": Store(host=HostTier(GIB)), "disk alone": Store(disk=disk), "remote": Store(remote=remote)}
    stores |= {"disk": Store(host=HostTier(GIB), disk=disk)}
    if model.device.type == "cuda":
        stores |= {
            "gpu": Store(gpu=GpuTier(model.device, GIB)),
            "all": Store(GpuTier(model.device, GIB), HostTier(GIB)),
        }
    key = activations.key
    for store in stores.values():
        for steps in store.missing(key):
            store.put(key, cut(Span(key.slots, activations.rows, activations.time), steps))
        store.settle()
    found = {name: store.get(key, model.device) for name, store in stores.items()}
    found["peer"] = copy_from_peer(stores["host"].memory, key)
    return {name: make_activations(key, one.span, model) for name, one in found.items() if one}


def copy_from_peer(memory: Sequence[MemoryTier], key: Key) -> Found | None:
    """A template that comes from the memory of another store."""
    server, store = PeerServer("tcp://127.0.0.1:*", memory), Store(host=HostTier(GIB), peers=PeerTier(GIB))
    assert store.peers
    store.peers.learn(key, [server.address])
    found = store.get(key)
    store.close()
    server.close()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_law_5_independent_of_the_tier(model: Model, kind: Kind, tmp_path: Path) -> None:
    """Rows and results are bit-identical, with several plans."""
    edit = make_edit(steps=3, true_guidance=2.0)
    activations = register_for(model, edit, kind)
    found = find_in_all_tiers(activations, model, tmp_path)
    assert set(found) >= {"host", "disk", "disk alone", "peer", "remote"}
    job = prepare(edit, model)
    plans = feasible(kind, activations.run_lengths)[:2]
    expected = [run(model, [reuse(job, activations, plan)])[0] for plan in plans]
    for number, one in enumerate(found.values()):
        pairs = zip((*one.rows, one.time), (*activations.rows, activations.time), strict=True)
        assert all(torch.equal(rows.to(model.device), own) for rows, own in pairs)  # some are in main memory
        plan = number % 2
        assert torch.equal(run(model, [reuse(job, one, plans[plan])])[0], expected[plan])


@pytest.mark.parametrize("kind", KINDS)
def test_law_6_outside_the_mask_is_bit_identical(model: Model, kind: Kind) -> None:
    random = np.random.default_rng(0)
    picture = random.integers(0, 256, (131, 87, 3), dtype=np.uint8)
    mask = np.zeros((131, 87), dtype=np.bool_)
    mask[13:77, 9:58] = True
    edit = Edit(picture, mask, "a red cat", steps=2, feather=3, size=(48, 32))
    job = make_cached(model, edit, kind)
    [latents] = run(model, [job])
    edited = finish(replace(job, latents=latents), model)
    assert (edited[~mask] == picture[~mask]).all()
    assert (edited[mask] != picture[mask]).mean() > 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_a_dense_plan_is_no_cache(model: Model, kind: Kind) -> None:
    edit = make_edit(true_guidance=2.0)
    plan = (False,) * sum(model.run_lengths)
    job, [plain] = make_cached(model, edit, kind, plan), run(model, [prepare(edit, model)])
    assert torch.equal(run(model, [job])[0], plain)
    all_dense_steps = make_cached(model, replace(edit, dense_steps=edit.steps), kind)
    assert torch.equal(run(model, [all_dense_steps])[0], plain)
    assert job.num_computed_tokens == all_dense_steps.num_computed_tokens == len(job.masked)


def test_dense_steps_come_first(model: Model) -> None:
    edit = make_edit(dense_steps=2)
    job, dense = make_cached(model, edit, "kv"), prepare(edit, model)
    differences = []
    engine = Engine(model)
    engine.join(job)
    engine.join(dense)
    while engine.jobs:
        engine.step()
        differences.append(apart(job.latents, dense.latents))
    assert max(differences[:2]) <= CLOSE < 10 * CLOSE < min(differences[2:])
    assert job.num_computed_tokens == (len(job.masked) + len(job.inside)) / 2


def test_a_full_mask_needs_nothing_of_the_cache(model: Model) -> None:
    edit = make_edit(share=1.0)
    [dense] = run(model, [prepare(edit, model)])
    for kind in KINDS:
        [cached] = run(model, [job := make_cached(model, edit, kind)])
        check_reads_nothing(model, job, cached, dense)


def check_reads_nothing(model: Model, job: Job, cached: Tensor, dense: Tensor) -> None:
    """A job that computes every token of its picture reads no row, so it is dense.

    A model that sees the picture has the tokens of that picture beside those it computes, and reads them. They attended
    to the tokens of the registration: the template's own on its trajectory, and no prompt. An edit has others, so K and
    V of the picture are those of a dense edit in the first block alone, and the results differ. They are the same where
    the edit's tokens are the registration's (law 3, for this case in tests/models/flux/test_kontext.py)."""
    if not model.sees_picture:
        assert len(job.rest) == 0
        assert apart(cached, dense) <= CLOSE
        return
    assert job.reference is not None
    assert job.rest.tolist() == list(range(len(job.masked), len(job.masked) + len(job.reference)))
    assert apart(cached, dense) > far(model)


def test_a_cached_photograph_is_close_to_the_dense_one(models: dict[str, Model]) -> None:
    model = models["builtin"]
    [photograph] = [example for example in read_examples(EXAMPLES) if example.name == "cat"]
    size = 160, 160
    example = photograph.close_up(size)
    edit = Edit(example.picture, example.mask, "a flower", steps=6, size=size)
    first, other = prepare(edit, model), prepare(replace(edit, seed=1), model)
    cached = reuse(replace(first), register_for(model, edit, "kv"))
    pictures = [finish(replace(cached, latents=latents), model) for latents in run(model, [first, cached, other])]
    dense, reused, reseeded = (torch.tensor(pixels).permute(2, 0, 1)[None] / 255 for pixels in pictures)
    assert apart(dense, reused) > 0
    assert psnr(dense, reused) > psnr(dense, reseeded) + 6
    assert ssim(dense, reused) > 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_steps_at_once_change_nothing(model: Model, kind: Kind) -> None:
    edit = make_edit(steps=5)
    one, two, many = (register_for(model, edit, kind, num_steps_at_once=steps) for steps in (1, 2, 99))
    assert one.rows[0].shape[1:3] == (5, {"kv": 2, "y": 1}[kind])
    assert one.num_bytes == 4 * (sum(rows.numel() for rows in one.rows) + one.time.numel())
    assert len(one.rows) == len(two.rows) == len(many.rows)
    assert max(map(apart, one.rows * 2, two.rows + many.rows)) <= CLOSE
    if one.time.numel():
        assert apart(one.time, many.time) <= CLOSE
    assert one.key == two.key == many.key


def test_infeasible_plans_are_refused(model: Model) -> None:
    edit = make_edit()
    job, blocks = prepare(edit, model), sum(model.run_lengths)
    turns = tuple(block % 2 == 0 for block in range(blocks))
    if max(model.run_lengths) > 1:
        with pytest.raises(PlanError, match=r"block \d dense after block \d"):
            make_cached(model, edit, "kv", turns)
    with pytest.raises(PlanError, match=f"has {blocks + 1} blocks, but the model has {blocks}"):
        make_cached(model, edit, "y", (True,) * (blocks + 1))
    with pytest.raises(PlanError, match="no activations"):
        replace(job, plan=turns)


def test_feasible_plans() -> None:
    for kind in KINDS:
        for run_lengths in ((5,), (1, 3, 1)):
            for plan in feasible(kind, run_lengths):
                check_plan(plan, kind, run_lengths)
            check_plan((False,) * 5, kind, run_lengths)
    with pytest.raises(PlanError, match="block 3 dense after block 1"):
        check_plan((False, True, True, False, True), "kv", (5,))
    check_plan((True, False, True, False, True), "kv", (1, 2, 2))
    with pytest.raises(PlanError, match=r"block 4 dense after block 3.*of each transformer"):
        check_plan((True, False, True, True, False), "kv", (1, 2, 2))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_halo_over_everything_is_dense(model: Model, kind: Kind) -> None:
    edit = make_edit(steps=2)
    [dense] = run(model, [prepare(edit, model)])
    job = make_cached(model, replace(edit, halo=64), kind)
    [wide] = run(model, [job])
    check_reads_nothing(model, job, wide, dense)


@torch.no_grad()
def test_halo_tokens_are_computed_and_stay_what_they_are(model: Model) -> None:
    edit = make_edit(steps=2, share=0.1)
    job = make_cached(model, replace(edit, halo=1), "kv")
    masked = job.masked[:, 0]
    [latents] = run(model, [job])
    assert masked.sum() < len(job.inside) < len(masked)
    assert torch.equal(latents[~masked], job.template.clean[~masked])
    [without] = run(model, [make_cached(model, edit, "kv")])
    assert apart(latents, without) > 0
    picture = finish(replace(job, latents=latents), model)
    assert np.array_equal(picture[~edit.mask], edit.picture[~edit.mask])


@torch.no_grad()
def test_what_a_registration_sees_is_part_of_its_key(model: Model) -> None:
    edit = make_edit(steps=2)
    plain = register_for(model, edit, "y")
    told = register_for(model, edit, "y", prompt="a red cat")
    assert told.key == replace(plain.key, prompt="a red cat")
    assert any(apart(a, b) > 0 for a, b in zip(plain.rows, told.rows, strict=True))
    if not model.text_flows:
        with pytest.raises(EditError, match="isolated"):
            register_for(model, edit, "y", isolated=True)
        return
    alone = register_for(model, edit, "y", isolated=True)
    assert alone.key == replace(plain.key, isolated=True, num_text=0)
    first, last = (plain.rows[place][..., plain.num_text :, :] for place in (0, -1))
    assert apart(alone.rows[0], first) == 0  # the input of the first block does not depend on text
    assert apart(alone.rows[-1], last) > 0


@pytest.fixture
def editor(model: Model) -> Editor:
    editor = Editor.__new__(Editor)  # with a model that is loaded already
    editor.model = model
    editor.store = make_store(model.device)
    return editor


def test_the_editor_hits_what_matches(editor: Editor) -> None:
    edit = make_edit(steps=3, guidance=2.0)
    [miss] = editor.edit_many([edit])
    editor.register(edit.picture, size=edit.size, steps=3, guidance=2.0)
    hit, again = editor.edit_many([edit, replace(edit, prompt="sky", seed=4, true_guidance=2.0)])
    assert (miss.cache_hit, hit.cache_hit, again.cache_hit) == (False, True, True)
    assert (miss.num_computed_tokens, hit.num_computed_tokens) == (miss.num_tokens, hit.num_masked_tokens)
    other_picture = make_edit(steps=3, guidance=2.0, picture_seed=1).picture
    others = [{"steps": 4}, {"size": (64, 96)}, {"picture": other_picture}]
    assert not any(result.cache_hit for result in editor.edit_many([replace(edit, **other) for other in others]))


def test_the_editor_does_not_look_where_nothing_can_be_reused(editor: Editor) -> None:
    edit = make_edit(steps=3)
    editor.register(edit.picture, size=edit.size, steps=3, guidance=edit.guidance)
    everything, all_dense = replace(edit, mask=np.ones_like(edit.mask)), replace(edit, dense_steps=3)
    results = editor.edit_many([edit, everything, all_dense])
    sees_picture = editor.model.sees_picture  # tokens of the picture it sees are never masked, so they are read
    assert [result.can_reuse for result in results] == [True, sees_picture, False]
    assert [result.cache_tier for result in results] == ["host", "host" if sees_picture else None, None]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_lower_strength_takes_the_last_of_the_same_steps(model: Model, kind: Kind) -> None:
    edit = make_edit(prompt="", steps=4, strength=0.5)
    activations = register_for(model, edit, kind)
    assert make_key(edit, model, kind) == activations.key
    for step in (0, 1):
        job = on_trajectory(model, edit, step)
        assert job.num_steps == 2
        dense, cached = predict(model, job)[0], predict(model, reuse(job, activations))[0]
        assert apart(dense, cached) <= CLOSE
    first_steps = replace(activations, rows=tuple(rows[:, :2] for rows in activations.rows), time=activations.time[:2])
    assert apart(dense, predict(model, reuse(job, first_steps))[0]) > 10 * CLOSE


def test_guidance_is_part_of_the_key_where_it_enters_the_network(editor: Editor) -> None:
    edit = make_edit(steps=2, guidance=2.0)
    editor.register(edit.picture, size=edit.size, steps=2, guidance=9.0, kind="y")
    [result] = editor.edit_many([edit])
    assert result.cache_hit is not editor.model.embeds_guidance


def test_registration_refuses_what_an_edit_would(editor: Editor) -> None:
    picture = make_edit().picture
    with pytest.raises(EditError, match="number of steps is 0"):
        editor.register(picture, steps=0)
    with pytest.raises(EditError, match="'q'"):
        editor.register(picture, kind="q")  # type: ignore[arg-type]
    with pytest.raises(EditError, match="0 steps at once"):
        register(picture, editor.model, num_steps_at_once=0)
