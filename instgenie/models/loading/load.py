"""From a name to a model on a device, through diffusers' pipelines. Knows no family; runs no model.

Pipelines rather than their parts are loaded because a pipeline's class also corrects the configs of old checkpoints.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import diffusers
import torch
import transformers
from diffusers import AutoencoderKLQwenImage, AutoencoderTiny
from safetensors import SafetensorError
from torch import nn

from instgenie.errors import ModelError
from instgenie.kernels.quantize import MIN_CAPABILITY, multiplies_fp8
from instgenie.machine.device import choose_device, choose_dtype
from instgenie.machine.device_memory import check_memory, is_out_of_memory, memory_guard
from instgenie.machine.model_folders import BUILTIN
from instgenie.models.families import PIPELINES
from instgenie.models.family import Family, LoadedPipeline, PartKind
from instgenie.models.layers.fp8_linear import Fp8Linear, Fp8Weights, exchange_layers, large_layers, quantizable
from instgenie.models.loading.dummy import PREFIX, count_dummy, find_dummy, make_parts
from instgenie.models.loading.fill import fill
from instgenie.models.loading.folder import (
    BUILTIN_DEFAULTS,
    check_index,
    count_parameters,
    find_folder,
    unused_parts,
)
from instgenie.models.loading.skeleton import Skeleton, make_hollow, make_skeleton
from instgenie.models.model import Model
from instgenie.types import Convolutions, OnBytes, Quantization, WeightsDtype


@dataclass(frozen=True)
class LoadOptions:
    """How a model is put on its device."""

    device: torch.device
    dtype: torch.dtype
    weights: frozenset[PartKind] | None  # kinds of parts whose weights are needed; None: all
    quantization: Quantization | None
    weights_dtype: WeightsDtype | None
    on_bytes: OnBytes | None

    @property
    def multiplies_fp8(self) -> bool:
        """True if layers whose products may be of low precision have them."""
        can = multiplies_fp8(self.device) and self.dtype == torch.bfloat16
        return self.quantization is not None or can


def load(
    name: str = "builtin",
    device: str = "auto",
    dtype: str = "auto",
    weights: frozenset[PartKind] | None = None,
    quantization: Quantization | None = None,
    emulates: bool = False,
    convolutions: Convolutions = "dense",
    weights_dtype: WeightsDtype | None = None,
    on_bytes: OnBytes | None = None,
) -> Model:
    """Load a model by its name, its folder or its hub id.

    `weights` names the kinds of parts whose weights this process needs, None all of them. The other parts are hollow:
    they have a shape and no weights, except for the layers of the network that embed prompts.

    With a quantization, most products of the network are of low precision. A device that cannot multiply so is an
    error, unless it `emulates` such products: it computes the same numbers, slowly.

    With a weights dtype, large weights of the network and of text encoders take a byte each. Devices that multiply so
    do; on others, weights become plain numbers again for each product.

    `on_bytes` is told how many bytes of weights have been brought to the device, and of how many.
    """
    chosen_device = choose_device(device)
    chosen_dtype = choose_dtype(dtype, chosen_device)
    check_quantization(quantization, chosen_device, chosen_dtype, emulates)
    load_from = load_dummy if name.startswith(PREFIX) else load_folder
    options = LoadOptions(chosen_device, chosen_dtype, weights, quantization, weights_dtype, on_bytes)
    model = load_from(name, options)
    put_channels_last(model)
    return model.with_convolutions(convolutions)


def load_folder(name: str, options: LoadOptions) -> Model:
    folder = find_folder(name)
    pipeline = check_index(folder)
    family, device, dtype = PIPELINES[pipeline], options.device, options.dtype
    is_low = options.quantization or options.weights_dtype
    if options.weights is None and not is_low:
        check_memory(name, count_parameters(folder, pipeline) * dtype.itemsize, device)
    with memory_guard(f"the model {name!r}"), quiet():
        hollow = hollow_parts(family, pipeline, options.weights)
        read = {
            part: read(folder / part) for part, read in family.readers.items() if part in family.pipelines[pipeline]
        }
        with blamed(folder, pipeline):
            skeletons = {
                part: make_hollow(folder, part, dtype, family) if part in hollow else make_skeleton(folder, part, dtype)
                for part in family.weights_of(pipeline)
            }
            for part in skeletons.keys() - set(hollow):
                quantize(name, part, skeletons[part].module, family, options)
            if family.network_name not in hollow:
                join_layers(skeletons[family.network_name].module, family, device)
            if options.weights is None and is_low:
                check_memory(name, sum(map(final_bytes, skeletons.values())), device)
            fill(list(skeletons.values()), device, dtype, options.on_bytes)
            modules = {part: skeleton.module for part, skeleton in skeletons.items()}
            loaded = load_pipeline(pipeline, folder, dtype, modules | dict.fromkeys(read))
        parts = {part: loaded.components[part] for part in family.pipelines[pipeline]} | read
        for module in modules.values():
            move(module.eval().requires_grad_(False), device)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what pieces were quantised in
    model = family.make(LoadedPipeline(name, device, dtype, pipeline, parts, loaded.config))
    is_builtin = folder.resolve() == BUILTIN.resolve()
    return replace(model, **BUILTIN_DEFAULTS) if is_builtin else model


def load_dummy(name: str, options: LoadOptions) -> Model:
    family, recipe = find_dummy(name)
    hollow = hollow_parts(family, recipe.pipeline, options.weights)
    device, dtype = options.device, options.dtype

    def exchange(network: nn.Module) -> None:
        quantize(name, family.network_name, network, family, options)
        join_layers(network, family, device)

    with memory_guard(f"the model {name!r}"), quiet():
        check_memory(name, count_dummy(recipe, family, hollow, dtype, exchange), device)
        parts = make_parts(recipe, family, device, dtype, hollow, exchange)
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


def quantize(name: str, part: str, module: nn.Module, family: Family, options: LoadOptions) -> None:
    """Exchange the layers of a part whose weights are kept in e4m3. The part has no weights yet."""
    is_network = part == family.network_name
    if not options.weights_dtype and not (options.quantization and is_network):
        return
    kinds: dict[str, type[Fp8Weights]] = {}
    if options.weights_dtype and part != "vae":
        kinds |= {
            layer: Fp8Weights for layer in large_layers(module) if not is_network or not family.is_of_prompts(layer)
        }
    if is_network:
        named = [layer for layer, _ in quantizable(module, family.fp8_layers)]
        if options.quantization and not named:
            raise ModelError(
                f"the model {name!r} has no layer whose channels suit the quantization {options.quantization}"
            )
        kinds |= dict.fromkeys(named, Fp8Linear if options.multiplies_fp8 else Fp8Weights)
    exchange_layers(module, kinds, torch.device("meta"))


def join_layers(network: nn.Module, family: Family, device: torch.device) -> None:
    """Fewer and larger products fill a GPU better; a CPU gains nothing. The network has no weights yet: they are filled
    into their joined places, since a device would keep both copies of what is joined later."""
    if family.join_layers and device.type == "cuda":
        family.join_layers(network)


def final_bytes(skeleton: Skeleton) -> int:
    """Bytes that a part will take on its device."""
    return sum(tensor.nbytes for tensor in (*skeleton.module.parameters(), *skeleton.module.buffers()))


def hollow_parts(family: Family, pipeline: str, weights: frozenset[PartKind] | None) -> list[str]:
    kinds = family.weights_of(pipeline)
    return [part for part, kind in kinds.items() if weights is not None and kind not in weights]


def load_pipeline(
    pipeline: str, folder: Path, dtype: torch.dtype, given: Mapping[str, Any]
) -> diffusers.DiffusionPipeline:
    """Load the other parts, those without weights; None stands for a part that its family reads itself."""
    unused: dict[str, Any] = dict.fromkeys(unused_parts(folder, pipeline))
    return getattr(diffusers, pipeline).from_pretrained(
        folder, dtype=dtype, use_safetensors=True, local_files_only=True, **unused, **given
    )


@contextlib.contextmanager
def blamed(folder: Path, pipeline: str) -> Iterator[None]:
    """Turn the libraries' errors into a ModelError about the folder."""
    try:
        yield
    except (OSError, ValueError, KeyError, AttributeError, RuntimeError, SafetensorError) as error:
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
