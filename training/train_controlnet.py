"""Trains a ControlNet for the built-in model: python -m training.train_controlnet --photos DIR --out DIR

Its image shows the edges of the picture that is to be painted. It is one of diffusers' FluxControlNetModels with one
double block, which begins as a copy of the model's first, and is saved in float16.
"""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderTiny, FluxControlNetModel, FluxTransformer2DModel
from torch import Tensor, nn

from training.edges import edge_images
from training.feed import Inputs, pad_tokens
from training.fitting import Ground, adapter_arguments
from training.latents import encode
from training.model import Model, flow_loss

COPIED = ("time_text_embed", "context_embedder", "transformer_blocks")
SHARED = ("attention_head_dim", "num_attention_heads", "joint_attention_dim", "pooled_projection_dim", "axes_dims_rope")
LEARNING_RATE = 6e-4


def build_controlnet(transformer: FluxTransformer2DModel) -> FluxControlNetModel:
    """One double block. It has no embedding of guidance, which the model itself is told."""
    channels = transformer.config.out_channels
    fields: dict[str, Any] = {name: transformer.config[name] for name in SHARED}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of a class that diffusers itself uses
        net = FluxControlNetModel(in_channels=channels, num_layers=1, num_single_layers=0, **fields)
    own = net.state_dict()
    known = {key: value for key, value in transformer.state_dict().items() if key.split(".")[0] in COPIED}
    known = {key: value for key, value in known.items() if key in own}
    known["x_embedder.weight"] = transformer.x_embedder.weight[:, :channels]  # the noisy latents come first
    known["x_embedder.bias"] = transformer.x_embedder.bias
    net.load_state_dict(own | known)
    nn.init.normal_(net.controlnet_x_embedder.weight, std=0.02)  # the last layer is zero: one is enough
    return net.requires_grad_(True).train()


class Guided:
    """The flow-matching loss of a frozen model with the residuals of a ControlNet."""

    def __init__(self, model: Model, net: FluxControlNetModel, vae: AutoencoderTiny) -> None:
        self.model, self.net, self.vae = model, net, vae

    def loss(self, inputs: Inputs) -> Tensor:
        return flow_loss(self.model, inputs, self.residuals(inputs))

    def residuals(self, inputs: Inputs) -> Tensor:
        """[B, N, width]; padding has none, and unmasked tokens have none in half of the examples, as in edits that read
        these tokens from a cache."""
        num = inputs.num_tokens
        sequence, pooled = self.model.read(inputs.texts)
        (behind_double,), _ = self.net(
            hidden_states=inputs.noisy[:, :num],
            controlnet_cond=self.hints(inputs),
            encoder_hidden_states=sequence,
            pooled_projections=pooled,
            timestep=inputs.times,
            img_ids=inputs.places[:num],
            txt_ids=torch.zeros(sequence.shape[1], 3, device=sequence.device),
            return_dict=False,
        )
        masked_only = torch.arange(len(behind_double), device=sequence.device) // 2 % 2 == 0
        kept = inputs.masked[:, :num] | ~masked_only[:, None]
        return pad_tokens(behind_double * kept[..., None])

    @torch.no_grad()
    def hints(self, inputs: Inputs) -> Tensor:
        """The edges of the pictures as the autoencoder encodes them [B, N, 4C]. Every second picture is enlarged: most
        photographs are larger than the model's size."""
        pictures = inputs.examples.pictures
        edges = torch.empty_like(pictures)
        for first in range(min(2, len(pictures))):
            edges[first::2] = edge_images(pictures[first::2], enlarged=1 + first)
        return encode(self.vae, edges).repeat(2, 1, 1)


def save_controlnet(folder: Path, net: FluxControlNetModel) -> None:
    net.to("cpu", torch.float16).save_pretrained(folder)
    config = folder / "config.json"
    facts = {key: value for key, value in json.loads(config.read_text()).items() if key != "_name_or_path"}
    config.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")


def main(arguments: Sequence[str] | None = None) -> tuple[float, float]:
    args = adapter_arguments(__doc__, "the folder to write").parse_args(arguments)
    ground = Ground(args)
    net = build_controlnet(ground.model.transformer).to(args.device)
    losses = ground.fit(list(net.parameters()), Guided(ground.model, net, ground.vae).loss, LEARNING_RATE)
    save_controlnet(args.out, net)
    size = sum(path.stat().st_size for path in args.out.iterdir())
    print(f"{args.out}: {size / 1e6:.1f} MB")
    return losses


if __name__ == "__main__":
    main()
