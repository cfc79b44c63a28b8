"""The parts of the built-in model and the diffusers folder they are saved as."""

import json
import shutil
import time
from pathlib import Path

import torch
from diffusers import AutoencoderTiny, FlowMatchEulerDiscreteScheduler, FluxFillPipeline, FluxTransformer2DModel
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

Encoders = tuple[CLIPTextModel, T5EncoderModel]
Tokenizers = tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]

NUM_TEXT_TOKENS = 64
LATENT_CHANNELS = 16
SHIFT = 3.0  # of the schedule towards noise, where structure and contrast are settled


def build_autoencoder(latent_channels: int = LATENT_CHANNELS) -> AutoencoderTiny:
    return AutoencoderTiny(
        encoder_block_out_channels=(64,) * 4,
        decoder_block_out_channels=(80,) * 4,
        num_encoder_blocks=(0, 2, 4, 4),
        num_decoder_blocks=(3, 4, 3, 1),
        latent_channels=latent_channels,
    )


def build_transformer() -> FluxTransformer2DModel:
    transformer = FluxTransformer2DModel(
        in_channels=8 * LATENT_CHANNELS + 256,
        out_channels=4 * LATENT_CHANNELS,
        num_layers=2,
        num_single_layers=7,
        attention_head_dim=64,
        num_attention_heads=6,
        joint_attention_dim=256,
        pooled_projection_dim=192,
        guidance_embeds=True,
        axes_dims_rope=(16, 24, 24),
    )
    for name, parameter in transformer.named_parameters():
        if (".norm" in name and ".linear." in name) or name.startswith(("proj_out", "norm_out.linear")):
            nn.init.zeros_(parameter)
    return transformer


def build_tokenizers(words: list[str]) -> Tokenizers:
    """One token per word; unknown words are `<unk>`."""
    clip = _tokenizer(words, ["<pad>", "<unk>", "<|startoftext|>", "<|endoftext|>"], "<|startoftext|> $A <|endoftext|>")
    t5 = _tokenizer(words, ["<pad>", "</s>", "<unk>"], "$A </s>")
    return clip, t5


def _tokenizer(words: list[str], special: list[str], template: str) -> PreTrainedTokenizerFast:
    rows = {word: row for row, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordLevel(rows, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(r"[^a-z0-9\- ]+"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    used = [(token, rows[token]) for token in special if token in template]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=used)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=NUM_TEXT_TOKENS,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token=used[-1][0],
        bos_token=used[0][0] if len(used) > 1 else None,
    )


def build_text_encoders(clip: PreTrainedTokenizerFast, t5: PreTrainedTokenizerFast) -> Encoders:
    clip_config = CLIPTextConfig(
        vocab_size=len(clip),
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=3,
        projection_dim=192,
        max_position_embeddings=NUM_TEXT_TOKENS,
        pad_token_id=clip.pad_token_id,
        bos_token_id=clip.bos_token_id,
        eos_token_id=clip.eos_token_id,
        attn_implementation="eager",
    )
    t5_config = T5Config(
        vocab_size=len(t5),
        d_model=256,
        d_kv=64,
        d_ff=768,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=t5.pad_token_id,
        eos_token_id=t5.eos_token_id,
        attn_implementation="eager",
    )
    return CLIPTextModel(clip_config), T5EncoderModel(t5_config)


def token_ids(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """[texts, the tokenizer's longest text], padded as the Flux pipelines pad."""
    ids: torch.Tensor = tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids
    return ids


def save_pipeline(
    folder: Path,
    vae: AutoencoderTiny,
    transformer: FluxTransformer2DModel,
    text_encoders: Encoders,
    tokenizers: Tokenizers,
) -> None:
    """A FluxFillPipeline folder in float16, in shards small enough to keep in a repository. It appears all at once, so
    that `wait_for` may wait for it."""
    pipeline = FluxFillPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT, use_dynamic_shifting=False),
        vae=vae,
        text_encoder=text_encoders[0],
        text_encoder_2=text_encoders[1],
        tokenizer=tokenizers[0],
        tokenizer_2=tokenizers[1],
        transformer=transformer,
    ).to(torch.float16)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    pipeline.save_pretrained(partial, max_shard_size="15MB")
    for config in partial.glob("**/*.json"):
        _tidy(config)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def wait_for(folder: Path) -> None:
    """Return when another process has saved its pipeline there."""
    while not folder.exists():
        time.sleep(0.5)


def _tidy(config: Path) -> None:
    """Clean a config: drop entries that loading ignores, name a tokenizer class that every release of transformers
    knows, and let text encoders load in float32, the default of diffusers' own models."""
    if config.name in ("tokenizer.json", "diffusion_pytorch_model.safetensors.index.json"):
        return
    text = config.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast")
    facts = {k: v for k, v in json.loads(text).items() if k not in ("_name_or_path", "block_out_channels", "backend")}
    if "dtype" in facts:
        facts["dtype"] = "float32"
    config.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")


def load_text(folder: Path) -> tuple[Encoders, Tokenizers]:
    """Text encoders and tokenizers of a saved pipeline folder, in float32."""
    encoders = (
        CLIPTextModel.from_pretrained(folder / "text_encoder", dtype=torch.float32, attn_implementation="eager"),
        T5EncoderModel.from_pretrained(folder / "text_encoder_2", dtype=torch.float32, attn_implementation="eager"),
    )
    clip, t5 = (PreTrainedTokenizerFast.from_pretrained(folder / name) for name in ("tokenizer", "tokenizer_2"))
    return encoders, (clip, t5)


def inherit(transformer: FluxTransformer2DModel, encoders: Encoders, tokenizers: Tokenizers, folder: Path) -> None:
    """Take over what a saved pipeline knows: every weight of equal shape, and each known word's embedding.

    Layers that read or write latents stay fresh if the number of channels differs, and words that are new are fresh.
    """
    old_encoders, old_tokenizers = load_text(folder)
    old_transformer = FluxTransformer2DModel.from_pretrained(folder / "transformer", dtype=torch.float32)
    pairs = ((transformer, old_transformer), *zip(encoders, old_encoders, strict=True))
    for new, old in pairs:
        known = old.state_dict()
        same = {k: known[k] for k, v in new.state_dict().items() if k in known and known[k].shape == v.shape}
        new.load_state_dict(same, strict=False)
    tables = zip(encoders, old_encoders, tokenizers, old_tokenizers, strict=True)
    for encoder, old_encoder, tokenizer, old_tokenizer in tables:
        rows, old_rows = tokenizer.get_vocab(), old_tokenizer.get_vocab()
        shared = sorted(rows.keys() & old_rows.keys())
        table, old_table = encoder.get_input_embeddings().weight, old_encoder.get_input_embeddings().weight
        with torch.no_grad():
            table[[rows[word] for word in shared]] = old_table[[old_rows[word] for word in shared]]
    name = "position_embedding.weight"
    places, old_places = (
        next(p for n, p in e[0].named_parameters() if n.endswith(name)) for e in (encoders, old_encoders)
    )
    with torch.no_grad():
        places[: len(old_places)] = old_places[: len(places)]
