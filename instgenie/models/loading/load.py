"""From a name to a model on a device, through diffusers' pipelines. Knows no family; runs no model.

Pipelines rather than their parts are loaded because a pipeline's class also corrects the configs of old checkpoints.
"""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import diffusers
import torch
import transformers
from diffusers import AutoencoderKLQwenImage, AutoencoderTiny
from safetensors import SafetensorError, safe_open
from torch import nn

from instgenie.errors import ModelError
from instgenie.kernels.quantize import MIN_CAPABILITY, multiplies_fp8
from instgenie.machine.device import choose_device, choose_dtype
from instgenie.machine.device_memory import check_memory, is_out_of_memory, memory_guard
from instgenie.machine.model_folders import BUILTIN
from instgenie.models.families import PIPELINES
from instgenie.models.family import Family, LoadedPipeline, PartKind
from instgenie.models.layers.fp8_linear import quantizable, quantize_layers
from instgenie.models.loading.dummy import PREFIX, count_dummy, find_dummy, make_parts
from instgenie.models.loading.folder import (
    BUILTIN_DEFAULTS,
    check_index,
    count_parameters,
    find_folder,
    read_index,
    unused_parts,
)
from instgenie.models.model import Model
from instgenie.types import Convolutions, Quantization

LIBRARIES = {"diffusers": diffusers, "transformers": transformers}


def load(
    name: str = "builtin",
    device: str = "auto",
    dtype: str = "auto",
    weights: frozenset[PartKind] | None = None,
    quantization: Quantization | None = None,
    emulates: bool = False,
    convolutions: Convolutions = "dense",
) -> Model:
    """Load a model by its name, its folder or its hub id.

    `weights` names the kinds of parts whose weights this process needs, None all of them. The other parts are hollow:
    they have a shape and no weights, except for the layers of the network that embed prompts.

    With a quantization, most products of the network are of low precision. A device that cannot multiply so is an
    error, unless it `emulates` such products: it computes the same numbers, slowly.
    """
    chosen_device = choose_device(device)
    chosen_dtype = choose_dtype(dtype, chosen_device)
    check_quantization(quantization, chosen_device, chosen_dtype, emulates)
    load_from = load_dummy if name.startswith(PREFIX) else load_folder
    model = load_from(name, chosen_device, chosen_dtype, weights, quantization)
    put_channels_last(model)
    return model.with_convolutions(convolutions)


def load_folder(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    weights: frozenset[PartKind] | None,
    quantization: Quantization | None,
) -> Model:
    folder = find_folder(name)
    pipeline = check_index(folder)
    family = PIPELINES[pipeline]
    if weights is None:
        saved = count_saved(folder, family, dtype) if quantization else 0
        check_memory(name, count_parameters(folder, pipeline) * dtype.itemsize - saved, device)
    with memory_guard(f"the model {name!r}"), quiet():
        hollow = {part: make_hollow(folder, part, dtype, family) for part in hollow_parts(family, pipeline, weights)}
        read = {
            part: read(folder / part) for part, read in family.readers.items() if part in family.pipelines[pipeline]
        }
        loaded = load_pipeline(pipeline, folder, dtype, hollow | dict.fromkeys(read))
        parts = {part: loaded.components[part] for part in family.pipelines[pipeline]} | read
        for part in family.weights_of(pipeline):
            parts[part].eval().requires_grad_(False)
            if part == family.network_name and part not in hollow:
                quantize(name, parts[part], family, device, quantization)
            move(parts[part], device)
        if family.network_name not in hollow:
            join_layers(parts[family.network_name], family, device)
    model = family.make(LoadedPipeline(name, device, dtype, pipeline, parts, loaded.config))
    is_builtin = folder.resolve() == BUILTIN.resolve()
    return replace(model, **BUILTIN_DEFAULTS) if is_builtin else model


def load_dummy(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    weights: frozenset[PartKind] | None,
    quantization: Quantization | None,
) -> Model:
    family, recipe = find_dummy(name)
    hollow = hollow_parts(family, recipe.pipeline, weights)
    check_memory(name, count_dummy(recipe, family, hollow) * dtype.itemsize, device)
    with memory_guard(f"the model {name!r}"), quiet():
        parts = make_parts(recipe, family, device, dtype, hollow)
        if family.network_name not in hollow:
            quantize(name, parts[family.network_name], family, device, quantization)
            join_layers(parts[family.network_name], family, device)
    return family.make(LoadedPipeline(name, device, dtype, recipe.pipeline, parts, recipe.options))


