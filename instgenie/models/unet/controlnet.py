"""ControlNets of Stable Diffusion 1.5, 2.1 and XL: diffusers' modules over the branches of many jobs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import ControlNetModel, ControlNetUnionModel
from torch import Tensor, nn

from instgenie.adapters.controlnets import UNET_KIND, UNION_KIND, ControlShape
from instgenie.jobs.job import Job
from instgenie.models.controlnet import ControlInput, ControlNet, GuidedFamily


class GuidedUnets(GuidedFamily):
    signed = False

    def shape(self, config: Any, latent_channels: int) -> ControlShape:
        facts = ("block_out_channels", "layers_per_block", "cross_attention_dim", "addition_embed_type")
        return ControlShape(
            (UNET_KIND, UNION_KIND), {key: config[key] for key in facts} | {"in_channels": latent_channels}
        )

    def sample(self, job: Job) -> Tensor:  # [latent channels, rows, columns]
        scaled: Tensor = job.schedule.scaled(job.latents, job.step).T
        return scaled.reshape(-1, *job.grid)


class UnetControlNet(ControlNet):
    """Residuals for every skip of a UNet, in the order of its encoder, then for its middle block."""

    def __init__(self, network: Any, device: torch.device, dtype: torch.dtype) -> None:
        self.network, self.device, self.dtype = network, device, dtype
        self._embedding = network.controlnet_cond_embedding
        self._flips = network.config.controlnet_conditioning_channel_order == "bgr"
        network.register_to_config(controlnet_conditioning_channel_order="rgb")
        network.controlnet_cond_embedding = nn.Identity()  # images are embedded once per job, not at every step

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + sum(int(tensor.nbytes) for tensor in self._embedding.parameters())

    def embed(self, hint: Tensor) -> Tensor:  # [3, height, width] -> [channels, rows, columns]
        pixels = hint[None].to(self.device, self.dtype)
        embedded: Tensor = self._embedding(pixels.flip(1) if self._flips else pixels)
        return embedded[0]

    def run(self, inputs: Sequence[ControlInput], scales: Tensor) -> list[Tensor]:
        added = {
            "text_embeds": torch.stack([one.pooled for one in inputs]),
            "time_ids": self.to_device([[*one.size, 0, 0, *one.size] for one in inputs]),
        }
        skips, middle = self.network(
            torch.stack([one.sample for one in inputs]).to(self.dtype),
            torch.stack([one.timestep for one in inputs]),
            encoder_hidden_states=torch.stack([one.text for one in inputs]),
            added_cond_kwargs=added,
            return_dict=False,
            **self.guidance(inputs, torch.stack([one.hint for one in inputs]), scales[:, None, None, None]),
        )
        return [*skips, middle]

    def guidance(self, inputs: Sequence[ControlInput], hints: Tensor, scales: Tensor) -> dict[str, Any]:
        return {"controlnet_cond": hints, "conditioning_scale": scales}


class UnionControlNet(UnetControlNet):
    """A ControlNet that knows several kinds of images. In diffusers its attention over them reaches across the branches
    of a batch, so each job has a pass of its own."""

    max_jobs = 1

    def guidance(self, inputs: Sequence[ControlInput], hints: Tensor, scales: Tensor) -> dict[str, Any]:
        modes = self.to_device([one.mode or 0 for one in inputs], torch.int64)
        kinds = F.one_hot(modes, self.network.config.num_control_type).to(self.dtype)
        own = {"controlnet_cond": [hints], "conditioning_scale": [scales]}
        return own | {"control_type": kinds, "control_type_idx": [modes]}


def load_unet_controlnet(folder: Path, device: torch.device, dtype: torch.dtype) -> UnetControlNet:
    return UnetControlNet(load_network(ControlNetModel, folder, device, dtype), device, dtype)


def load_union_controlnet(folder: Path, device: torch.device, dtype: torch.dtype) -> UnetControlNet:
    return UnionControlNet(load_network(ControlNetUnionModel, folder, device, dtype), device, dtype)


def load_network(kind: Any, folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    network = kind.from_pretrained(folder, torch_dtype=dtype, use_safetensors=True, local_files_only=True)
    network.eval().requires_grad_(False).to(device)
    return network.to(memory_format=torch.channels_last) if device.type == "cuda" else network
