"""Representation alignment: a second loss makes early hidden states resemble VGG16 features of the clean photograph.

Representation alignment shortens training; it fades out after half of it and leaves nothing in the saved model.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from instgenie.bench.metrics import Lpips
from training.examples import Examples
from training.latents import PATCH

TAP = 2  # single blocks before the tap


class Tap(nn.Module):
    """Passes its input on unchanged and keeps a reference to it."""

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, **_: object) -> tuple[Tensor, Tensor]:
        self.kept = hidden_states
        return encoder_hidden_states, hidden_states


class Alignment:
    """The second loss, on the hidden state at a tap among the single blocks."""

    def __init__(self, model: nn.Module, pictures: Tensor, weight: float = 0.5) -> None:
        self.model, self.weight, self.tap = model, weight, Tap()
        model.transformer.single_transformer_blocks.insert(TAP, self.tap)
        self.features = vgg_features(pictures)  # [N, 512, 16, 16]
        width = model.transformer.inner_dim
        projector = nn.Sequential(nn.Linear(width, 768), nn.SiLU(), nn.Linear(768, 512))
        model.alignment = projector.to(pictures.device)  # trained with the model

    def remove(self) -> None:
        del self.model.transformer.single_transformer_blocks[TAP], self.model.alignment

    def with_loss(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda model, inputs, share: loss(model, inputs) + self.weight_at(share) * self.loss(inputs.examples)

    def weight_at(self, share: float) -> float:
        """Weight of the loss: full for two fifths of the training, then falling to 0 at three fifths."""
        return self.weight * min(1.0, max(0.0, (0.6 - share) / 0.2))

    def loss(self, examples: Examples) -> Tensor:
        """Cosine distance to the VGG16 features of the same crop, for unaltered photographs."""
        height, width = (side // PATCH for side in examples.masks.shape[1:])
        places = F.affine_grid(examples.theta, [len(examples.theta), 1, height, width], align_corners=False)
        seen = F.grid_sample(self.features[examples.rows].float(), places, padding_mode="border", align_corners=False)
        hidden = self.model.alignment(self.tap.kept[:, : height * width]).float()
        near = F.cosine_similarity(hidden, torch.cat([seen.flatten(2).mT] * 2), dim=-1)  # two noisy versions of each
        untouched = torch.cat([examples.untouched] * 2)[:, None]
        return ((1 - near) * untouched).sum() / (untouched.sum() * near.shape[1])


@torch.no_grad()
def vgg_features(pictures: Tensor) -> Tensor:
    """[N, 3, 256, 256] uint8 -> [N, 512, 16, 16] bfloat16, each channel standardised."""
    vgg = Lpips().to(pictures.device)
    chunks = []
    with torch.autocast(pictures.device.type, torch.bfloat16):
        for chunk in pictures.split(128):
            chunks.append(vgg.features(chunk.float() / 255)[-1].to(torch.bfloat16))
    features = torch.cat(chunks)
    sample = features[:: max(1, len(features) // 1000)].float()
    mean, std = sample.mean((0, 2, 3)), sample.std((0, 2, 3))
    return features.sub_(mean[:, None, None].bfloat16()).div_(std[:, None, None].bfloat16() + 1e-3)
