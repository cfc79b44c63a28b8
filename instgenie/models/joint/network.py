"""A pass through a transformer whose text flows beside the image, block by block, dense or cached. Families give the
blocks and what lies before and after them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn

from instgenie.adapters.applied import BatchLoras
from instgenie.cost.network import NetworkShape
from instgenie.jobs.activations import Kind
from instgenie.jobs.job import chooses
from instgenie.kernels.addresses import RowSource
from instgenie.kernels.gather import gather_rows
from instgenie.kernels.heads import HeadPlaces, Heads
from instgenie.kernels.modulate import norm_modulate
from instgenie.models.joint.batch import JointBatch
from instgenie.models.joint.block import JointBlock
from instgenie.models.joint.flow import Apart, Flow
from instgenie.models.joint.layout import Layout
from instgenie.models.joint.modulation import Modulation, modulate
from instgenie.models.joint.residual import Residual
from instgenie.models.joint.reused import run_reused
from instgenie.models.layers.linear import EACH_BRANCH, Owners, join, linear
from instgenie.models.layers.products import products


class JointNetwork(ABC):
    """A view of a diffusers transformer; it owns no weights."""

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer

    @cached_property
    @abstractmethod
    def blocks(self) -> Sequence[JointBlock]:
        """In the order of the pass."""

    @property
    @abstractmethod
    def image_embedder(self) -> nn.Module: ...

    @abstractmethod
    def embed_image(self, batch: JointBatch) -> Tensor:
        """[image tokens, width]"""

    @abstractmethod
    def embed(
        self, sigma: Tensor, guidance: Tensor, pooled: Tensor, dtype: torch.dtype, owners: Owners = EACH_BRANCH
    ) -> Tensor:
        """The input of every modulation layer [rows, width]."""

    @property
    def clean_references(self) -> bool:
        """True if tokens of references are modulated as at time 0, whatever the step."""
        return False

    def order(self, predicted: Tensor) -> Tensor:
        """The outputs of the last layer in the order of latents."""
        return predicted

    @property
    def time_embedder(self) -> nn.Module:
        embedder: nn.Module = self.transformer.time_text_embed
        return embedder

    @property
    def final_modulation(self) -> nn.Linear:
        """The modulation layer behind the last block."""
        layer: nn.Linear = self.transformer.norm_out.linear
        return layer

    @property
    def image_unembedder(self) -> nn.Module:
        unembedder: nn.Module = self.transformer.proj_out
        return unembedder

    @property
    def modulation_layers(self) -> list[nn.Linear]:
        """All of them, in the order of the pass; a layer that several blocks share is there once."""
        of_blocks = chain.from_iterable(block.modulations for block in self.blocks)
        return [*dict.fromkeys(of_blocks), self.final_modulation]

    def modulate(self, layer: nn.Linear, time: Tensor, owners: Owners | None) -> Tensor:
        """The columns of a modulation layer [rows, outputs], as blocks read them."""
        return modulate(layer, time, owners)

    @property
    def first_columns(self) -> dict[nn.Module, int]:
        """The first column of each modulation layer, where the outputs of all lie side by side."""
        layers = self.modulation_layers
        return dict(zip(layers, accumulate((layer.out_features for layer in layers), initial=0), strict=False))

    def embed_prompt(self, sequence: Tensor) -> Tensor:  # [text tokens, width]
        """Embed the text of a single branch."""
        return linear(self.transformer.context_embedder, sequence, Owners(per_branch=len(sequence)))

    def embed_time(self, batch: JointBatch) -> Tensor:
        """The input of every modulation layer [branches, width]; where references are clean, that of time 0 lies beside
        it."""
        owners = EACH_BRANCH.of(batch.loras)
        sigmas = [batch.sigma, torch.zeros_like(batch.sigma)][: 1 + self.clean_references]
        times = [self.embed(sigma, batch.guidance, batch.pooled, batch.text.dtype, owners) for sigma in sigmas]
        return torch.cat(times, dim=1)

    def unembed(self, image: Tensor, mod: Modulation, layout: Layout) -> Tensor:
        scale, shift = mod.of(self.final_modulation)
        normed = norm_modulate(image, shift, scale, layout.image_rows, self.transformer.norm_out.norm.eps)
        return self.order(linear(self.image_unembedder, normed, layout.image_owners))

    def join_projections(self) -> None:
        """Make one product of the layers that read the same rows."""
        for block in self.blocks:
            for layers in block.joinable:
                join(layers)

    def describe(self) -> NetworkShape:
        """Describe the network as numbers; embedding counts with the first block, unembedding with the last."""
        blocks = [block.describe() for block in self.blocks]
        blocks[0] = replace(blocks[0], per_token=blocks[0].per_token + products(self.image_embedder))
        blocks[-1] = replace(blocks[-1], per_token=blocks[-1].per_token + products(self.image_unembedder))
        per_branch = products(self.time_embedder, self.final_modulation)
        return NetworkShape(tuple(blocks), (len(blocks),), per_token=0, per_branch=per_branch)


def velocity(network: JointNetwork, batch: JointBatch) -> Tensor:
    """[image tokens, latent channels]; for a job that caches any block, of its masked tokens alone."""
    mod = find_modulation(network, batch)
    if any(map(chooses, batch.jobs)):
        reserve = partial(recall, network, batch=batch, layout=batch.layout)
        image = run_reused(network.blocks, batch, network.embed_image(batch), mod, reserve)
        return network.unembed(image, mod, batch.layout)
    layout, image = run_blocks(network, batch, network.embed_image(batch), mod)
    return network.unembed(image, mod, layout)


def find_modulation(network: JointNetwork, batch: JointBatch) -> Modulation:
    if batch.modulation is None:
        return Modulation(network.embed_time(batch), owners=EACH_BRANCH.of(batch.loras), modulate=network.modulate)
    return Modulation(columns=batch.modulation, firsts=network.first_columns)


def run_blocks(network: JointNetwork, batch: JointBatch, image: Tensor, mod: Modulation) -> tuple[Layout, Tensor]:
    """Send embedded image rows through all blocks."""
    layout, flow = batch.layout, start(batch, image)
    for index, block in enumerate(network.blocks):
        if batch.needs_rows(layout, index):
            layout, flow = flow.turned(batch, layout, index)
            keep_y(index, batch, flow.by_branch(layout))
        heads = recall(network, index, batch, layout)
        flow = block(flow, mod, layout, heads)
        if batch.control and (rows := batch.control.behind(index)) is not None:
            flow = flow.plus(rows, layout)
        keep_kv(index, batch, layout, heads)
    layout, _, image = batch.turn(layout, *flow.parts(layout), len(network.blocks))
    return layout, image


def start(batch: JointBatch, image: Tensor) -> Flow:
    return Apart(Residual(batch.text), Residual(image))


def walk(network: JointNetwork, batch: JointBatch, mod: Modulation) -> Iterator[tuple[JointBlock, Tensor, Tensor]]:
    """Yield every block with the rows of text and image that go into it, in a dense pass."""
    layout, flow = batch.layout, start(batch, network.embed_image(batch))
    for block in network.blocks:
        yield block, *flow.parts(layout)
        flow = block(flow, mod, layout, block.reserve(layout, batch.text))


def observe(network: JointNetwork, batch: JointBatch, kind: Kind, num_text: int = 0) -> Iterator[Tensor]:
    """Yield what activations keep of each block [2 or 1, kept tokens, width], from a dense pass: per branch, rows of
    the last `num_text` tokens of its text and of its image."""
    mod, layout = find_modulation(network, batch), batch.layout
    text_rotary, rotary = layout.part(layout.rotary.split(layout.num_joint))
    for block, text, image in walk(network, batch, mod):
        if kind == "y":
            seen, seen_text = image[None], text[None]
        else:
            keys = block.reserve_keys(len(image), image)
            block.project_keys(image, mod, rotary, layout.image_owners, keys)
            seen, seen_text = keys.flatten(2), text.new_empty(2, 0, keys[0, 0].numel())
            if num_text:
                keys = block.reserve_keys(len(text), text).zero_()
                block.project_keys(text, mod, text_rotary, layout.text_owners, keys, is_text=True)
                seen_text = keys.flatten(2)
        yield concat_kept(layout, num_text, seen_text, seen) if num_text else seen


def concat_kept(layout: Layout, num_text: int, text: Tensor, image: Tensor) -> Tensor:
    """[parts, tokens, width] of text and image -> per branch the last `num_text` of its text, then its image"""
    pairs = zip(text.split(layout.num_text, dim=1), image.split(layout.num_image, dim=1), strict=True)
    return torch.cat([part for own, seen in pairs for part in (own[:, own.shape[1] - num_text :], seen)], dim=1)


def recall(network: JointNetwork, index: int, batch: JointBatch, layout: Layout) -> Heads:
    """Reserve heads of a block and fill in K and V of the tokens that are not computed. Branches without rows of their
    own read those of the branch before."""
    block = network.blocks[index]
    heads = block.reserve(layout, batch.text)
    if not any(layout.cached):
        return heads
    reader = 0
    kept = layout.kept_keys(batch.num_kept_text)
    for job, (sources, slices) in enumerate(zip(batch.read(index, layout.cached, layout), kept, strict=True)):
        keys = [heads.keys[:, one] for one in slices]
        for branch, source in enumerate(sources):
            recall_one(network, block, batch, job, reader + branch, source, keys[branch])
        for other in keys[len(sources) :] if sources else ():
            other.copy_(keys[len(sources) - 1])
        reader += len(slices)
    return heads


def recall_one(
    network: JointNetwork,
    block: JointBlock,
    batch: JointBatch,
    job: int,
    reader: int,
    source: RowSource,
    keys: Tensor,
) -> None:
    """Write K and V [2, kept tokens, heads, head channels] of a branch's tokens that are not computed, each at its
    place: as they are kept, or projected from Y as at the step that left them."""
    assert source is not None
    tokens = batch.image_tokens[job]
    rest = tokens.rest
    if batch.kinds[job] == "kv":
        gather_rows(source, rest, tokens.num_rows, keys.flatten(2), rest)
        return
    assert batch.template is not None
    y = keys.new_empty(1, len(rest), batch.text.shape[1])
    gather_rows(source, rest, tokens.num_rows, y)
    loras = batch.loras and batch.loras.of_branch(reader)
    time, rotary = batch.template.time[reader, None], batch.template.rotary[job]
    mod = Modulation(time, owners=kept_owners(loras, 1), modulate=network.modulate)
    num = tokens.num_padding
    for part, is_text in ((slice(num), True), (slice(num, len(rest)), False)):
        if part.stop:
            places = HeadPlaces(joint=rest[part], keys=rest[part])
            times = None if tokens.times is None else tokens.times[part]
            owners = kept_owners(loras, len(rest[part]), times)
            block.project_keys(y[0, part], mod, rotary, owners, keys, places, is_text)


def kept_owners(loras: BatchLoras | None, num_rows: int, times: Tensor | None = None) -> Owners | None:
    """The owners of rows that a branch projects from Y: none; or itself if it has LoRAs, which change projections, or
    if the rows are modulated by several times."""
    return Owners(per_branch=num_rows, loras=loras, times=times) if loras or times is not None else None


def keep_y(index: int, batch: JointBatch, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Keep the rows of text and image that go into a block, per branch, for the jobs that keep Y; the text for those
    that keep it."""
    for reader, (kind, num_text) in enumerate(zip(batch.kept_kinds, batch.kept_text, strict=True)):
        if kind == "y":
            text, image = parts[reader]
            batch.rows.keep(index, reader, [torch.cat([text[len(text) - num_text :], image]) if num_text else image])


def keep_kv(index: int, batch: JointBatch, layout: Layout, heads: Heads) -> None:
    """Keep K and V of the tokens of a block that has run, for the jobs that keep them."""
    if "kv" not in batch.kept_kinds:
        return
    slices = [one for job in layout.kept_keys(batch.num_kept_text) for one in job]
    for reader, kind in enumerate(batch.kept_kinds):
        if kind == "kv":
            batch.rows.keep(index, reader, [part[slices[reader]].flatten(1) for part in heads.keys])
