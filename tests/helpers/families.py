"""Tiny random pipelines, saved as folders, of different shapes: Flux that blends (two) and fills, UNets that blend
(Stable Diffusion 2.1 and XL) and fill (1.5); and edits of random pictures to run through them.

Weights are drawn wide enough that every part of the network matters to the result: a network that answers zero would
hide every mistake.
"""

import copy
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderTiny,
    DDIMScheduler,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxFillPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    PNDMScheduler,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from helpers.names import FAMILIES
from instgenie.bench.stock import stock_pipeline
from instgenie.engine.loop import Engine
from instgenie.engine.prepare import prepare
from instgenie.jobs.job import Branch, Job
from instgenie.models.flux.model import FluxModel
from instgenie.models.model import Model
from instgenie.types import Edit

WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "blue", "cat", "dog", "flower", "on", "grass", "sky", "nothing"]
CLOSE = 1e-4  # of two runs that compute the same in another order, in float32


def save_folders(root: Path) -> dict[str, Path]:
    """A pipeline folder for each family."""
    save = {
        "blend": save_blend, "blend_guided": save_blend_guided, "fill": save_fill,
        "sd": save_sd, "sdxl": save_sdxl, "sd_fill": save_sd_fill,
    }  # fmt: skip
    for seed, family in enumerate(FAMILIES):
        torch.manual_seed(seed)
        save[family](root / family)
    return {family: root / family for family in FAMILIES}


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


def tiny_kl(shift_factor: float | None = 0.2) -> AutoencoderKL:
    return AutoencoderKL(
        latent_channels=4, block_out_channels=(8, 8), norm_num_groups=4, sample_size=32,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        use_quant_conv=False, use_post_quant_conv=False, scaling_factor=1.4, shift_factor=shift_factor,
    )  # fmt: skip


def save_pipeline(
    pipeline: type[FluxPipeline] | type[FluxFillPipeline],
    folder: Path,
    transformer: FluxTransformer2DModel,
    vae: AutoencoderKL | AutoencoderTiny,
    scheduler: FlowMatchEulerDiscreteScheduler,
    num_text: int,
) -> None:
    t5 = T5Config(vocab_size=len(WORDS), d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4)
    modules = {
        "transformer": transformer,
        "text_encoder": CLIPTextModel(tiny_clip(32)),
        "text_encoder_2": T5EncoderModel(t5),
    }
    for module in (vae, *modules.values()):
        widen(module)
    pipeline(
        **modules, vae=vae, scheduler=scheduler, tokenizer=tiny_tokenizer(9), tokenizer_2=tiny_tokenizer(num_text)
    ).save_pretrained(folder)


def tiny_clip(width: int, num_layers: int = 1, **fields: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(WORDS), hidden_size=width, intermediate_size=37, num_attention_heads=4,
        max_position_embeddings=9, pad_token_id=0, bos_token_id=1, eos_token_id=1, num_hidden_layers=num_layers,
        **fields,
    )  # fmt: skip


TRAINED: dict[str, Any] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
}


def save_sd(folder: Path) -> None:
    """As 2.1: predicts v, linear projections, heads of one width."""
    unet = UNet2DConditionModel(
        sample_size=16, block_out_channels=(16, 32, 32), layers_per_block=1, norm_num_groups=4, cross_attention_dim=32,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=(2, 4, 4), use_linear_projection=True, upcast_attention=True,
    )  # fmt: skip
    scheduler = DDIMScheduler(**TRAINED, clip_sample=False, set_alpha_to_one=False, prediction_type="v_prediction")
    save_unet(StableDiffusionPipeline, folder, unet, scheduler)


def save_sd_fill(folder: Path) -> None:
    """As the inpainting 1.5: nine channels, predicts noise, convolutions for projections, comes with a PNDM."""
    unet = UNet2DConditionModel(
        sample_size=16, in_channels=9, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4,
        cross_attention_dim=32, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=4,
    )  # fmt: skip
    scheduler = PNDMScheduler(**TRAINED, skip_prk_steps=True)
    save_unet(StableDiffusionInpaintPipeline, folder, unet, scheduler)


def save_unet(
    pipeline: type[StableDiffusionPipeline] | type[StableDiffusionInpaintPipeline],
    folder: Path,
    unet: UNet2DConditionModel,
    scheduler: DDIMScheduler | PNDMScheduler,
) -> None:
    vae, text_encoder = tiny_kl(shift_factor=None), CLIPTextModel(tiny_clip(32))
    for module in (unet, vae, text_encoder):
        widen(module)
    pipeline(
        unet=unet, vae=vae, scheduler=scheduler, text_encoder=text_encoder, tokenizer=tiny_tokenizer(9),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    ).save_pretrained(folder)  # fmt: skip


