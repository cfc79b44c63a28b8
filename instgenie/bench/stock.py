"""diffusers' own inpainting pipeline as a system, over the weights of a model; plain, or with compiled blocks."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import diffusers
import torch
from PIL import Image

from instgenie.bench.timing import System, Timing
from instgenie.machine.clock import now
from instgenie.models.model import Model
from instgenie.types import Edit


def stock_system(model: Model, network: torch.nn.Module | None = None) -> System:
    pipeline = stock_pipeline(model)
    pipeline.set_progress_bar_config(disable=True)
    network = network or stock_network(model)
    pipeline.register_modules(**{model.network_name: network})

    def run(edits: Sequence[Edit]) -> Timing:
        first = edits[0]
        height, width, _ = first.picture.shape
        prepared: list[float] = []

        def on_forward(*_: object) -> None:
            if not prepared:
                prepared.append(now(model.device))

        hook = network.register_forward_pre_hook(on_forward)
        start = now(model.device)
        pipeline(
            prompt=[edit.prompt for edit in edits],
            image=[Image.fromarray(edit.picture) for edit in edits],
            mask_image=[Image.fromarray(edit.mask) for edit in edits],
            height=height,
            width=width,
            num_inference_steps=first.steps,
            guidance_scale=first.guidance,
            generator=torch.Generator().manual_seed(first.seed),
            output_type="latent",
            **model.stock_arguments,
        )
        end = now(model.device)
        hook.remove()
        return Timing(edit=end - start, denoise=end - prepared[0])

    return System("diffusers", None, run)


def compiled_system(model: Model) -> System:
    """Compile diffusers' blocks, and switch the compiled calls on only while this system runs: others share the
    modules."""
    network: Any = stock_network(model)
    stock = stock_system(model, network)
    network.compile_repeated_blocks(fullgraph=True)
    calls = {module: module._compiled_call_impl for module in network.modules()}
    compiled = {module: call for module, call in calls.items() if call is not None}
    set_calls(dict.fromkeys(compiled))

    def run(edits: Sequence[Edit]) -> Timing:
        set_calls(compiled)
        try:
            return stock.run(edits)
        finally:
            set_calls(dict.fromkeys(compiled))

    return replace(stock, name="compiled", run=run)


def set_calls(calls: Mapping[torch.nn.Module, Callable[..., Any] | None]) -> None:
    """Set the compiled call of each module; None restores its plain forward."""
    for module, call in calls.items():
        module._compiled_call_impl = call


def stock_network(model: Model) -> torch.nn.Module:
    is_reordered = model.is_convolutional and model.device.type == "cuda"
    return in_stock_order(model.network) if is_reordered else model.network


def in_stock_order(module: torch.nn.Module) -> torch.nn.Module:
    """Copy a module, with its weights in the memory order in which diffusers loads them; ours may differ."""
    return copy.deepcopy(module).to(memory_format=torch.contiguous_format)  # type: ignore[call-overload, no-any-return]


def stock_pipeline(model: Model) -> diffusers.DiffusionPipeline:
    """Build diffusers' own inpainting pipeline around the model's parts. It gets a copy of the autoencoder in its
    memory order, and a scheduler of its own, because it changes the scheduler's state."""
    own = {
        "vae": in_stock_order(model.vae),
        "scheduler": type(model.scheduler).from_config(model.scheduler.config),
    }
    return getattr(diffusers, model.stock_pipeline_name)(**model.stock_parts | own)
