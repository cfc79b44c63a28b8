"""From a name to a model on a device, through diffusers. Knows what is supported; runs no model."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any, get_args

import diffusers
import torch
import transformers
from diffusers import (
    AutoencoderKL,
    AutoencoderTiny,
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxTransformer2DModel,
    PNDMScheduler,
    UNet2DConditionModel,
)
from safetensors import SafetensorError, safe_open

from instgenie.errors import ModelError
from instgenie.jobs.sampler import Prediction
from instgenie.machine.device import check_memory, is_out_of_memory, memory_guard
from instgenie.models.flux.model import FluxModel
from instgenie.models.loading.dummy import PREFIX, Recipe, count_dummy, find_recipe, make_parts
from instgenie.models.loading.folder import BUILTIN, PIPELINES, WEIGHTS, check_index, count_parameters, find_folder
from instgenie.models.model import Model
from instgenie.models.unet.model import UnetModel, UnetXlModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
UNUSED = {False: ("safety_checker", "feature_extractor", "image_encoder"), True: ("feature_extractor", "image_encoder")}
UNET_BLOCKS = {"DownBlock2D", "CrossAttnDownBlock2D", "UNetMidBlock2DCrossAttn", "UpBlock2D", "CrossAttnUpBlock2D"}
UNET_OPTIONS: dict[str, tuple[object, ...]] = {  # of the config, and what each may be; None stands for anything off
    "addition_embed_type": (None, "text_time"),
    "attention_type": (None, "default"),
    "center_input_sample": (None,),
    "class_embed_type": (None,),
    "dual_cross_attention": (None,),
    "encoder_hid_dim_type": (None,),
    "num_class_embeds": (None,),
    "only_cross_attention": (None,),
    "time_cond_proj_dim": (None,),
    "time_embedding_act_fn": (None,),
}


def load(
    name: str = "builtin", device: str = "auto", dtype: str = "auto", weights: frozenset[str] | None = None
) -> Model:
    """A process that runs only some parts of a model names those whose weights it needs: the others have a shape and no
    weights, but for what prompts go through on their way into the network."""
    chosen_device = choose_device(device)
    chosen_dtype = choose_dtype(dtype, chosen_device)
    facts = {"name": name, "device": chosen_device, "dtype": chosen_dtype}
    if name.startswith(PREFIX):
        return make_dummy(find_recipe(name), facts, weights)
    folder = find_folder(name)
    pipeline = check_index(folder)
    if weights is None:
        check_memory(name, count_parameters(folder, pipeline) * chosen_dtype.itemsize, chosen_device)
    with memory_guard(f"the model {name!r}"), quiet():
        hollow = {part: make_hollow(folder, part, chosen_dtype) for part in hollow_parts(pipeline, weights)}
        loaded = load_pipeline(pipeline, folder, chosen_device, chosen_dtype, hollow)
    parts = {part: loaded.components[part] for part in PIPELINES[pipeline]}
    if "unet" in parts:
        return make_unet(parts, facts, empty_is_zero=loaded.config.get("force_zeros_for_empty_prompt", False))
    return make_flux(pipeline, parts, facts, is_builtin=folder.resolve() == BUILTIN.resolve())


def hollow_parts(pipeline: str, weights: frozenset[str] | None) -> list[str]:
    parts = [part for part in PIPELINES[pipeline] if part in WEIGHTS]
    return [part for part in parts if weights is not None and part not in weights]


def make_hollow(folder: Path, part: str, dtype: torch.dtype) -> Any:
    """A part without weights, but for those of a Flux transformer that embed the prompt."""
    index = json.loads((folder / "model_index.json").read_text())
    library, kind = index[part]
    cls = getattr({"diffusers": diffusers, "transformers": transformers}[library], kind)
    with torch.device("meta"):
        hollow: Any = (
            cls.from_config(cls.load_config(folder / part))
            if library == "diffusers"
            else cls(cls.config_class.from_pretrained(folder / part))
        )
    hollow.to(dtype)
    if part == "transformer":
        hollow.context_embedder.load_state_dict(read_weights(folder / part, "context_embedder."), assign=True)
        hollow.context_embedder.to(dtype)
    return hollow


def read_weights(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            found |= {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    return found


def make_dummy(recipe: Recipe, facts: dict[str, Any], weights: frozenset[str] | None) -> Model:
    name, device, dtype = facts["name"], facts["device"], facts["dtype"]
    hollow = hollow_parts(recipe.pipeline, weights)
    check_memory(name, count_dummy(recipe, hollow) * dtype.itemsize, device)
    with memory_guard(f"the model {name!r}"), quiet():
        parts = make_parts(recipe, device, dtype, hollow)
    for part in hollow:
        empty(parts[part])
    if "unet" in parts:
        return make_unet(parts, facts, empty_is_zero=True)
    return make_flux(recipe.pipeline, parts, facts)


def make_flux(pipeline: str, parts: dict[str, Any], facts: dict[str, Any], is_builtin: bool = False) -> FluxModel:
    check_flow_scheduler(facts["name"], parts["scheduler"])
    own_size, steps, guidance = (256, 28, 3.5) if is_builtin else flux_defaults(pipeline, parts["transformer"])
    put_channels_last(parts, facts["device"])
    return FluxModel(**parts, **facts, own_size=own_size, steps=steps, guidance=guidance)


def flux_defaults(pipeline: str, transformer: FluxTransformer2DModel) -> tuple[int, int, float]:
    """Own size, steps and guidance: what the stock pipeline assumes."""
    if pipeline == "FluxFillPipeline":
        return 1024, 50, 30.0
    return (1024, 28, 3.5) if transformer.config.guidance_embeds else (1024, 4, 0.0)


def make_unet(parts: dict[str, Any], facts: dict[str, Any], empty_is_zero: bool) -> UnetModel:
    """Size, steps and guidance are what the stock pipelines assume."""
    name, unet, vae = facts["name"], parts["unet"], parts["vae"]
    check_unet(name, unet, vae)
    side = unet.config.sample_size
    own_size = (side if isinstance(side, int) else min(side)) * 2 ** (len(vae.config.block_out_channels) - 1)
    parts = parts | {"scheduler": choose_scheduler(name, parts["scheduler"])}
    put_channels_last(parts, facts["device"])
    facts = facts | {"own_size": own_size, "steps": 50, "guidance": 7.5}
    if "text_encoder_2" in parts:
        return UnetXlModel(**parts, **facts, empty_is_zero=empty_is_zero)
    return UnetModel(**parts, **facts)


def put_channels_last(parts: dict[str, Any], device: torch.device) -> None:
    """Weights of convolutions lie as these read them; the same values. On a CPU, where norms read them otherwise, those
    of autoencoders that have none."""
    for part in ("unet", "vae"):
        if part in parts and (device.type == "cuda" or isinstance(parts[part], AutoencoderTiny)):
            parts[part].to(memory_format=torch.channels_last)


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ModelError(f"unknown device {name!r}: auto, cpu, cuda or cuda:N is expected")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"device {name!r} is not there: this machine has {torch.cuda.device_count()} CUDA devices")
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # where kernels run
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


def empty(part: torch.nn.Module) -> None:
    for name, child in part.named_children():
        if name != "context_embedder":
            child.to("meta")


def load_pipeline(
    pipeline: str, folder: Path, device: torch.device, dtype: torch.dtype, hollow: dict[str, torch.nn.Module]
) -> diffusers.DiffusionPipeline:
    unused = {} if pipeline.startswith("Flux") else dict.fromkeys(UNUSED[pipeline.startswith("StableDiffusionXL")])
    try:
        loaded = getattr(diffusers, pipeline).from_pretrained(
            folder, dtype=dtype, use_safetensors=True, local_files_only=True, **unused, **hollow
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"{folder} does not load as a {pipeline}: {shorten(str(error), 300)}") from error
    for part in PIPELINES[pipeline]:
        if part in WEIGHTS:
            loaded.components[part].eval().requires_grad_(False)
            move(loaded.components[part], device)
    return loaded


def move(part: torch.nn.Module, device: torch.device) -> None:
    """All of it that has weights."""
    if all(not parameter.is_meta for parameter in part.parameters()):
        part.to(device)
    elif hasattr(part, "context_embedder"):
        part.context_embedder.to(device)


def check_flow_scheduler(name: str, scheduler: object) -> None:
    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        raise ModelError(
            f"the model {name!r} has a {type(scheduler).__name__}: a FlowMatchEulerDiscreteScheduler is expected"
        )
    if scheduler.config.stochastic_sampling or scheduler.config.invert_sigmas:
        raise ModelError(f"the scheduler of {name!r} has stochastic_sampling or invert_sigmas on: both off is expected")


def choose_scheduler(name: str, scheduler: Any) -> DDIMScheduler | EulerDiscreteScheduler:
    """DDIM and Euler as they are. PNDM becomes DDIM, which is its first order: same noise, same timesteps."""
    if isinstance(scheduler, PNDMScheduler):
        scheduler = DDIMScheduler.from_config(scheduler.config, clip_sample=False, thresholding=False)
    if not isinstance(scheduler, DDIMScheduler | EulerDiscreteScheduler):
        raise ModelError(
            f"the model {name!r} has a {type(scheduler).__name__}: "
            "a DDIMScheduler, a EulerDiscreteScheduler or a PNDMScheduler is expected"
        )
    config = scheduler.config
    if config.prediction_type not in get_args(Prediction):
        raise ModelError(
            f"the scheduler of {name!r} has predictions of {config.prediction_type!r}: "
            f"{' or '.join(get_args(Prediction))} is expected"
        )
    if config.get("clip_sample") or config.get("thresholding"):
        raise ModelError(f"the scheduler of {name!r} has clip_sample or thresholding on: both off is expected")
    return scheduler


def check_unet(name: str, unet: UNet2DConditionModel, vae: AutoencoderKL) -> None:
    """Refuses what our pass through a UNet does not walk."""
    config = unet.config
    kinds = {type(block).__name__ for block in (*unet.down_blocks, unet.mid_block, *unet.up_blocks) if block}
    if unknown := kinds - UNET_BLOCKS:
        raise ModelError(
            f"the unet of {name!r} has {', '.join(sorted(unknown))}: {', '.join(sorted(UNET_BLOCKS))} are supported"
        )
    unsupported = [option for option, value in UNET_OPTIONS.items() if (config.get(option) or None) not in value]
    if unsupported:
        found = ", ".join(f"{option}={config.get(option)!r}" for option in unsupported)
        raise ModelError(f"the unet of {name!r} has {found}: that is not supported")
    latents = vae.config.latent_channels
    if config.in_channels not in (latents, 2 * latents + 1):
        raise ModelError(
            f"the unet of {name!r} has {config.in_channels} channels: {latents}, or {2 * latents + 1} with mask and "
            "masked picture, are expected"
        )
