"""Guidance: what is added to a prediction so that it follows its caption, and where that does harm."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance inside the mask. It fades out towards pure noise, and where it only scales the picture.

    Near pure noise a model says little more than a colour for the whole mask, and guidance makes it a wrong one. What
    guidance adds along the prediction itself makes colours burn (adaptive projected guidance).
    """

    none_above: float = 1.0  # the time: there is more noise, and no guidance
    full_below: float = 0.92
    is_projected: bool = True

    def change(self, said: Tensor, unsaid: Tensor, noisy: Tensor, times: Tensor, masked: Tensor) -> Tensor:
        """What a scale of 2 adds to the velocity [B, N, 4C] of a caption, from that of no caption, at times [B]."""
        change = said - unsaid
        if self.is_projected:
            change = across(change, noisy - times[:, None, None] * said, masked)
        return change * masked[..., None] * self.share(times)[:, None, None]

    def share(self, times: Tensor) -> Tensor:
        """The share of guidance that is left at each time, from 0 near pure noise to 1."""
        if self.none_above == self.full_below:
            return (times <= self.full_below).float()
        return ((self.none_above - times) / (self.none_above - self.full_below)).clamp(0, 1)


def across(change: Tensor, picture: Tensor, masked: Tensor) -> Tensor:
    """The part of a change of the velocity that does not scale the predicted picture, in masked tokens."""
    inside = picture * masked[..., None]
    along = (change * inside).sum((1, 2)) / inside.square().sum((1, 2)).clamp(min=1e-6)
    return change - along[:, None, None] * inside
