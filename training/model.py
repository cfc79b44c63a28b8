"""The model in training: the transformer with its text encoders over a table of captions, and its flow loss."""

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn

from training.examples import Captions
from training.feed import Inputs
from training.pipeline import Encoders, Tokenizers, token_ids

UNMASKED_WEIGHT = 0.3


class Model(nn.Module):
    """The transformer with its text encoders, over rows of a caption table."""

    def __init__(
        self, transformer: FluxTransformer2DModel, encoders: Encoders, tokenizers: Tokenizers, captions: Captions
    ) -> None:
        super().__init__()
        self.transformer, self.clip, self.t5 = transformer, *encoders
        for name, tokenizer in zip(("clip_ids", "t5_ids"), tokenizers, strict=True):
            self.register_buffer(name, token_ids(tokenizer, captions.texts), persistent=False)

    def read(self, texts: Tensor) -> tuple[Tensor, Tensor]:
        """What the two text encoders say of captions: [B, T, channels] and [B, channels].

        The two noisy versions of a picture have one caption, which is read once.
        """
        texts = texts[: len(texts) // 2]
        sequence, pooled = self.t5(self.t5_ids[texts]).last_hidden_state, self.clip(self.clip_ids[texts]).pooler_output
        return torch.cat([sequence] * 2), torch.cat([pooled] * 2)

    def forward(self, inputs: Inputs, texts: Tensor, guidance: Tensor, residuals: Tensor | None = None) -> Tensor:
        """The velocity; residuals [B, N, width] of a ControlNet are added behind the double blocks."""
        sequence, pooled = self.read(texts)
        return self.transformer(
            hidden_states=torch.cat([inputs.noisy, inputs.known], -1),
            encoder_hidden_states=sequence,
            pooled_projections=pooled,
            timestep=inputs.times,
            guidance=guidance,
            img_ids=inputs.places,
            txt_ids=torch.zeros(sequence.shape[1], 3, device=texts.device),
            controlnet_block_samples=None if residuals is None else [residuals],
            joint_attention_kwargs={
                "attention_mask": inputs.attention,
                "source": inputs.source,
                "reused": inputs.reused,
            },
            return_dict=False,
        )[0]


def flow_loss(model: Model, inputs: Inputs, residuals: Tensor | None = None) -> Tensor:
    velocity = model(inputs, inputs.texts, torch.ones_like(inputs.times), residuals)
    return weighted_error(velocity, inputs.noise - inputs.clean, inputs)


def weighted_error(prediction: Tensor, target: Tensor, inputs: Inputs) -> Tensor:
    weight = torch.where(inputs.masked, 1.0, UNMASKED_WEIGHT)
    weight = weight.masked_fill(inputs.reused[:, -weight.shape[1] :], 0)  # nobody reads their outputs
    weight[:, inputs.num_tokens :] = 0
    return ((prediction.float() - target).square().mean(-1) * weight).sum() / weight.sum()
