"""ControlNets of Stable Diffusion 1.5, 2.1 and XL over the branches of many jobs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import ControlNetModel, ControlNetUnionModel
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.unets.unet_2d_blocks import CrossAttnDownBlock2D, DownBlock2D
from torch import Tensor, nn

from instgenie.adapters.controlnets import UNET_KIND, UNION_KIND, ControlShape
from instgenie.jobs.job import Job
from instgenie.jobs.rows import OWN_ROWS, JobRows
from instgenie.models.controlnet import BranchFacts, ControlBatch, ControlNet, Facts, GuidedFamily
from instgenie.models.layers.resnet import go_around
from instgenie.models.unet.batch import Positions, UnetBatch, level_keys
from instgenie.models.unet.layout import LevelLayout
from instgenie.models.unet.network import cross_texts, encode, find_positions, transformers


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
    """Residuals for every skip of a UNet, in the order of its encoder, then for its middle block. Most ControlNets are
    copies of that encoder and that middle, and run as they do; those that are not run as diffusers' modules."""

    max_captured = 16

    def __init__(self, network: Any, device: torch.device, dtype: torch.dtype) -> None:
        self.network, self.device, self.dtype = network, device, dtype
        self._embedding = network.controlnet_cond_embedding
        self._flips = network.config.controlnet_conditioning_channel_order == "bgr"
        network.register_to_config(controlnet_conditioning_channel_order="rgb")
        network.controlnet_cond_embedding = nn.Identity()  # images are embedded once per job, not at every step
        self.is_copy = is_copy(network)
        self._positions = find_positions(network) if self.is_copy else {}

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + sum(int(tensor.nbytes) for tensor in self._embedding.parameters())

    def embed(self, hint: Tensor) -> Tensor:  # [3, height, width] -> [channels, rows, columns]
        pixels = hint[None].to(self.device, self.dtype)
        embedded: Tensor = self._embedding(pixels.flip(1) if self._flips else pixels)
        return embedded[0]

    def collect(self, branches: Sequence[BranchFacts]) -> Facts:
        text = torch.stack([one.text for one in branches])
        crossed = cross_texts(self.network, text) if self.is_copy else ()
        return {
            "pooled": torch.stack([one.pooled for one in branches]),
            "hint": torch.stack([one.hint for one in branches]).contiguous(memory_format=torch.channels_last),
            "sizes": self.to_device([[*one.size, 0, 0, *one.size] for one in branches]),
            "scales": self.to_device([one.scale for one in branches])[:, None, None, None],
            **({f"crossed.{number}": one for number, one in enumerate(crossed)} if self.is_copy else {"text": text}),
        }

    def run(self, batch: ControlBatch) -> list[Tensor]:
        if not self.is_copy:
            return self.call(batch)
        facts = batch.facts
        packed = pack_branches(batch, self._positions)
        layers = (*self.network.controlnet_down_blocks, self.network.controlnet_mid_block)
        encoded = encode(self.network, self._positions, packed, added=facts["hint"])
        return [go_around(*pair) * facts["scales"] for pair in zip(layers, encoded.places, strict=True)]

    def call(self, batch: ControlBatch) -> list[Tensor]:
        """Run diffusers' module."""
        facts = batch.facts
        skips, middle = self.network(
            batch.sample,
            batch.timestep,
            encoder_hidden_states=facts["text"],
            added_cond_kwargs={"text_embeds": facts["pooled"], "time_ids": facts["sizes"]},
            return_dict=False,
            **self.guidance(facts),
        )
        return [*skips, middle]

    def guidance(self, facts: Facts) -> dict[str, Any]:
        return {"controlnet_cond": facts["hint"], "conditioning_scale": facts["scales"]}


class UnionControlNet(UnetControlNet):
    """A ControlNet that knows several kinds of images. In diffusers its attention over them reaches across the branches
    of a batch, so each job has a pass of its own."""

    max_jobs = 1

    def collect(self, branches: Sequence[BranchFacts]) -> Facts:
        modes = self.to_device([one.mode or 0 for one in branches], torch.int64)
        kinds = F.one_hot(modes, self.network.config.num_control_type).to(self.dtype)
        return super().collect(branches) | {"modes": modes, "kinds": kinds}

    def guidance(self, facts: Facts) -> dict[str, Any]:
        own = {"controlnet_cond": [facts["hint"]], "conditioning_scale": [facts["scales"]]}
        return own | {"control_type": facts["kinds"], "control_type_idx": [facts["modes"]]}


def is_copy(network: Any) -> bool:
    """True if a ControlNet consists of what the UNets consist of that run here."""
    is_plain = isinstance(network, ControlNetModel) and all(
        isinstance(block, DownBlock2D | CrossAttnDownBlock2D) for block in network.down_blocks
    )
    return is_plain and all(
        isinstance(transformer, Transformer2DModel)
        and all(
            block.norm_type == "layer_norm" and block.attn2 is not None and not block.only_cross_attention
            for block in transformer.transformer_blocks
        )
        for transformer in transformers(network)
    )


def pack_branches(batch: ControlBatch, positions: Positions) -> UnetBatch:
    """Branches that compute every token, as a batch of a UNet; their texts are crossed already."""
    num_branches, facts = len(batch.sample), batch.facts
    dense = (False,) * num_branches
    num_blocks = sum(position.num_blocks for position in positions.values())
    keys = level_keys(positions, (dense,) * num_blocks, batch.sample.shape[2] * batch.sample.shape[3])
    return UnetBatch(
        jobs=(),
        rows=JobRows((), OWN_ROWS),
        loras=None,
        residuals=(),
        kinds=(None,) * num_branches,
        kept_kinds=(None,) * num_branches,
        cached=(dense,) * num_blocks,
        sample=batch.sample,
        timestep=batch.timestep,
        pooled=facts["pooled"],
        sizes=facts["sizes"],
        crossed=tuple(facts[f"crossed.{block}"] for block in range(num_blocks)),
        layouts={key: LevelLayout(num_branches * key[0], *key) for key in keys},
        key_bounds={},
    )


def load_unet_controlnet(folder: Path, device: torch.device, dtype: torch.dtype) -> UnetControlNet:
    return UnetControlNet(load_network(ControlNetModel, folder, device, dtype), device, dtype)


def load_union_controlnet(folder: Path, device: torch.device, dtype: torch.dtype) -> UnetControlNet:
    return UnionControlNet(load_network(ControlNetUnionModel, folder, device, dtype), device, dtype)


def load_network(kind: Any, folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    network = kind.from_pretrained(folder, torch_dtype=dtype, use_safetensors=True, local_files_only=True)
    network.eval().requires_grad_(False).to(device)
    return network.to(memory_format=torch.channels_last) if device.type == "cuda" else network
