"""Tiny random pipelines of every supported shape, saved as folders: Flux models that blend (two), fill, and see the
picture, UNets that blend (Stable Diffusion 2.1 and XL) and fill (1.5), Stable Diffusion 3 with a second attention and
without, FLUX.2 klein, Qwen-Image, and Z-Image.

Weights are drawn wide enough that every part of the network matters to the result: a network that answers zero would
hide every mistake.
"""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderTiny,
    DDIMScheduler,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxFillPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    PNDMScheduler,
    QwenImageEditPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from helpers.names import TINY
from instgenie.models.flux.model import FluxModel
from instgenie.models.qwen.vision import PICTURE

WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "blue", "cat", "dog", "flower", "on", "grass", "sky", "nothing"]
TRAINED: dict[str, Any] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
}


def save_folders(root: Path) -> dict[str, Path]:
    """Save each tiny pipeline as a folder; the function that makes it has its name."""
    folders = {name: root / name for name in TINY}
    for seed, (name, folder) in enumerate(folders.items()):
        torch.manual_seed(seed)
        globals()[name]().save_pretrained(folder)
    return folders


def shorten(model: FluxModel) -> FluxModel:
    """The model with two blocks of each kind: the others have the same code and shapes."""
    network = copy.copy(model.transformer)
    network._modules = dict(network._modules)
    for name in ("transformer_blocks", "single_transformer_blocks"):
        network._modules[name] = model.transformer.get_submodule(name)[:2]
    return replace(model, transformer=network)


def blend() -> DiffusionPipeline:
    transformer = FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), guidance_embeds=False,
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    return make_flux(FluxPipeline, transformer, tiny_kl(), scheduler, num_text=5)


def blend_guided() -> DiffusionPipeline:
    transformer = FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=24, num_attention_heads=3,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 8, 12), guidance_embeds=True,
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return make_flux(FluxPipeline, transformer, tiny_kl(), scheduler, num_text=7)


def kontext(vae: AutoencoderKL | AutoencoderTiny | None = None) -> DiffusionPipeline:
    """Sees the picture as further tokens."""
    transformer = FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 6, 6), guidance_embeds=True,
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return make_flux(FluxKontextPipeline, transformer, vae or tiny_kl(), scheduler, num_text=6)


def fill() -> DiffusionPipeline:
    transformer = FluxTransformer2DModel(
        in_channels=2 * 20 + 4 * 16, out_channels=20, num_layers=2, num_single_layers=2, attention_head_dim=16,
        num_attention_heads=4, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 6, 6),
        guidance_embeds=True,
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(shift=2.0)
    return make_flux(FluxFillPipeline, transformer, tiny_autoencoder(5, 3), scheduler, num_text=6)


def tiny_autoencoder(num_latent: int, num_levels: int) -> AutoencoderTiny:
    """Each level but the first halves the picture."""
    widths, ones = (8,) * num_levels, (1,) * num_levels
    return AutoencoderTiny(
        latent_channels=num_latent, encoder_block_out_channels=widths, decoder_block_out_channels=widths,
        num_encoder_blocks=ones, num_decoder_blocks=ones, scaling_factor=1.3, shift_factor=0.1,
    )  # fmt: skip


def make_flux(
    pipeline: type[FluxPipeline] | type[FluxFillPipeline] | type[FluxKontextPipeline],
    transformer: FluxTransformer2DModel,
    vae: AutoencoderKL | AutoencoderTiny,
    scheduler: FlowMatchEulerDiscreteScheduler,
    num_text: int,
) -> DiffusionPipeline:
    t5 = T5Config(vocab_size=len(WORDS), d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4)
    modules = {
        "transformer": transformer,
        "text_encoder": CLIPTextModel(tiny_clip(32)),
        "text_encoder_2": T5EncoderModel(t5),
    }
    widen(vae, *modules.values())
    tokenizers = {"tokenizer": tiny_tokenizer(9), "tokenizer_2": tiny_tokenizer(num_text)}
    return pipeline(**modules, **tokenizers, vae=vae, scheduler=scheduler)


def sd3() -> DiffusionPipeline:
    """Like 3.5 medium: heads are normalised, and the first block has a second attention."""
    transformer = SD3Transformer2DModel(
        sample_size=16, num_layers=3, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=48,
        caption_projection_dim=32, pooled_projection_dim=24, pos_embed_max_size=25, dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )  # fmt: skip
    return make_sd3(transformer, FlowMatchEulerDiscreteScheduler(shift=3.0), num_text=11)


