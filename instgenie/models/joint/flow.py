"""Rows between two blocks: text and image apart, or together. Where a job's plan turns, tokens leave or come back."""

from abc import ABC, abstractmethod
from typing import Self

from torch import Tensor

from instgenie.models.joint.batch import JointBatch
from instgenie.models.joint.layout import Layout
from instgenie.models.joint.residual import Residual


class Flow(ABC):
    """The rows of all branches that go into a block."""

    @abstractmethod
    def parts(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """[text tokens, width] and [image tokens, width]"""

    @abstractmethod
    def by_branch(self, layout: Layout) -> list[tuple[Tensor, Tensor]]:
        """The rows of text and image of each branch; nothing is copied."""

    @abstractmethod
    def turned(self, batch: JointBatch, layout: Layout, block: int) -> tuple[Layout, Self]:
        """The layout of a block and the rows in it."""

    @abstractmethod
    def plus(self, rows: Tensor, layout: Layout) -> Self:
        """With rows added to those of the image [image tokens, width]."""


class Apart(Flow):
    """Text and image in tensors of their own."""

    def __init__(self, text: Residual, image: Residual) -> None:
        self.text, self.image = text, image

    def parts(self, layout: Layout) -> tuple[Tensor, Tensor]:
        return self.text.total, self.image.total

    def by_branch(self, layout: Layout) -> list[tuple[Tensor, Tensor]]:
        text, image = self.parts(layout)
        return list(zip(text.split(layout.num_text), image.split(layout.num_image), strict=True))

    def turned(self, batch: JointBatch, layout: Layout, block: int) -> tuple[Layout, Self]:
        turned, text, image = batch.turn(layout, self.text.total, self.image.total, block)
        return turned, type(self)(Residual(text), Residual(image))

    def plus(self, rows: Tensor, layout: Layout) -> Self:
        return type(self)(self.text, Residual(self.image.total + rows))


class Together(Flow):
    """The text of each branch before its image, in one tensor."""

    def __init__(self, joint: Residual) -> None:
        self.joint = joint

    def parts(self, layout: Layout) -> tuple[Tensor, Tensor]:
        return layout.part(self.joint.total.split(layout.num_joint))

    def by_branch(self, layout: Layout) -> list[tuple[Tensor, Tensor]]:
        rows = zip(self.joint.total.split(layout.num_joint), layout.num_text, strict=True)
        return [(one[:num], one[num:]) for one, num in rows]

    def turned(self, batch: JointBatch, layout: Layout, block: int) -> tuple[Layout, Self]:
        turned, joint = batch.turn_joint(layout, self.joint.total, block)
        return turned, type(self)(Residual(joint))

    def plus(self, rows: Tensor, layout: Layout) -> Self:
        return type(self)(Residual(self.joint.total.index_add(0, layout.image_places.joint, rows)))


def join(flow: Flow, layout: Layout) -> Together:
    """The same rows together; nothing is copied if they are already."""
    return flow if isinstance(flow, Together) else Together(Residual(layout.join(*flow.parts(layout))))
