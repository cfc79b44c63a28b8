"""diffusers' pipeline with LoRAs and ControlNets as servers use it: LoRAs are read and merged into the weights before
an edit, and ControlNets run in line, before the network at every step.

The product of a LoRA is added to the weight itself, which is what loading and fusing comes to, and costs less.
ControlNets are diffusers' modules, called before each call of the network as its pipelines do; there is no such
pipeline for every model.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from instgenie.bench.stock import stock_network, stock_system
from instgenie.bench.timing import Timing
from instgenie.machine.clock import now
from instgenie.models.controlnet import ControlNet
from instgenie.models.flux.model import is_flux
from instgenie.models.model import Model
from instgenie.types import Edit

Guides = Sequence[tuple[Any, Tensor]]  # diffusers' modules and their images


@dataclass(eq=False)
class StockAdapters:
    model: Model

    def __post_init__(self) -> None:
        self.network = stock_network(self.model)
        self.system = stock_system(self.model, self.network)

    def run(
        self, edits: Sequence[Edit], loras: Sequence[Path], nets: Sequence[ControlNet], hint: Tensor | None
    ) -> float:
        """Seconds of a batch of edits that share LoRAs and ControlNets, with the loading of LoRAs."""
        start = time.perf_counter()
        with merged(self.network, self.model, loras):
            now(self.model.device)
            loading = time.perf_counter() - start
            with inline(self.network, self.model, nets, hint):
                timing: Timing = self.system.run(edits)
        return loading + timing.edit


@contextmanager
def merged(network: nn.Module, model: Model, loras: Sequence[Path]) -> Iterator[None]:
    """The network with LoRAs in its weights, and afterwards as it was."""
    originals: dict[nn.Parameter, Tensor] = {}
    with torch.no_grad():
        for path in loras:
            tensors = load_file(path, device=str(model.device))
            for key in [key for key in tensors if key.endswith(".lora_A.weight")]:
                name = key.removesuffix(".lora_A.weight")
                weight = network.get_parameter(name.removeprefix(f"{model.network_name}.") + ".weight")
                originals.setdefault(weight, weight.detach().clone())
                weight.addmm_(tensors[f"{name}.lora_B.weight"], tensors[key])
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, original in originals.items():
                weight.copy_(original)


@contextmanager
def inline(network: nn.Module, model: Model, nets: Sequence[ControlNet], hint: Tensor | None) -> Iterator[None]:
    """Run ControlNets before each call of the network, and give it their residuals. Their image is embedded once."""
    if not nets or hint is None:
        yield
        return
    add = add_to_flux if is_flux(model) else add_to_unet
    guides = [(net.network, net.embed(hint)[None]) for net in nets]

    def before(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return given, named | add(model, guides, given, named)

    hook = network.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def add_to_flux(model: Model, guides: Guides, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    names = ("encoder_hidden_states", "pooled_projections", "timestep", "img_ids", "txt_ids")
    shared = {name: named[name] for name in names}
    latents = named["hidden_states"][..., : 4 * model.latent_channels]
    guidance = named.get("guidance")
    doubles: list[Tensor] = []
    for net, hint in guides:
        told = guidance if net.config.guidance_embeds else None
        own, _ = net(
            hidden_states=latents, controlnet_cond=hint.expand(len(latents), -1, -1), guidance=told,
            return_dict=False, **shared,
        )  # fmt: skip
        doubles = own if not doubles else [one + other for one, other in zip(doubles, own, strict=True)]
    return {"controlnet_block_samples": doubles}


def add_to_unet(model: Model, guides: Guides, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    sample, timestep = given[0][:, : model.latent_channels], given[1]
    names = ("encoder_hidden_states", "added_cond_kwargs")
    shared = {name: named[name] for name in names if name in named}
    sums: list[Tensor] = []
    for net, hint in guides:
        down, middle = net(
            sample, timestep, controlnet_cond=hint.expand(len(sample), -1, -1, -1), return_dict=False, **shared
        )
        own = [*down, middle]
        sums = own if not sums else [one + other for one, other in zip(sums, own, strict=True)]
    return {"down_block_additional_residuals": tuple(sums[:-1]), "mid_block_additional_residual": sums[-1]}