def sd3_plain() -> DiffusionPipeline:
    """Like 3.0: heads are not normalised, and no block has a second attention."""
    transformer = SD3Transformer2DModel(
        sample_size=16, num_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=48,
        caption_projection_dim=32, pooled_projection_dim=24, pos_embed_max_size=24,
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return make_sd3(transformer, scheduler, num_text=6)


def make_sd3(
    transformer: SD3Transformer2DModel, scheduler: FlowMatchEulerDiscreteScheduler, num_text: int
) -> DiffusionPipeline:
    t5 = T5Config(vocab_size=len(WORDS), d_model=48, d_kv=8, d_ff=37, num_layers=1, num_heads=4)
    modules = {
        "transformer": transformer,
        "text_encoder": CLIPTextModelWithProjection(tiny_clip(16, num_layers=2, projection_dim=8)),
        "text_encoder_2": CLIPTextModelWithProjection(tiny_clip(24, num_layers=2, projection_dim=16)),
        "text_encoder_3": T5EncoderModel(t5),
        "vae": tiny_kl(num_latent=16),  # the inpainting pipeline takes no other number
    }
    widen(*modules.values())
    tokenizers = {"tokenizer": tiny_tokenizer(9), "tokenizer_2": tiny_tokenizer(9)}
    tokenizers |= {"tokenizer_3": tiny_tokenizer(num_text)}
    return StableDiffusion3Pipeline(**modules, **tokenizers, scheduler=scheduler)


def klein(is_distilled: bool = False) -> DiffusionPipeline:
    """Sees the picture and references as further tokens; three layers of a language model embed the prompt."""
    transformer = Flux2Transformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=3 * 16, timestep_guidance_channels=32, mlp_ratio=2.5, axes_dims_rope=(4, 4, 6, 2),
        guidance_embeds=False,
    )  # fmt: skip
    vae = AutoencoderKLFlux2(
        latent_channels=4, block_out_channels=(8, 8), norm_num_groups=4, sample_size=32,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    encoder = Qwen3Config(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=24, num_hidden_layers=28, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=32, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    modules = {"transformer": transformer, "vae": vae, "text_encoder": Qwen3ForCausalLM(encoder)}
    widen(*modules.values())
    sharpen(transformer)
    vae.bn.running_mean.normal_(std=0.3)
    vae.bn.running_var.uniform_(0.5, 2)
    tokenizer = tiny_tokenizer(9)
    tokenizer.chat_template = "on {{ messages[0]['content'] }} {% if add_generation_prompt %}sky{% endif %}"
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return Flux2KleinPipeline(**modules, tokenizer=tokenizer, scheduler=scheduler, is_distilled=is_distilled)


def qwen() -> DiffusionPipeline:
    """Texts of many lengths; guided predictions keep their length; a picture is a film of one frame."""
    return QwenImagePipeline(**qwen_parts())


class PublishedEditPipeline(QwenImageEditPipeline):
    """Saves a folder like that of the published models, whose processor can be made with torchvision alone."""

    published: type[DiffusionPipeline] = QwenImageEditPipeline

    def save_pretrained(self, folder: Path, **options: Any) -> None:
        super().save_pretrained(folder, **options)
        Qwen2VLImageProcessorPil(patch_size=2, min_pixels=64, max_pixels=512).save_pretrained(folder / "processor")
        index = folder / "model_index.json"
        known = json.loads(index.read_text()) | {"processor": ["transformers", "Qwen2VLProcessor"]}
        index.write_text(json.dumps(known | {"_class_name": self.published.__name__}))


def qwen_edit() -> DiffusionPipeline:
    """The network sees the picture, and a language model reads it with the prompt."""
    return PublishedEditPipeline(**qwen_parts(), processor=None)


def qwen_parts(zero_cond_t: bool = False) -> dict[str, Any]:
    transformer = QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=3, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, axes_dims_rope=(4, 6, 6), zero_cond_t=zero_cond_t,
    )  # fmt: skip
    vae = AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[False],
        latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.5, 0.7, 1.0, 2.0],
    )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = {
        "vocab_size": len(WORDS) + 2, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": rope,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 16, "patch_size": 2,
        "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=len(WORDS))
    encoder = Qwen2_5_VLForConditionalGeneration(config)
    tokenizer = tiny_tokenizer(1024)
    tokenizer.add_special_tokens({"additional_special_tokens": [PICTURE, "<|video_pad|>"]})
    modules = {"transformer": transformer, "vae": vae, "text_encoder": encoder}
    widen(*modules.values())
    sharpen(transformer)
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192
    )
    return modules | {"tokenizer": tokenizer, "scheduler": scheduler}