def save_sdxl(folder: Path) -> None:
    """Several blocks in a transformer, none at the first level; sizes and a pooled embedding; Euler."""
    unet = UNet2DConditionModel(
        sample_size=16, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4, cross_attention_dim=32 + 16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4), transformer_layers_per_block=(1, 2), use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=24 + 6 * 8,
    )  # fmt: skip
    vae, scheduler = tiny_kl(shift_factor=None), EulerDiscreteScheduler(**TRAINED, timestep_spacing="leading")
    first = CLIPTextModel(tiny_clip(32, num_layers=2))
    second = CLIPTextModelWithProjection(tiny_clip(16, num_layers=2, projection_dim=24))
    for module in (unet, vae, first, second):
        widen(module)
    StableDiffusionXLPipeline(
        unet=unet, vae=vae, scheduler=scheduler, text_encoder=first, text_encoder_2=second,
        tokenizer=tiny_tokenizer(9), tokenizer_2=tiny_tokenizer(9), add_watermarker=False,
    ).save_pretrained(folder)  # fmt: skip


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


MIX: list[dict[str, Any]] = [
    {"steps": 3, "share": 0.1, "seed": 1},
    {"steps": 5, "share": 0.9, "size": (64, 32), "prompt": "a blue dog on grass", "seed": 2, "true_guidance": 3.0},
    {"steps": 4, "share": 0.4, "picture_seed": 1, "guidance": 9.0},
    {"steps": 3, "share": 1.0, "size": (32, 32), "negative_prompt": "sky", "true_guidance": 1.5, "prompt": ""},
    {"steps": 6, "share": 0.3, "strength": 0.5, "seed": 3, "prompt": "flower"},
]


def mixed_edits() -> list[Edit]:
    return [make_edit(**fields) for fields in MIX]


def run(model: Model, given: Sequence[Edit | Job]) -> list[Tensor]:
    """Latents of edits or jobs that start together; jobs that are given take no step themselves."""
    jobs = [prepare(one, model) if isinstance(one, Edit) else replace(one) for one in given]
    engine = Engine(model)
    for job in jobs:
        engine.join(job)
    while engine.jobs:
        engine.step()
    return [job.latents for job in jobs]


def apart(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


@cache
def close(model: Model) -> float:
    """How far apart two runs may be that compute the same in another order.

    In float32 hardly at all. In bfloat16 every order rounds elsewhere, and a step feeds the next: how far that leads is
    measured, as the distance of runs of mixed edits from the truth, which is the same network in float32 over the same
    inputs. Two orders are each about as far from the truth, so they may be twice as far from each other.
    """
    if model.dtype == torch.float32:
        return CLOSE
    jobs = [prepare(edit, model) for edit in mixed_edits()]
    return 2 * max(map(apart, run(model, jobs), run(in_float32(model), [widened(job) for job in jobs])))


def in_float32(model: Model) -> Model:
    """The same network; times still enter it as bfloat16 has them, for rounding them is no matter of order."""
    network = copy.deepcopy(model.network).float()
    if isinstance(model, FluxModel):
        network.time_text_embed = RoundedTime(model.transformer.time_text_embed)
    name = next(field.name for field in fields(model) if getattr(model, field.name) is model.network)
    return replace(model, **{name: network}, dtype=torch.float32)


class RoundedTime(nn.Module):
    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        self.embed = embed

    def forward(self, timestep: Tensor, *others: Tensor) -> Tensor:
        rounded = timestep.bfloat16() / 1000 * 1000
        embedded: Tensor = self.embed(rounded, *(other.bfloat16() for other in others))
        return embedded.float()


def widened(job: Job) -> Job:
    branches = [Branch(branch.text.float(), branch.pooled.float(), branch.rotary) for branch in job.branches]
    return replace(job, branches=tuple(branches))


def far(model: Model, times: int = 100) -> float:
    """How far apart runs must at least be that compute different things. bfloat16 may drown small differences."""
    return times * CLOSE if model.dtype == torch.float32 else 0.0


def quiet_pipeline(model: Model) -> DiffusionPipeline:
    pipeline = stock_pipeline(model)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def stock_arguments(edit: Edit) -> dict[str, Any]:
    """Of all stock pipelines, up to the final latents."""
    height, width = edit.picture.shape[:2]
    return {
        "prompt": edit.prompt,
        "image": Image.fromarray(edit.picture),
        "mask_image": Image.fromarray(edit.mask.astype(np.uint8) * 255),
        "height": height,
        "width": width,
        "num_inference_steps": edit.steps,
        "guidance_scale": edit.guidance,
        "strength": 1.0,
        "output_type": "latent",
    }
