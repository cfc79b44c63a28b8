"""diffusers' own pipelines as systems, over the weights of a model: that for inpainting, plain or with compiled blocks,
and that which keeps K and V of the picture it sees, where there is one."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import diffusers
import torch
from PIL import Image

from instgenie.bench.timing import System, Timing
from instgenie.errors import ModelError
from instgenie.machine.clock import now
from instgenie.models.model import Model
from instgenie.types import Edit

UNNAMED_BLOCKS = ("JointTransformerBlock",)  # of Stable Diffusion 3, whose class names no blocks to compile


def stock_system(model: Model, network: torch.nn.Module | None = None) -> System:
    pipeline = stock_pipeline(model)
    pipeline.set_progress_bar_config(disable=True)
    network = network or stock_network(model)
    pipeline.register_modules(**{model.network_name: network})

    def run_together(edits: Sequence[Edit]) -> Timing:
        of_edits: dict[str, Any] = {
            "prompt": [edit.prompt for edit in edits],
            "image": [Image.fromarray(edit.picture) for edit in edits],
        }
        if model.stock_masks:
            of_edits["mask_image"] = [Image.fromarray(edit.mask) for edit in edits]
        if not model.stock_batches:
            of_edits = {name: one for name, [one] in of_edits.items()}
        given = of_edits | model.stock_guidance(edits) | arguments_of(edits[0]) | model.stock_arguments
        return timed(lambda: pipeline(**given), network, model.device)

    def run_apart(edits: Sequence[Edit]) -> Timing:
        return add_up([run_together([edit]) for edit in edits])

    return System("diffusers", None, run_together if model.stock_batches else run_apart)


def add_up(timings: Sequence[Timing]) -> Timing:
    return Timing(sum(one.edit for one in timings), sum(one.denoise for one in timings))


def reference_system(model: Model) -> System:
    """diffusers' pipeline that keeps K and V of the picture it sees from its first step on. It knows no mask, and takes
    one edit at a time."""
    name = model.stock_reference_pipeline_name
    if name is None:
        raise ModelError(
            f"the model {model.name!r} is of the family {model.family!r}: diffusers has no pipeline for it that keeps "
            "K and V of the picture"
        )
    pipeline = stock_pipeline(model, name)
    pipeline.set_progress_bar_config(disable=True)

    def run_one(edit: Edit) -> Timing:
        given = {"prompt": edit.prompt, "image": [Image.fromarray(edit.picture)]} | arguments_of(edit)
        length = model.num_text_tokens
        return timed(lambda: pipeline(**given, max_sequence_length=length), model.network, model.device)

    def run(edits: Sequence[Edit]) -> Timing:
        return add_up(list(map(run_one, edits)))

    return System("reference", None, run)


def arguments_of(edit: Edit) -> dict[str, Any]:
    """Arguments that every stock pipeline takes."""
    height, width, _ = edit.picture.shape
    return {
        "height": height,
        "width": width,
        "num_inference_steps": edit.steps,
        "generator": torch.Generator().manual_seed(edit.seed),
        "output_type": "latent",
    }


def timed(call: Callable[[], object], network: torch.nn.Module, device: torch.device) -> Timing:
    """Time a pipeline, whose steps begin with the first pass of the network."""
    prepared: list[float] = []

    def on_forward(*_: object) -> None:
        if not prepared:
            prepared.append(now(device))

    hook = network.register_forward_pre_hook(on_forward)
    start = now(device)
    call()
    end = now(device)
    hook.remove()
    return Timing(edit=end - start, denoise=end - prepared[0])


def compiled_system(model: Model) -> System:
    """Compile diffusers' blocks, and switch the compiled calls on only while this system runs: others share the
    modules."""
    network: Any = stock_network(model)
    stock = stock_system(model, network)
    for module in network.modules():
        if type(module).__name__ in (network._repeated_blocks or UNNAMED_BLOCKS):
            module.compile(fullgraph=True)
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


def stock_pipeline(model: Model, name: str | None = None) -> diffusers.DiffusionPipeline:
    """Build diffusers' own pipeline around the model's parts, by default that for inpainting. It gets a copy of the
    autoencoder in its memory order, and a scheduler of its own, because it changes the scheduler's state."""
    own = {
        "vae": in_stock_order(model.vae),
        "scheduler": type(model.scheduler).from_config(model.scheduler.config),
    }
    return getattr(diffusers, name or model.stock_pipeline_name)(**model.stock_parts | own)
