"""A dummy: a pipeline of published size with random weights, for speed work where the real weights are not at hand.

The network and the autoencoder have the published shapes. Text encoders do not: they are one random layer of the
published width over a vocabulary of three words, so the content of a prompt makes no difference and the time they take
means nothing. The pictures are noise. Families name their recipes; `loading.dummy` fills the weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diffusers import AutoencoderKL
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import CLIPTextConfig, PreTrainedTokenizerFast, T5Config

VOCABULARY = {"<pad>": 0, "</s>": 1, "<unk>": 2}
CLIP_TOKENS = 77


@dataclass(frozen=True)
class Recipe:
    """Functions that construct the parts of a pipeline; their weights are filled in later."""

    pipeline: str  # diffusers' class
    network: Callable[[], nn.Module]
    vae: Callable[[], nn.Module]
    others: Callable[[], dict[str, Any]]  # text encoders, tokenizers and the scheduler
    options: Mapping[str, Any] = field(default_factory=dict)  # the pipeline's settings beside its parts


def make_autoencoder(latent_channels: int, **config: Any) -> AutoencoderKL:
    return AutoencoderKL(
        latent_channels=latent_channels, block_out_channels=(128, 256, 512, 512), layers_per_block=2,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4, **config,
    )  # fmt: skip


def clip_config(width: int, **config: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(VOCABULARY), hidden_size=width, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=width // 64, max_position_embeddings=CLIP_TOKENS,
        pad_token_id=0, bos_token_id=1, eos_token_id=1, **config,
    )  # fmt: skip


def t5_config(width: int) -> T5Config:
    return T5Config(vocab_size=len(VOCABULARY), d_model=width, d_kv=64, d_ff=64, num_layers=1, num_heads=1)


def make_tokenizer(num_tokens: int) -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel(VOCABULARY, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=num_tokens
    )
