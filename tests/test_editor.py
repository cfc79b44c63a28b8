"""The editor as a user meets it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.changed import choose_by_blocks, whole
from helpers.edits import make_edit, prepare

from instgenie import Editor
from instgenie.cache.host import HostTier
from instgenie.cache.store import Store
from instgenie.engine import prepare as preparing
from instgenie.engine.loop import Engine
from instgenie.errors import EditError, MaskError, ModelError, OutOfMemoryError
from instgenie.jobs.blocks import BlockPass
from instgenie.models.model import Model
from instgenie.types import Result


@pytest.fixture(scope="module")
def editor(folders: dict[str, Path]) -> Editor:
    return Editor(model=str(folders["fill"]), device="cpu")


def test_three_lines(editor: Editor) -> None:
    edit = make_edit()
    result = editor.edit(edit.picture, edit.mask, "a red cat", seed=5, steps=2, size=(32, 48))
    assert result.picture.shape == edit.picture.shape
    assert result.picture.dtype == np.uint8
    assert result.seed == 5
    assert (result.num_tokens, result.num_masked_tokens) == (24, 12)
    assert min(result.seconds.prepare, result.seconds.denoise, result.seconds.finish) > 0


def test_same_seed_same_picture(editor: Editor) -> None:
    first, again, other = (editor.edit_many([make_edit(seed=seed)])[0].picture for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


def test_steps_and_guidance_suit_the_model(editor: Editor, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(Editor, "edit_many", lambda self, edits: seen.extend(edits) or edits)
    edit = make_edit()
    editor.edit(edit.picture, edit.mask, "sky")
    editor.edit(edit.picture, edit.mask, "sky", steps=3, guidance=2.0)
    assert [(edit.steps, edit.guidance) for edit in seen] == [(50, 30.0), (3, 2.0)]


@pytest.mark.parametrize("steps", [1, 2, 5, 28])
def test_an_edit_that_starts_from_surroundings_leaves_out_a_step(editor: Editor, steps: int) -> None:
    """With a strength of 1 it would start from noise, and so it would with fewer steps than leave one out."""
    asked = {"steps": steps, "masked_content": "surroundings"}
    chosen, given = (make_edit(**editor.suited(asked | options)) for options in ({}, {"strength": 0.4}))
    assert given.strength == 0.4
    num_run = editor.model.schedule(chosen, 24).num_steps
    assert 1 <= num_run < chosen.steps == max(steps, 2)


def test_a_model_that_is_trained_to_remove_starts_from_noise(models: dict[str, Model]) -> None:
    editor = Editor.__new__(Editor)
    editor.model = models["builtin"]
    asked = {"masked_content": "surroundings"}
    assert make_edit(**editor.suited(asked)).strength == 1
    assert editor.suited(asked | {"strength": 0.4})["strength"] == 0.4


@pytest.mark.parametrize("steps", [0, -3, "x"])
def test_steps_are_checked_before_a_strength_is_chosen(editor: Editor, steps: Any) -> None:
    edit = make_edit()
    with pytest.raises(EditError, match="number of steps"):
        editor.edit(edit.picture, edit.mask, "", steps=steps, masked_content="surroundings")


def test_what_a_mask_hides_has_no_say_if_an_edit_starts_from_surroundings(editor: Editor) -> None:
    edit = make_edit(strength=0.5, masked_content="surroundings")
    hidden = np.where(edit.mask[..., None], np.uint8(255), edit.picture)
    for content, is_same in (("surroundings", True), ("original", False)):
        starts = []
        for picture in (edit.picture, hidden):
            job = prepare(replace(edit, picture=picture, masked_content=content), editor.model)
            starts.append(job.latents[job.masked[:, 0]])
        assert torch.equal(*starts) == is_same


def test_surroundings_are_remembered_by_picture_and_mask(editor: Editor) -> None:
    edit, known = make_edit(strength=0.5, masked_content="surroundings"), preparing.Encodings()
    other_mask = replace(edit, mask=edit.mask[::-1].copy())
    other_picture = replace(edit, picture=make_edit(picture_seed=1).picture)
    for one in (edit, other_mask, edit, other_picture):
        found, fresh = (preparing.prepare(one, editor.model, shelf) for shelf in (known, preparing.Encodings()))
        assert torch.equal(found.latents, fresh.latents)


def test_templates_without_rows_for_convolutions_serve(folders: dict[str, Path]) -> None:
    """Until there is one with such rows; convolutions are dense meanwhile."""
    store, name = Store(host=HostTier(2**30)), str(folders["sd"])
    plain = Editor(model=name, device="cpu", cache=store)
    reusing = Editor(model=name, device="cpu", cache=store, convolutions="reused")
    edit = make_edit(size=(64, 64), share=0.1, dense_steps=0)
    plain.register(edit.picture, edit.size, edit.steps, edit.guidance)
    [dense], [found] = plain.edit_many([edit]), reusing.edit_many([edit])
    assert (found.reuse, found.cache_tier) == ("template", "host")
    assert (found.picture == dense.picture).all()
    assert reusing.register(edit.picture, edit.size, edit.steps, edit.guidance).num_computed_steps == edit.steps
    [tiled] = reusing.edit_many([edit])
    assert (tiled.picture[~edit.mask] == edit.picture[~edit.mask]).all()
    assert (tiled.picture != dense.picture).any()


def test_progress_counts_all_steps(editor: Editor) -> None:
    seen: list[tuple[int, int]] = []
    edits = [make_edit(steps=2), make_edit(steps=4), make_edit(steps=4, strength=0.5)]
    editor.edit_many(edits, on_step=lambda done, total: seen.append((done, total)))
    assert seen == [(3, 8), (6, 8), (7, 8), (8, 8)]


def test_more_edits_than_fit_a_batch(editor: Editor) -> None:
    edits = [make_edit(seed=seed, steps=1 + seed % 3) for seed in range(11)]
    assert [result.seed for result in editor.edit_many(edits)] == list(range(11))


def test_edits_without_room_for_rows_of_blocks_compute_everything(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a worker. If there is no room for an edit by itself, that is an error."""
    dense = Editor(model=str(folders["blend"]), device="cpu")
    choose_by_blocks(dense.model, monkeypatch)
    editor = Editor(model=str(folders["blend"]), device="cpu", reuse_changed=0.6)
    edits = [whole(seed=seed, steps=4) for seed in (1, 2)]
    assert all(result.num_computed_tokens < result.num_tokens for result in editor.edit_many(edits))
    monkeypatch.setattr(BlockPass, "complete", run_out_of_memory)
    for found, expected in zip(editor.edit_many(edits), dense.edit_many(edits), strict=True):
        assert found.num_computed_tokens == found.num_tokens
        assert np.abs(found.picture.astype(int) - expected.picture).max() <= 1
    monkeypatch.setattr(Engine, "predict", run_out_of_memory)
    with pytest.raises(OutOfMemoryError, match="a batch of 2 edits does not fit into memory"):
        editor.edit_many(edits)


