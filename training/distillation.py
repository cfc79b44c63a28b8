"""Distillation of guidance: one branch learns to answer what two branches, with a caption and without, say together."""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from training.feed import Inputs
from training.guidance import Guidance
from training.model import Model, weighted_error

MAX_GUIDANCE = 7.0
USUAL_GUIDANCE = 3.5  # of edits that name none
UNGUIDED_SHARE = 0.15  # of the examples, so that a scale of 1 stays what the teacher says


class Distillation:
    """The target is the teacher's guided prediction, for a guidance scale drawn per example."""

    def __init__(self, teacher: Model, rule: Guidance, generator: Generator) -> None:
        self.teacher, self.rule, self.generator = teacher.requires_grad_(False).eval(), rule, generator

    def loss(self, student: Model, inputs: Inputs, share: float) -> Tensor:
        guidance = self.scales(inputs)
        said, change = self.answer(inputs)
        target = said + (guidance[:, None, None] - 1) * change
        spread = guidance.sqrt()[:, None, None]  # errors in proportion to the scale would count most where it is large
        return weighted_error(student(inputs, inputs.texts, guidance) / spread, target / spread, inputs)

    @torch.no_grad()
    def answer(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """What the teacher says of captions, and what a scale of 2 adds to it."""
        one, empty = torch.ones_like(inputs.times), torch.zeros_like(inputs.texts)
        said, unsaid = (self.teacher(inputs, texts, one).float() for texts in (inputs.texts, empty))
        return said, self.rule.change(said, unsaid, inputs.noisy, inputs.times, inputs.masked)

    def scales(self, inputs: Inputs) -> Tensor:
        """A guidance scale per example, most often in the middle; the two steps of a reusing pair share theirs."""
        num, device = len(inputs.times), inputs.times.device
        draws = torch.rand(3, num, generator=self.generator, device=device)
        scales = 1 + (MAX_GUIDANCE - 1) * draws[:2].mean(0)
        scales = torch.where(draws[2] < UNGUIDED_SHARE, 1.0, scales)
        return torch.where(inputs.reused.any(1), scales[inputs.source], scales)

    def missed(self, student: Model, batches: Sequence[Inputs]) -> float:
        """The student's squared error at the usual scale, as a share of that of leaving guidance out."""
        error = left_out = 0.0
        for inputs in batches:
            said, change = self.answer(inputs)
            target = said + (USUAL_GUIDANCE - 1) * change
            answered = student(inputs, inputs.texts, torch.full_like(inputs.times, USUAL_GUIDANCE))
            error += float(weighted_error(answered, target, inputs).detach())
            left_out += float(weighted_error(said, target, inputs))
        return error / left_out
