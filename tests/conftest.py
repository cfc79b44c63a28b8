"""Tiny random pipelines, saved as folders: two that blend and one that fills, of different shapes.

Weights are drawn wide enough that every part of the network matters to the result: a network that answers zero would
hide every mistake.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderTiny,
    FlowMatchEulerDiscreteScheduler,
    FluxFillPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from instgenie.models.load import Model, load
from instgenie.types import Edit

WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "blue", "cat", "dog", "flower", "on", "grass", "sky", "nothing"]
FAMILIES = ("blend", "blend_guided", "fill")


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pipelines")
    save = {"blend": save_blend, "blend_guided": save_blend_guided, "fill": save_fill}
    for seed, family in enumerate(FAMILIES):
        torch.manual_seed(seed)
        save[family](root / family)
    return {family: root / family for family in FAMILIES}


@pytest.fixture(scope="session")
def huge_folder(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline whose transformer file says, and is, 200 GB long; it is sparse and takes no room."""
    folder = tmp_path_factory.mktemp("huge") / "pipeline"
    shutil.copytree(folders["fill"], folder)
    num_values = 100_000_000_000
    header = {"weight": {"dtype": "F16", "shape": [num_values], "data_offsets": [0, 2 * num_values]}}
    encoded = json.dumps(header).encode()
    with open(folder / "transformer" / "diffusion_pytorch_model.safetensors", "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + 2 * num_values)
    return folder


@pytest.fixture(scope="session")
def models(folders: dict[str, Path]) -> dict[str, Model]:
    names = {family: str(folder) for family, folder in folders.items()} | {"builtin": "builtin"}
    return {family: load(name, device="cpu") for family, name in names.items()}


@pytest.fixture(params=[*FAMILIES, "builtin"])
def model(request: pytest.FixtureRequest, models: dict[str, Model]) -> Model:
    return models[request.param]


def save_blend(folder: Path) -> None:
    transformer = FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), guidance_embeds=False,
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    save_pipeline(FluxPipeline, folder, transformer, tiny_kl(), scheduler, num_text=5)


def save_blend_guided(folder: Path) -> None:
    transformer = FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=24, num_attention_heads=3,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 8, 12), guidance_embeds=True,
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    save_pipeline(FluxPipeline, folder, transformer, tiny_kl(), scheduler, num_text=7)


def save_fill(folder: Path) -> None:
    transformer = FluxTransformer2DModel(
        in_channels=2 * 20 + 4 * 16, out_channels=20, num_layers=2, num_single_layers=2, attention_head_dim=16,
        num_attention_heads=4, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 6, 6),
        guidance_embeds=True,
    )  # fmt: skip
    vae = AutoencoderTiny(
        latent_channels=5, encoder_block_out_channels=(8, 8, 8), decoder_block_out_channels=(8, 8, 8),
        num_encoder_blocks=(1, 1, 1), num_decoder_blocks=(1, 1, 1), scaling_factor=1.3, shift_factor=0.1,
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(shift=2.0)
    save_pipeline(FluxFillPipeline, folder, transformer, vae, scheduler, num_text=6)


def tiny_kl() -> AutoencoderKL:
    return AutoencoderKL(
        latent_channels=4, block_out_channels=(8, 8), norm_num_groups=4, sample_size=32,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        use_quant_conv=False, use_post_quant_conv=False, scaling_factor=1.4, shift_factor=0.2,
    )  # fmt: skip


def save_pipeline(
    pipeline: type[FluxPipeline] | type[FluxFillPipeline],
    folder: Path,
    transformer: FluxTransformer2DModel,
    vae: AutoencoderKL | AutoencoderTiny,
    scheduler: FlowMatchEulerDiscreteScheduler,
    num_text: int,
) -> None:
    clip = CLIPTextConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=37, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=9, pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    t5 = T5Config(vocab_size=len(WORDS), d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4)
    modules = {"transformer": transformer, "text_encoder": CLIPTextModel(clip), "text_encoder_2": T5EncoderModel(t5)}
    for module in (vae, *modules.values()):
        widen(module)
    pipeline(
        **modules, vae=vae, scheduler=scheduler, tokenizer=tiny_tokenizer(9), tokenizer_2=tiny_tokenizer(num_text)
    ).save_pretrained(folder)


def widen(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)


def tiny_tokenizer(num_text: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=num_text
    )


def make_edit(
    prompt: str = "a red cat",
    size: tuple[int, int] = (32, 48),
    share: float = 0.4,
    picture_seed: int = 0,
    **fields: Any,
) -> Edit:
    """An edit of a random picture already of the working size, a box of about the share masked in a corner."""
    height, width = size
    picture = np.random.default_rng(picture_seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    mask = np.zeros(size, dtype=np.bool_)
    mask[: round(height * share**0.5), width - round(width * share**0.5) :] = True
    return Edit(picture, mask, prompt, **({"size": size, "steps": 4} | fields))
