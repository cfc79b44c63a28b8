"""Inputs of the transformer from examples: pictures are encoded, noised at two times each, and told who sees whom.

Both noisy versions of a picture are in one batch. In some pairs they share their noise, and the later step (the one
with less noise) reuses the keys and values that the earlier one computes for unmasked tokens.
"""

from collections import deque
from dataclasses import dataclass

import torch
from diffusers import AutoencoderTiny
from torch import Tensor

from training.examples import Examples, ExampleSource
from training.latents import condition, encode, image_ids, token_masks
from training.pipeline import NUM_TEXT_TOKENS

SIZES = ((256, 256), (224, 288), (288, 224))  # square, and about 4:3 both ways
SIZE_SHARES = (0.7, 0.15, 0.15)
MAX_TOKENS = 256
ISOLATED_SHARE = 0.3  # examples whose unmasked tokens see unmasked tokens only, as cached activations do
REUSING_SHARE = 0.25  # pairs whose later step reuses keys and values of the earlier one
LONGEST_REUSE = 0.55  # of the schedule, between the step that computes keys and values and the one that reuses them
TIME_MEAN = 0.3  # of the logit of the time: structure and colours of a mask are settled in the noisier half
NOISY_SHARE, NOISY_FROM = 0.12, 0.85  # of the times are drawn evenly from here to 1 instead
NUM_USES = 3  # of every encoded batch
NUM_KEPT = 8  # encoded batches that wait for another use
STOCK_SHARE = 0.4  # examples conditioned as FluxFillPipeline does it: greyed latents for unmasked tokens too


@dataclass
class Inputs:
    """One batch of inputs of the transformer; example i and example i + B/2 are noisy versions of one picture."""

    clean: Tensor  # [B, N, 4C]
    noisy: Tensor  # [B, N, 4C]
    noise: Tensor  # [B, N, 4C]
    times: Tensor  # [B]
    known: Tensor  # [B, N, 4C + 256]
    masked: Tensor  # [B, N] bool
    attention: Tensor  # [B, 1, T + N, T + N] bool
    source: Tensor  # [B] whose keys and values are reused
    reused: Tensor  # [B, T + N] bool: tokens whose keys and values come from there
    texts: Tensor  # [B] caption rows
    places: Tensor  # [N, 3]
    examples: Examples  # B/2 pictures
    num_tokens: int  # without padding


@dataclass
class Encoded:
    """A batch of pictures as latents, before noise."""

    examples: Examples
    clean: Tensor  # [B/2, N, 4C]
    known: Tensor  # [B/2, N, 4C + 256]
    masked: Tensor  # [B/2, N] bool
    places: Tensor  # [N, 3]
    num_tokens: int  # without padding


