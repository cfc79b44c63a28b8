"""Guidance: what is added to a prediction so that it follows its caption, and where that does harm."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance that is left out near pure noise, and where it only scales the predicted picture.

    Near pure noise a model says little more than a colour for the whole mask, and guidance makes it a wrong one. What
    guidance adds along the prediction itself makes colours burn (adaptive projected guidance).
    """

    unguided: float = 0.95  # times with more noise have no guidance,
    guided: float = 0.85  # those with less have all of it
    is_projected: bool = True

    def change(self, said: Tensor, unsaid: Tensor, noisy: Tensor, times: Tensor, masked: Tensor) -> Tensor:
        """What a scale of 2 adds to the velocity [B, N, 4C] of a caption, from that of no caption, at times [B]."""
        change = said - unsaid
        if self.is_projected:
            change = across(change, noisy - times[:, None, None] * said, masked)
        return change * self.share(times)[:, None, None]

    def share(self, times: Tensor) -> Tensor:
        """The share of guidance that is left at each time, from 0 near pure noise to 1."""
        if self.unguided == self.guided:
            return (times <= self.guided).float()
        return ((self.unguided - times) / (self.unguided - self.guided)).clamp(0, 1)


def across(change: Tensor, picture: Tensor, masked: Tensor) -> Tensor:
    """The part of a change of the velocity that does not scale the predicted picture, judged over masked tokens."""
    inside = picture * masked[..., None]
    along = (change * inside).sum((1, 2)) / inside.square().sum((1, 2)).clamp(min=1e-6)
    return change - along[:, None, None] * picture
