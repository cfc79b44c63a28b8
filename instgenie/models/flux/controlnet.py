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
from instgenie.models.controlnet import BranchFacts, ControlBatch, ControlNet, Facts, GuidedFamily
from instgenie.models.model import pack_latents


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

    max_captured = 2

    def __init__(self, network: FluxControlNetModel, device: torch.device, dtype: torch.dtype) -> None:
        self.network, self.device, self.dtype = network, device, dtype
        self._embedding = network.input_hint_block
        network.input_hint_block = None  # images are embedded once per job, not at every step

    @property
    def num_bytes(self) -> int:
        own = self._embedding.parameters() if self._embedding is not None else ()
        return super().num_bytes + sum(int(tensor.nbytes) for tensor in own)

    def embed(self, hint: Tensor) -> Tensor:  # pixels [3, height, width], or tokens -> [tokens, channels]
        given = hint.to(self.device, self.dtype)
        if self._embedding is None:
            return given
        return pack_latents(self._embedding(given[None]), self.network.config.patch_size)

    def collect(self, branches: Sequence[BranchFacts]) -> Facts:
        first = branches[0]
        facts = {
            "text": torch.stack([one.text for one in branches]),
            "pooled": torch.stack([one.pooled for one in branches]),
            "hint": torch.stack([one.hint for one in branches]),
            "positions": self.positions(first.num_tokens, *first.size),
            "text_positions": torch.zeros(len(first.text), 3, device=self.device, dtype=self.dtype),
            "scales": self.to_device([one.scale for one in branches])[:, None, None],
        }
        if self.network.config.guidance_embeds:
            facts["guidance"] = self.to_device([one.guidance for one in branches], torch.float32)
        if self.network.union:  # it knows several kinds of images
            facts["modes"] = self.to_device([[one.mode or 0] for one in branches], torch.int64)
        return facts

    def run(self, batch: ControlBatch) -> list[Tensor]:
        facts = batch.facts
        doubles, singles = self.network(
            hidden_states=batch.sample,
            controlnet_cond=facts["hint"],
            controlnet_mode=facts.get("modes"),
            conditioning_scale=facts["scales"],
            encoder_hidden_states=facts["text"],
            pooled_projections=facts["pooled"],
            timestep=(batch.timestep * 1000).to(self.dtype) / 1000,
            guidance=facts.get("guidance"),
            img_ids=facts["positions"],
            txt_ids=facts["text_positions"],
            return_dict=False,
        )
        return [*(doubles or ()), *(singles or ())]

    def positions(self, num_tokens: int, height: int, width: int) -> Tensor:  # [image tokens, 3]
        side = round((height * width / num_tokens) ** 0.5)
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
