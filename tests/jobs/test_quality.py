"""The quality setting: dense steps and halo of an edit, and the pictures that an editor makes."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.edits import make_edit

from instgenie.editor import Editor, make_store
from instgenie.errors import EditError
from instgenie.jobs.quality import SETTINGS, Quality, with_quality
from instgenie.models.model import Model


@pytest.fixture
def editor(models: dict[str, Model]) -> Editor:
    editor = Editor.__new__(Editor)  # around a model that is loaded already
    editor.model = models["fill"]
    editor.store = make_store(editor.model.device)
    return editor


ORDER: tuple[Quality, ...] = ("fast", "balanced", "exact")


def test_more_quality_computes_more() -> None:
    for steps in (1, 4, 28, 50):
        fast, balanced, exact = (with_quality(make_edit(steps=steps), quality) for quality in ORDER)
        nums = [SETTINGS[quality].own_steps(steps) for quality in ORDER]
        assert len(nums[0]) <= len(nums[1]) <= len(nums[2]) == steps
        assert fast.dense_steps <= balanced.dense_steps <= exact.dense_steps == steps
        assert fast.halo <= balanced.halo
    assert SETTINGS["balanced"].dense_steps(56) <= 2 * SETTINGS["balanced"].dense_steps(28)


def test_an_unknown_quality_is_named() -> None:
    with pytest.raises(EditError, match="'best': it must be one of fast, balanced, adaptive, exact"):
        with_quality(make_edit(), "best")  # type: ignore[arg-type]


def test_exact_is_the_dense_edit_whatever_is_registered(editor: Editor) -> None:
    edit = make_edit(steps=3)
    options = {"steps": 3, "size": edit.size, "guidance": edit.guidance}
    dense = editor.edit(edit.picture, edit.mask, edit.prompt, quality="fast", reuse="off", **options)
    editor.register(edit.picture, size=edit.size, steps=3, guidance=edit.guidance)
    exact = editor.edit(edit.picture, edit.mask, edit.prompt, quality="exact", **options)
    fast = editor.edit(edit.picture, edit.mask, edit.prompt, quality="fast", **options)
    assert not exact.cache_hit
    assert np.array_equal(exact.picture, dense.picture)
    assert fast.num_computed_tokens < exact.num_computed_tokens == exact.num_tokens


def test_what_an_edit_says_itself_goes_first(editor: Editor) -> None:
    edit = make_edit(steps=2)
    editor.register(edit.picture, size=edit.size, steps=2, guidance=edit.guidance)
    options = {"steps": 2, "size": edit.size, "guidance": edit.guidance, "dense_steps": 0, "halo": 1}
    result = editor.edit(edit.picture, edit.mask, edit.prompt, **options)
    [same] = editor.edit_many([replace(edit, dense_steps=0, halo=1)])
    assert result.num_masked_tokens < result.num_computed_tokens < result.num_tokens
    assert np.array_equal(result.picture, same.picture)
