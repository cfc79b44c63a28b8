"""Trains a LoRA for the built-in model: python -m training.train_lora --photos DIR --style pencil --out FILE

The picture inside of the mask has the look of the style, its surroundings stay a photograph; the caption says nothing
of the look. The file is what diffusers saves as LoRA weights of a Flux pipeline, in float16.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import save_file
from torch import Tensor, nn

from instgenie.machine.files import complete_file
from training.fitting import Ground, adapter_arguments
from training.model import flow_loss
from training.styles import SOURCES

PREFIX = "transformer"  # of the keys of a file that diffusers reads
LAYERS = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj",
    "attn.to_add_out", "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "proj_mlp", "proj_out",
)  # fmt: skip
LEARNING_RATE = 2e-3


class LoraLinear(nn.Module):
    """A frozen linear layer plus a product of two narrow matrices, which begins as zero."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        like = {"device": layer.weight.device, "dtype": torch.float32}
        self.down = nn.Parameter(torch.empty(rank, layer.in_features, **like))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank, **like))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, rows: Tensor) -> Tensor:
        product = nn.functional.linear(nn.functional.linear(rows, self.down), self.up)
        return self.layer(rows) + product


def add_lora(transformer: FluxTransformer2DModel, rank: int) -> dict[str, LoraLinear]:
    """Put a LoRA on the attention and feed-forward layers of all blocks; returns them by the names of the layers."""
    added = {}
    for name in list(layer_names(transformer)):
        place, last = name.rsplit(".", 1)
        added[name] = LoraLinear(transformer.get_submodule(name), rank)
        setattr(transformer.get_submodule(place), last, added[name])
    return added


def layer_names(transformer: FluxTransformer2DModel) -> Iterator[str]:
    for name, module in transformer.named_modules():
        in_block = "blocks." in name and name.split(".", 2)[-1] in LAYERS
        if in_block and isinstance(module, nn.Linear):
            yield name


def save_lora(path: Path, layers: dict[str, LoraLinear]) -> None:
    tensors = {}
    for name, layer in layers.items():
        for matrix, values in (("lora_A", layer.down), ("lora_B", layer.up)):
            tensors[f"{PREFIX}.{name}.{matrix}.weight"] = values.detach().to("cpu", torch.float16).contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    with complete_file(path) as partial:
        save_file(tensors, partial, {"format": "pt"})


def main(arguments: Sequence[str] | None = None) -> tuple[float, float]:
    parser = adapter_arguments(__doc__, "the safetensors file to write")
    parser.add_argument("--style", required=True, choices=sorted(SOURCES))
    parser.add_argument("--rank", type=int, default=16)
    args = parser.parse_args(arguments)
    ground = Ground(args, SOURCES[args.style])
    layers = add_lora(ground.model.transformer, args.rank)
    weights = [weight for layer in layers.values() for weight in (layer.down, layer.up)]
    losses = ground.fit(weights, lambda inputs: flow_loss(ground.model, inputs), LEARNING_RATE)
    save_lora(args.out, layers)
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB")
    return losses


if __name__ == "__main__":
    main()
