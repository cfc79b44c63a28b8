"""Batches of edits of the sample picture, with masks of one size at different places."""

from instgenie.models.model import Model
from instgenie.pictures.picture import check_edit
from instgenie.pictures.samples import mask_around, sample_picture
from instgenie.types import Edit

PROMPT = "a flower"


def make_edits(model: Model, size: tuple[int, int], steps: int, ratio: float, batch: int) -> list[Edit]:
    """Put the first mask in the middle and the others at irrational distances from it, so that all differ."""
    picture = sample_picture(size)
    centres = [((0.5 + 0.618 * index) % 1, (0.5 + 0.755 * index) % 1) for index in range(batch)]
    edits = [
        Edit(picture, mask_around(centre, size, model.patch, ratio), PROMPT, seed, steps, model.guidance, size=size)
        for seed, centre in enumerate(centres)
    ]
    for edit in edits:
        check_edit(edit)
    return edits
