"""From a name to a model on a device, through diffusers. Knows the facts the engine needs; runs no model."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

import diffusers
import torch
import transformers
from diffusers import AutoencoderKL, AutoencoderTiny, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from safetensors import SafetensorError
from transformers import CLIPTextModel, PreTrainedTokenizerBase, T5EncoderModel

from instgenie.errors import ModelError
from instgenie.models.folder import BUILTIN, WEIGHTS, check_index, count_parameters, find_folder
from instgenie.models.folder import PARTS as PARTS
from instgenie.models.memory import check_memory, is_out_of_memory, memory_guard

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_TEXT_TOKENS = 512  # of the Flux pipelines, for tokenizers that know no limit


@dataclass(frozen=True, eq=False)
class Model:
    """The parts of a diffusers pipeline, on one device, and the facts the engine needs about them."""

    name: str
    transformer: FluxTransformer2DModel
    vae: AutoencoderKL | AutoencoderTiny
    text_encoder: CLIPTextModel
    text_encoder_2: T5EncoderModel
    tokenizer: PreTrainedTokenizerBase
    tokenizer_2: PreTrainedTokenizerBase
    scheduler: FlowMatchEulerDiscreteScheduler
    device: torch.device
    dtype: torch.dtype
    own_size: int  # side in pixels of the square it works at best
    steps: int  # what an edit gets that does not say
    guidance: float  # what an edit gets that does not say

    @property
    def latent_channels(self) -> int:
        return int(self.vae.config.latent_channels)

    @property
    def is_fill(self) -> bool:
        """Fill models see the clean picture around the hole and the mask as channels beside the latents."""
        return bool(self.transformer.config.in_channels != 4 * self.latent_channels)

    @property
    def pixels_per_latent(self) -> int:
        return int(2 ** (len(self.vae.config.block_out_channels) - 1))

    @property
    def patch(self) -> int:
        """Side in pixels of what one token stands for."""
        return 2 * self.pixels_per_latent

    @property
    def max_text_tokens(self) -> int:
        return min(int(self.tokenizer_2.model_max_length), MAX_TEXT_TOKENS)


def load(name: str = "builtin", device: str = "auto", dtype: str = "auto") -> Model:
    chosen_device = choose_device(device)
    chosen_dtype = choose_dtype(dtype, chosen_device)
    folder = find_folder(name)
    pipeline = check_index(folder)
    check_memory(name, count_parameters(folder) * chosen_dtype.itemsize, chosen_device)
    with memory_guard(f"the model {name!r}"), quiet():
        parts = load_parts(pipeline, folder, chosen_device, chosen_dtype)
    check_scheduler(name, parts["scheduler"])
    own_size, steps, guidance = defaults(folder, pipeline, parts["transformer"])
    return Model(
        name=name,
        device=chosen_device,
        dtype=chosen_dtype,
        own_size=own_size,
        steps=steps,
        guidance=guidance,
        **{part: parts[part] for part in PARTS},
    )


def defaults(folder: Path, pipeline: str, transformer: FluxTransformer2DModel) -> tuple[int, int, float]:
    """Own size, steps and guidance: what the model was made for, or what its stock pipeline assumes."""
    if folder.resolve() == BUILTIN.resolve():
        return 256, 28, 3.5
    if pipeline == "FluxFillPipeline":
        return 1024, 50, 30.0
    return (1024, 28, 3.5) if transformer.config.guidance_embeds else (1024, 4, 0.0)


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ModelError(f"unknown device {name!r}: auto, cpu, cuda or cuda:N is expected")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"device {name!r} is not there: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ModelError(f"unknown dtype {name!r}: auto, {' or '.join(DTYPES)} is expected")
    return DTYPES[name]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What libraries remark about a folder that we have checked is noise."""
    libraries = (diffusers.utils.logging, transformers.utils.logging)
    before = [(library, library.get_verbosity(), library.is_progress_bar_enabled()) for library in libraries]
    for library in libraries:
        library.set_verbosity_error()
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library, verbosity, has_bar in before:
            library.set_verbosity(verbosity)
            if has_bar:
                library.enable_progress_bar()


def load_parts(pipeline: str, folder: Path, device: torch.device, dtype: torch.dtype) -> dict[str, torch.nn.Module]:
    try:
        loaded = getattr(diffusers, pipeline).from_pretrained(
            folder, dtype=dtype, use_safetensors=True, local_files_only=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"{folder} does not load as a {pipeline}: {shorten(str(error), 300)}") from error
    loaded.to(device)
    parts: dict[str, torch.nn.Module] = loaded.components
    for part in WEIGHTS:
        parts[part].eval().requires_grad_(False)
    return parts


def check_scheduler(name: str, scheduler: object) -> None:
    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        raise ModelError(
            f"the model {name!r} has a {type(scheduler).__name__}: a FlowMatchEulerDiscreteScheduler is expected"
        )
    if scheduler.config.stochastic_sampling or scheduler.config.invert_sigmas:
        raise ModelError(f"the scheduler of {name!r} has stochastic_sampling or invert_sigmas on: both off is expected")
