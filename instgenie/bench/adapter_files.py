"""LoRAs and ControlNets with random weights that fit a model, as files: their time is that of trained ones."""

import math
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from diffusers import ControlNetModel, FluxControlNetModel
from safetensors.torch import save_file
from torch import Tensor, nn

from instgenie.errors import ModelError
from instgenie.models.flux.model import is_flux
from instgenie.models.model import Model

UNET_FACTS = (
    "down_block_types", "block_out_channels", "layers_per_block", "norm_num_groups", "cross_attention_dim",
    "attention_head_dim", "transformer_layers_per_block", "use_linear_projection", "upcast_attention",
    "addition_embed_type", "addition_time_embed_dim", "projection_class_embeddings_input_dim",
)  # fmt: skip
FLUX_FACTS = (
    "attention_head_dim", "num_attention_heads", "joint_attention_dim", "pooled_projection_dim", "guidance_embeds",
    "axes_dims_rope",
)  # fmt: skip
HINT_CHANNELS = (16, 32, 96, 256)
FLUX_DEPTH = 4  # double blocks of a Flux for each of its ControlNet


def write_loras(folder: Path, model: Model, rank: int, num: int) -> list[Path]:
    """LoRAs for the linear layers of all blocks, in the dtype of the model."""
    tensors: dict[str, Tensor] = {}
    for name, layer in model.network.named_modules():
        if isinstance(layer, nn.Linear) and "blocks" in name:
            for matrix, shape in (("lora_A", (rank, layer.in_features)), ("lora_B", (layer.out_features, rank))):
                values = torch.full(shape, 1e-3, dtype=model.dtype)
                tensors[f"{model.network_name}.{name}.{matrix}.weight"] = values
    paths = [folder / f"lora-{number}.safetensors" for number in range(num)]
    save_file(tensors, paths[0])
    for path in paths[1:]:
        shutil.copyfile(paths[0], path)
    return paths


def write_controlnets(folder: Path, model: Model, num: int) -> list[Path]:
    """Folders whose weights are one file with several names: each is loaded as a ControlNet of its own."""
    folders = [folder / f"controlnet-{number}" for number in range(num)]
    make_controlnet(model).to(model.dtype).save_pretrained(folders[0])
    for other in folders[1:]:
        other.mkdir()
        for path in folders[0].iterdir():
            os.link(path, other / path.name)
    return folders


def make_controlnet(model: Model) -> Any:  # one of diffusers' modules
    config: Any = model.network.config
    with torch.device(model.device), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of a class that diffusers itself uses
        if is_flux(model):
            facts = {name: config[name] for name in FLUX_FACTS} | {"in_channels": 4 * model.latent_channels}
            depth = max(config["num_layers"] // FLUX_DEPTH, 1)
            return FluxControlNetModel(**facts, num_layers=depth, num_single_layers=0)
        if model.family == "unet":
            facts = {name: config[name] for name in UNET_FACTS} | {"in_channels": model.latent_channels}
            shrinking = HINT_CHANNELS[: round(math.log2(model.patch)) + 1]  # each but the first halves the image
            return ControlNetModel(**facts, conditioning_embedding_out_channels=shrinking)
    raise ModelError(f"models of the family {model.family} take no ControlNets")