def check_quantization(
    quantization: Quantization | None, device: torch.device, dtype: torch.dtype, emulates: bool
) -> None:
    if quantization is None or emulates:
        return
    if not multiplies_fp8(device):
        found = "a CPU"
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            found = f"{torch.cuda.get_device_name(device)} of compute capability {major}.{minor}"
        least = ".".join(map(str, MIN_CAPABILITY))
        raise ModelError(
            f"the quantization {quantization} needs a GPU of compute capability {least} or more: this is {found}"
        )
    if dtype != torch.bfloat16:
        raise ModelError(
            f"the quantization {quantization} computes in bfloat16: the dtype is {dtype}".replace("torch.", "")
        )


def quantize(
    name: str, network: nn.Module, family: Family, device: torch.device, quantization: Quantization | None
) -> None:
    """Exchange the layers of the network that multiply in low precision."""
    if quantization is None:
        return
    if not any(quantizable(network, family.fp8_layers)):
        raise ModelError(f"the model {name!r} has no layer whose channels suit the quantization {quantization}")
    quantize_layers(network, family.fp8_layers, device)


def join_layers(network: nn.Module, family: Family, device: torch.device) -> None:
    """Fewer and larger products fill a GPU better; a CPU gains nothing."""
    if family.join_layers and device.type == "cuda":
        family.join_layers(network)


def count_saved(folder: Path, family: Family, dtype: torch.dtype) -> int:
    """Count the bytes that quantised layers take less; their scales are too few to count."""
    with quiet():
        network = make_hollow(folder, family.network_name, dtype, family)
    layers = quantizable(network, family.fp8_layers)
    return sum(layer.weight.numel() for _, layer in layers) * (dtype.itemsize - 1)


def hollow_parts(family: Family, pipeline: str, weights: frozenset[PartKind] | None) -> list[str]:
    kinds = family.weights_of(pipeline)
    return [part for part, kind in kinds.items() if weights is not None and kind not in weights]


def make_hollow(folder: Path, part: str, dtype: torch.dtype, family: Family) -> nn.Module:
    """Construct a part without weights; of a network the layers that embed prompts have theirs."""
    library, kind = read_index(folder)[part]
    cls = getattr(LIBRARIES[library], kind)
    with torch.device("meta"):
        hollow: nn.Module = (
            cls.from_config(cls.load_config(folder / part))
            if library == "diffusers"
            else cls(cls.config_class.from_pretrained(folder / part))
        )
    hollow.to(dtype)
    if part == family.network_name:
        names = [name for name in hollow.state_dict() if family.is_of_prompts(name)]
        found = read_weights(folder / part, names)
        hollow.load_state_dict({name: found[name].to(dtype) for name in names}, strict=False, assign=True)
    return hollow


def read_weights(folder: Path, names: Collection[str]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys() if name in names}  # noqa: SIM118
    if missing := [name for name in names if name not in found]:
        raise ModelError(f"the weights in {folder} lack {missing[0]!r}")
    return found


def load_pipeline(
    pipeline: str, folder: Path, dtype: torch.dtype, given: dict[str, Any]
) -> diffusers.DiffusionPipeline:
    """Load a pipeline with some parts given: hollow ones, and None for those that its family reads itself."""
    unused: dict[str, Any] = dict.fromkeys(unused_parts(folder, pipeline))
    try:
        return getattr(diffusers, pipeline).from_pretrained(
            folder, dtype=dtype, use_safetensors=True, local_files_only=True, **unused, **given
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"{folder} does not load as a {pipeline}: {shorten(str(error), 300)}") from error


def move(module: nn.Module, device: torch.device) -> None:
    """Move a module to the device; of a hollow one, the layers and parameters that have weights."""
    if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        module.to(device)
        return
    for parameter in module.parameters(recurse=False):
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    for child in module.children():
        move(child, device)


def put_channels_last(model: Model) -> None:
    """Order the weights of convolutions as CUDA's kernels read them; their values stay the same. On a CPU this pays
    only for autoencoders without norms."""
    on_cuda = model.device.type == "cuda"
    if on_cuda and model.is_convolutional:
        model.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    is_flat = not isinstance(model.vae, AutoencoderKLQwenImage)  # others convolve pictures, not films
    if (on_cuda and is_flat) or isinstance(model.vae, AutoencoderTiny):
        model.vae.to(memory_format=torch.channels_last)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the libraries' remarks about a folder that is already checked."""
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
