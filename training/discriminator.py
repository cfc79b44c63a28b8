"""A patch discriminator: rates every patch of a picture as photographed or decoded."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

WIDTHS = (64, 128, 256)


class Discriminator(nn.Module):
    """Strided convolutions with spectral norm; one logit per patch of about 46 pixels."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for width in WIDTHS:
            layers += [spectral_norm(nn.Conv2d(before, width, 4, stride=2, padding=1)), nn.LeakyReLU(0.2)]
            before = width
        layers += [spectral_norm(nn.Conv2d(before, before, 3, padding=1)), nn.LeakyReLU(0.2)]
        self.layers = nn.Sequential(*layers, spectral_norm(nn.Conv2d(before, 1, 3, padding=1)))

    def forward(self, pictures: Tensor) -> Tensor:  # [B, 3, height, width] -> [B, 1, height / 8, width / 8]
        logits: Tensor = self.layers(pictures)
        return logits


def discriminator_loss(discriminator: Discriminator, real: Tensor, decoded: Tensor) -> Tensor:
    """Hinge loss: logits of photographs above 1, of decoded pictures below -1."""
    return F.relu(1 - discriminator(real)).mean() + F.relu(1 + discriminator(decoded.detach())).mean()


def balance(reconstruction: Tensor, adversarial: Tensor, last: Tensor) -> Tensor:
    """The weight that gives both losses gradients of one size at the decoder's last layer, at most 1."""
    [strong] = torch.autograd.grad(reconstruction, last, retain_graph=True)
    [weak] = torch.autograd.grad(adversarial, last, retain_graph=True)
    return (strong.norm() / (weak.norm() + 1e-4)).clamp(max=1.0).detach()
