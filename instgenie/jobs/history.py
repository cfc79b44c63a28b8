"""What a job remembers of each of its tokens: its prediction when it was last computed, how that changed, and how well
it was guessed. Knows tensors and times; knows no job and no model.

A token that is not computed at a step takes a guess in the place of its prediction: the last one, moved on as it moved
between the last two. How wrong guesses were is known at every token that is computed, and says where the next may be
trusted.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenHistory:
    """All tensors but `predictions`, `slopes` and `latents` have one number per token."""

    predictions: Tensor  # [tokens, channels], guided
    slopes: Tensor  # [tokens, channels], movement of the predictions per unit of time
    latents: Tensor  # [tokens, channels], from which they were computed
    times: Tensor  # at which they were computed
    steps: Tensor  # the same as numbers of steps, float32
    errors: Tensor  # of the last guess that was put to the test, relative to the predictions of all tokens
    spans: Tensor  # the steps over which that guess reached
    trust: float  # share of a prediction's movement that a guess expects to go on

    @classmethod
    def start(cls, prediction: Tensor, latents: Tensor, time: float, step: int, trust: float) -> Self:
        """The history behind a step that computed every token. Nothing has been guessed yet."""
        one = torch.ones(len(prediction), device=prediction.device)
        return cls(prediction, torch.zeros_like(prediction), latents, one * time, one * step, one, one, trust)

    def guess(self, time: float) -> Tensor:  # [tokens, channels]
        return self.predictions + self.slopes * (self.trust * (time - self.times))[:, None]

    def after(
        self, prediction: Tensor, index: Tensor | None, latents: Tensor, time: float, step: int
    ) -> tuple[Tensor, "TokenHistory"]:
        """Predictions of all tokens, of which those at the index were computed, or all: the others are guessed. Also
        the history behind this step."""
        guessed = self.guess(time)
        scale = prediction.square().sum(1).mean().sqrt()
        if index is not None:
            prediction = guessed.index_copy(0, index, prediction)
        found = TokenHistory(
            predictions=prediction,
            slopes=(prediction - self.predictions) / (time - self.times)[:, None],
            latents=latents,
            times=torch.full_like(self.times, time),
            steps=torch.full_like(self.steps, step),
            errors=(prediction - guessed).norm(dim=1) / scale,
            spans=step - self.steps,
            trust=self.trust,
        )
        return prediction, found if index is None else self.exchanged(found, index)

    def exchanged(self, found: "TokenHistory", index: Tensor) -> "TokenHistory":
        """This history, with what was found of the tokens at the index."""
        values = ((name, getattr(self, name), value) for name, value in vars(found).items() if name != "trust")
        mixed = {name: kept.index_copy(0, index, value[index]) for name, kept, value in values}
        return replace(self, **mixed)