class Feed:
    """Turns examples into inputs of the transformer.

    Drawing and encoding pictures costs a good part of a step, so every encoded batch is used more than once, with other
    noise at other times, and several steps apart.
    """

    def __init__(
        self, source: ExampleSource, vae: AutoencoderTiny, batch: int, num_text: int = NUM_TEXT_TOKENS
    ) -> None:
        self.source, self.vae, self.num, self.generator = source, vae, batch // 2, source.generator
        self.num_text = num_text
        self.shares = torch.tensor(SIZE_SHARES)
        self.kept = deque[tuple[Encoded, int]]()  # with the number of their uses

    def next(self) -> Inputs:
        encoded, num_uses = self.kept.popleft() if len(self.kept) > NUM_KEPT else (self._drawn(), 0)
        if num_uses + 1 < NUM_USES:
            self.kept.append((encoded, num_uses + 1))
        return self.noised(encoded)

    def _drawn(self) -> Encoded:
        height, width = SIZES[int(torch.multinomial(self.shares, 1))]
        return self.encode(self.source.draw(self.num, height, width))

    @torch.no_grad()
    def encode(self, examples: Examples) -> Encoded:
        num, height, width = examples.masks.shape
        greyed = examples.pictures * ~examples.masks[:, None]
        clean, greyed = encode(self.vae, torch.cat([examples.pictures, greyed])).chunk(2)
        masked = token_masks(examples.masks)
        stock = self._chance(num, STOCK_SHARE)
        known = condition(clean, greyed, examples.masks, masked | stock[:, None])
        places = pad_tokens(image_ids(height, width, clean.device)[None])[0]
        return Encoded(examples, pad_tokens(clean), pad_tokens(known), pad_tokens(masked), places, clean.shape[1])

    @torch.no_grad()
    def noised(self, encoded: Encoded) -> Inputs:
        num, device = len(encoded.clean), encoded.clean.device
        reusing = self._chance(num, REUSING_SHARE)
        first, second = (torch.randn(encoded.clean.shape, generator=self.generator, device=device) for _ in range(2))
        noise = torch.cat([first, torch.where(reusing[:, None, None], first, second)])
        times = torch.cat(self._times(reusing))
        clean, known, masked = (torch.cat([x, x]) for x in (encoded.clean, encoded.known, encoded.masked))
        isolated = self._chance(2 * num, ISOLATED_SHARE) & ~torch.cat([reusing, reusing])
        rows = torch.arange(num, device=device)
        return Inputs(
            clean=clean,
            noisy=torch.lerp(clean, noise, times[:, None, None]),
            noise=noise,
            times=times,
            known=known,
            masked=masked,
            attention=attention_mask(masked, isolated, encoded.num_tokens, self.num_text),
            source=torch.cat([rows, rows]),
            reused=reused_tokens(masked, torch.cat([torch.zeros_like(reusing), reusing]), self.num_text),
            texts=torch.cat([encoded.examples.texts] * 2),
            places=encoded.places,
            examples=encoded.examples,
            num_tokens=encoded.num_tokens,
        )

    def _times(self, reusing: Tensor) -> tuple[Tensor, Tensor]:
        """Two times per picture, sigmoid of a normal or near pure noise; a reusing pair has the noisier one first.

        The transformer casts its timestep to bfloat16: these survive the cast.
        """
        shape, device = (2, len(reusing)), reusing.device
        spread = torch.randn(shape, generator=self.generator, device=device)
        near_noise = 1 - (1 - NOISY_FROM) * torch.rand(shape, generator=self.generator, device=device)
        is_noisy = torch.rand(shape, generator=self.generator, device=device) < NOISY_SHARE
        one, two = torch.where(is_noisy, near_noise, torch.sigmoid(spread + TIME_MEAN))
        later = torch.minimum(one, two)
        reach = torch.rand(len(reusing), generator=self.generator, device=device) * LONGEST_REUSE
        earlier = torch.minimum(later + reach, torch.ones_like(later))
        first, second = torch.where(reusing, earlier, one), torch.where(reusing, later, two)
        return first.to(torch.bfloat16).float(), second.to(torch.bfloat16).float()

    def _chance(self, num: int, share: float) -> Tensor:
        return torch.rand(num, generator=self.generator, device=self.generator.device) < share


def attention_mask(masked: Tensor, isolated: Tensor, num_tokens: int, num_text: int = NUM_TEXT_TOKENS) -> Tensor:
    """[B, 1, T + N, T + N]: in an isolated example an unmasked token sees unmasked tokens only; padding is unseen."""
    unmasked = torch.cat([masked.new_zeros(len(masked), num_text), ~masked], 1)
    hidden = isolated[:, None, None] & unmasked[:, :, None] & ~unmasked[:, None, :]
    length = num_text + num_tokens
    hidden[:, :length, length:] = True
    return ~hidden[:, None]


def reused_tokens(masked: Tensor, reusing: Tensor, num_text: int = NUM_TEXT_TOKENS) -> Tensor:
    """[B, T + N]: the unmasked image tokens of reusing examples."""
    text = masked.new_zeros(len(masked), num_text)
    return torch.cat([text, ~masked & reusing[:, None]], 1)


def pad_tokens(x: Tensor) -> Tensor:
    """[B, N, ...] -> [B, MAX_TOKENS, ...]: pictures of every shape share one compiled graph."""
    return torch.nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, MAX_TOKENS - x.shape[1]))