def run_out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_nothing_to_do(editor: Editor) -> None:
    assert editor.edit_many([]) == []


def test_pictures_of_any_memory_layout(editor: Editor) -> None:
    edit = make_edit()
    flipped = editor.edit(edit.picture[:, ::-1], edit.mask, "sky", steps=1, size=(32, 48))
    edit.picture.flags.writeable = False
    editor.edit(edit.picture, edit.mask, "sky", steps=1, size=(32, 48))
    assert (flipped.picture[~edit.mask] == edit.picture[:, ::-1][~edit.mask]).all()
    upside_down = editor.edit(edit.picture, edit.mask[::-1], "sky", steps=1, size=edit.mask.shape)
    assert (upside_down.picture[~edit.mask[::-1]] == edit.picture[~edit.mask[::-1]]).all()


def test_bad_edits(editor: Editor, monkeypatch: pytest.MonkeyPatch) -> None:
    edit = make_edit()
    with pytest.raises(MaskError):
        editor.edit(edit.picture, np.zeros_like(edit.mask), "sky")
    with pytest.raises(EditError, match="size"):
        editor.edit(edit.picture, edit.mask, "sky", size=(33, 48))
    monkeypatch.setattr(type(editor.model), "size_multiple", 32)
    with pytest.raises(EditError, match=r"\(64, 48\): multiples of 32"):
        editor.edit(edit.picture, edit.mask, "sky", size=(64, 48))


def test_reuse_can_be_pinned(folders: dict[str, Path]) -> None:
    """The same seed gives the same picture, whatever was registered before."""
    editor, edit = Editor(model=str(folders["fill"]), device="cpu"), make_edit(steps=2)

    def run(reuse: str) -> Result:
        return editor.edit_many([replace(edit, reuse=reuse)])[0]

    dense, cached = run("off"), run("template")
    assert (dense.cache_tier, cached.cache_tier) == (None, "host")
    assert cached.num_computed_tokens < dense.num_computed_tokens == dense.num_tokens
    assert (run("auto").picture == cached.picture).all()
    assert (run("template").picture == cached.picture).all()
    assert (run("off").picture == dense.picture).all()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"reuse": "template", "dense_steps": 2}, "2 of 2 steps are dense"),
        ({"reuse": "template", "mask": np.ones(make_edit().mask.shape, np.bool_)}, "the mask covers 100%"),
        ({"reuse": "always"}, "one of auto, own, template, off is expected"),
    ],
)
def test_activations_that_cannot_be_used_are_an_error(editor: Editor, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(EditError, match=why):
        editor.edit_many([replace(make_edit(steps=2), **fields)])


def test_padding_of_a_prompt_is_read_from_its_own_steps_and_from_the_template(folders: dict[str, Path]) -> None:
    editors = {
        padding: Editor(model=str(folders["blend"]), device="cpu", text_padding=padding)
        for padding in ("computed", "reused")
    }
    edit = make_edit(prompt="flower", steps=4, own_steps=(0, 2))
    found: dict[tuple[str, str], Result] = {}
    for padding, editor in editors.items():
        found[padding, "own"] = editor.edit_many([edit])[0]
        editor.register(edit.picture, edit.size, edit.steps, edit.guidance)
        found[padding, "template"] = editor.edit_many([edit])[0]
    for reuse in ("own", "template"):
        computed, read = found["computed", reuse], found["reused", reuse]
        assert computed.reuse == read.reuse == reuse
        assert (computed.picture != read.picture).any()
        assert (computed.picture == read.picture)[~edit.mask].all()


def test_convolutions_of_masked_tiles(folders: dict[str, Path]) -> None:
    edit = make_edit(size=(64, 64), share=0.1, steps=3, own_steps=(0,))
    dense, reused = (
        Editor(model=str(folders["sdxl"]), device="cpu", convolutions=how).edit_many([edit])[0]
        for how in ("dense", "reused")
    )
    assert dense.reuse == reused.reuse == "own"
    assert (dense.picture != reused.picture).any()
    assert (dense.picture == reused.picture)[~edit.mask].all()
    with pytest.raises(ModelError, match="no convolutions that could be tiled"):
        Editor(model=str(folders["blend"]), device="cpu", convolutions="tiled")
