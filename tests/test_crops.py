"""Edits of crops through the editor and through the finish process: results, templates, other fields."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instgenie import Editor
from instgenie.cluster import wire
from instgenie.cluster.entries import EditEntry, PreparedJob
from instgenie.cluster.messages import finish_message
from instgenie.cluster.orders import Order
from instgenie.cluster.wish import Wish
from instgenie.engine.finish import finish
from instgenie.engine.prepare import prepare
from instgenie.errors import EditError
from instgenie.pictures.cropping import crop_edit
from instgenie.pictures.mask import box_mask
from instgenie.pictures.picture import open_picture
from instgenie.scheduling.router import Work
from instgenie.types import Box, Edit, Pixels, Source
from instgenie.workers.finish import Finisher
from instgenie.workers.frames import job_frames, tensor_frame, tensor_head

SIZE = (150, 220)
MASK = box_mask((90, 60, 14, 12), SIZE)
SHIFTED = box_mask((91, 60, 14, 13), SIZE)


def photo(seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (*SIZE, 3), np.uint8)


@pytest.fixture(scope="module")
def editor(folders: dict[str, Path]) -> Editor:
    """An editor whose model works at 32x32."""
    return Editor(model=str(folders["sd_fill"]), device="cpu")


def edit(editor: Editor, picture: Pixels, **options: Any) -> Any:
    return editor.edit(picture, **{"mask": MASK, "prompt": "a red cat", "steps": 4, "reuse": "off"} | options)


@pytest.mark.parametrize(
    "options", [{}, {"feather": 4}, {"strength": 0.5}, {"size": (32, 64)}, {"crop": "masked", "crop_padding": 40}]
)
def test_a_small_mask_is_edited_on_a_crop(editor: Editor, options: dict[str, Any]) -> None:
    picture = photo()
    result = edit(editor, picture, **options)
    assert result.crop
    assert result.crop.size[0] * result.crop.size[1] < picture[..., 0].size
    assert result.picture.shape == picture.shape
    assert np.array_equal(result.picture[~MASK], picture[~MASK])
    assert (result.picture[MASK] != picture[MASK]).any()
    assert np.array_equal(edit(editor, picture, **options).picture, result.picture)


def test_the_whole_picture_is_edited_if_that_is_asked_for(editor: Editor) -> None:
    result = edit(editor, photo(), crop="off")
    assert result.crop is None
    assert (result.picture != edit(editor, photo()).picture).any()


def test_slightly_different_masks_share_the_template_of_their_crop(editor: Editor) -> None:
    picture = photo(1)
    first = edit(editor, picture, reuse="template", crop="masked")
    second = edit(editor, picture, reuse="auto", mask=SHIFTED)
    assert first.crop == second.crop
    assert (first.cache_hit, second.cache_hit) == (True, True)
    assert second.num_computed_tokens < second.num_tokens
    elsewhere = edit(editor, picture, reuse="auto", mask=box_mask((10, 10, 14, 12), SIZE))
    assert (elsewhere.cache_hit, elsewhere.crop != first.crop) == (False, True)


def test_a_template_of_the_whole_picture_stays_in_use(editor: Editor) -> None:
    picture = photo(2)
    editor.register(picture, steps=4)
    result = edit(editor, picture, reuse="auto")
    assert (result.crop, result.cache_hit) == (None, True)
    insisting = edit(editor, picture, reuse="template")
    assert np.array_equal(insisting.picture, result.picture)
    sharper = edit(editor, picture, reuse="auto", crop="masked")
    assert (sharper.crop is not None, sharper.cache_hit) == (True, False)


def test_crops_and_whole_pictures_share_a_batch(editor: Editor) -> None:
    crops = [Edit(photo(), MASK, "a cat", steps=2, reuse="off", seed=seed) for seed in (1, 2)]
    whole = replace(crops[0], crop="off")
    together = editor.edit_many([*crops, whole])
    assert [result.crop is not None for result in together] == [True, True, False]
    assert np.abs(together[1].picture.astype(int) - editor.edit_many([crops[1]])[0].picture).max() <= 1


@pytest.mark.parametrize("options", [{"crop": "middle"}, {"crop_padding": -1}, {"crop_padding": 5000}])
def test_bad_crops_are_refused(editor: Editor, options: dict[str, Any]) -> None:
    with pytest.raises(EditError, match="crop"):
        edit(editor, photo(), **options)


def test_the_finish_process_puts_a_crop_back_as_the_editor_does(editor: Editor) -> None:
    own = np.dstack([photo(3), np.full(SIZE, 255, np.uint8)])
    own[:9, :9, 3] = 7
    whole = Edit(photo(3), MASK, "a cat", steps=2, feather=3, seed=4, source=Source(own))
    part = crop_edit(whole, Box(range(32, 96), range(64, 128)))
    job = prepare(part, editor.model)
    order = Order("me", part.picture, part.mask, Wish("a cat", 4, feather=3), whole=part.whole)
    head, tensors = job_frames(job)
    entry = EditEntry(id="a", order=order, work=Work(2, 1, 1), group=[])
    entry.prepared = PreparedJob(wire.Prepared("a", 1, head, 1, 1, 2, 0.0), tensors)
    message, frames = finish_message(entry, tensor_head(job.latents), None, [tensor_frame(job.latents)])
    assert message.size == SIZE

    sent: list[Any] = []

    class Line:
        def send(self, message: wire.Message, frames: Any = ()) -> None:
            sent.append((message, frames))

    Finisher(editor.model, Line()).handle(message, frames)  # type: ignore[arg-type]
    [(painted, [encoded])] = sent
    assert isinstance(painted, wire.Painted), painted
    assert np.array_equal(open_picture(encoded)[9:, 9:], finish(job, editor.model)[9:, 9:, :3])