def zimage() -> DiffusionPipeline:
    """Pictures of most sizes miss a few tokens to a multiple, and long prompts have more tokens than one multiple."""
    transformer = ZImageTransformer2DModel(
        in_channels=4, dim=48, n_layers=2, n_refiner_layers=1, n_heads=3, n_kv_heads=3, cap_feat_dim=24,
        axes_dims=[4, 6, 6], axes_lens=[256, 24, 32],
    )  # fmt: skip
    qwen = Qwen3Config(
        vocab_size=len(WORDS), hidden_size=24, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    vae, text_encoder = tiny_kl(num_levels=3), Qwen3Model(qwen)
    widen(transformer, vae, text_encoder)
    tokenizer = tiny_tokenizer(40)
    tokenizer.chat_template = "red {{ messages[0].content }} grass"
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0), vae=vae, text_encoder=text_encoder, tokenizer=tokenizer,
        transformer=transformer,
    )  # fmt: skip


def sd() -> DiffusionPipeline:
    """Like 2.1: predicts v, linear projections, heads of one width."""
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(16, 32, 32), layers_per_block=1, norm_num_groups=4, cross_attention_dim=32,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=(2, 4, 4), use_linear_projection=True, upcast_attention=True,
    )  # fmt: skip
    scheduler = DDIMScheduler(**TRAINED, clip_sample=False, set_alpha_to_one=False, prediction_type="v_prediction")
    return make_sd(StableDiffusionPipeline, unet, scheduler)


def sd_fill() -> DiffusionPipeline:
    """Like the inpainting 1.5: nine channels, predicts noise, convolutions for projections, comes with a PNDM."""
    unet = UNet2DConditionModel(
        sample_size=8, in_channels=9, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4,
        cross_attention_dim=32, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=4,
    )  # fmt: skip
    scheduler = PNDMScheduler(**TRAINED, skip_prk_steps=True)
    return make_sd(StableDiffusionInpaintPipeline, unet, scheduler)


def make_sd(
    pipeline: type[StableDiffusionPipeline] | type[StableDiffusionInpaintPipeline],
    unet: UNet2DConditionModel,
    scheduler: DDIMScheduler | PNDMScheduler,
) -> DiffusionPipeline:
    vae, text_encoder = tiny_kl(shift_factor=None, num_levels=3), CLIPTextModel(tiny_clip(32))
    widen(unet, vae, text_encoder)
    return pipeline(
        unet=unet, vae=vae, scheduler=scheduler, text_encoder=text_encoder, tokenizer=tiny_tokenizer(9),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def sdxl() -> DiffusionPipeline:
    """Several blocks in a transformer, none at the first level; sizes and a pooled embedding; Euler."""
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4, cross_attention_dim=32 + 16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4), transformer_layers_per_block=(1, 2), use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=24 + 6 * 8,
    )  # fmt: skip
    vae = tiny_kl(shift_factor=None, num_levels=3)
    scheduler = EulerDiscreteScheduler(**TRAINED, timestep_spacing="leading")
    first = CLIPTextModel(tiny_clip(32, num_layers=2))
    second = CLIPTextModelWithProjection(tiny_clip(16, num_layers=2, projection_dim=24))
    widen(unet, vae, first, second)
    return StableDiffusionXLPipeline(
        unet=unet, vae=vae, scheduler=scheduler, text_encoder=first, text_encoder_2=second,
        tokenizer=tiny_tokenizer(9), tokenizer_2=tiny_tokenizer(9), add_watermarker=False,
    )  # fmt: skip


def tiny_kl(shift_factor: float | None = 0.2, num_levels: int = 2, num_latent: int = 4) -> AutoencoderKL:
    """Each level but the first halves both sides."""
    return AutoencoderKL(
        latent_channels=num_latent, block_out_channels=(8,) * num_levels, norm_num_groups=4, sample_size=32,
        down_block_types=("DownEncoderBlock2D",) * num_levels, up_block_types=("UpDecoderBlock2D",) * num_levels,
        use_quant_conv=False, use_post_quant_conv=False, scaling_factor=1.4, shift_factor=shift_factor,
    )  # fmt: skip


def tiny_clip(width: int, num_layers: int = 1, **fields: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(WORDS), hidden_size=width, intermediate_size=37, num_attention_heads=4,
        max_position_embeddings=9, pad_token_id=0, bos_token_id=1, eos_token_id=1, num_hidden_layers=num_layers,
        **fields,
    )  # fmt: skip


def tiny_tokenizer(num_text: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=num_text
    )


def widen(*modules: torch.nn.Module) -> None:
    """Draw wide random weights."""
    for parameter in (parameter for module in modules for parameter in module.parameters()):
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)


def sharpen(transformer: torch.nn.Module) -> None:
    """Let attention choose among many tokens, by longer queries and keys."""
    for name, weight in transformer.named_parameters():
        if ".norm_" in name and weight.ndim == 1:
            weight.data *= 2
