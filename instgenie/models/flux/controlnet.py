"""ControlNets of Flux: diffusers' FluxControlNetModel over the branches of many jobs."""

import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxControlNetModel
from torch import Tensor

from instgenie.adapters.controlnets import FLUX_KIND, ControlShape
from instgenie.jobs.job import Job
from instgenie.models.controlnet import ControlInput, ControlNet, GuidedFamily


class GuidedFluxes(GuidedFamily):
    signed = True

    def shape(self, config: Any, latent_channels: int) -> ControlShape:
        facts = ("num_attention_heads", "attention_head_dim", "joint_attention_dim", "pooled_projection_dim")
        return ControlShape((FLUX_KIND,), {key: config[key] for key in facts} | {"in_channels": 4 * latent_channels})

    def sample(self, job: Job) -> Tensor:  # [tokens, latent channels]
        return job.latents

    def rows(self, job: Job) -> Tensor | None:
        return job.inside if job.is_cached(0) else None


class FluxControlNet(ControlNet):
    """Residuals for the image tokens behind the double blocks, then behind the single blocks."""

    def __init__(self, network: FluxControlNetModel, device: torch.device, dtype: torch.dtype) -> None:
        self.network, self.device, self.dtype = network, device, dtype

    def embed(self, hint: Tensor) -> Tensor:
        return hint.to(self.device, self.dtype)

    def run(self, inputs: Sequence[ControlInput], scales: Tensor) -> list[Tensor]:
        timestep = (torch.stack([one.timestep for one in inputs]) * 1000).to(self.dtype) / 1000
        guidance = torch.stack([one.guidance for one in inputs]) if self.network.config.guidance_embeds else None
        first = inputs[0]
        doubles, singles = self.network(
            hidden_states=torch.stack([one.sample for one in inputs]).to(self.dtype),
            controlnet_cond=torch.stack([one.hint for one in inputs]),
            controlnet_mode=self.modes(inputs),
            conditioning_scale=scales[:, None, None],
            encoder_hidden_states=torch.stack([one.text for one in inputs]),
            pooled_projections=torch.stack([one.pooled for one in inputs]),
            timestep=timestep,
            guidance=guidance,
            img_ids=self.positions(first),
            txt_ids=torch.zeros(len(first.text), 3, device=self.device, dtype=self.dtype),
            return_dict=False,
        )
        return [*(doubles or ()), *(singles or ())]

    def modes(self, inputs: Sequence[ControlInput]) -> Tensor | None:
        """What kind of image each branch has, for a ControlNet that knows several."""
        if not self.network.union:
            return None
        return self.to_device([[one.mode or 0] for one in inputs], torch.int64)

    def positions(self, one: ControlInput) -> Tensor:  # [image tokens, 3]
        height, width = one.size
        side = round((height * width / len(one.sample)) ** 0.5)
        return grid_positions(height // side, width // side, self.device, self.dtype)


@lru_cache(maxsize=16)  # making them copies to the device
def grid_positions(num_rows: int, num_columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    rows, columns = torch.meshgrid(torch.arange(num_rows), torch.arange(num_columns), indexing="ij")
    positions = torch.stack([torch.zeros_like(rows), rows, columns], dim=2).flatten(0, 1)
    return positions.to(device, dtype)


def load_flux_controlnet(folder: Path, device: torch.device, dtype: torch.dtype) -> FluxControlNet:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of a class that diffusers itself uses
        network = FluxControlNetModel.from_pretrained(
            folder, torch_dtype=dtype, use_safetensors=True, local_files_only=True
        )
    network.eval().requires_grad_(False).to(device)
    return FluxControlNet(network, device, dtype)
