"""The work of a ControlNet, as plain numbers from its config.json: what it adds to a step. Knows diffusers' fields;
knows no weights and no device.

A ControlNet of a UNet is a copy of its encoder and of its middle block, one of Flux a few of its blocks; both have one
more product for each residual. It computes every token of every branch, whatever is masked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from instgenie.cost.latency import Latency
from instgenie.cost.network import BlockShape, Demand, NetworkShape

CONVOLUTION = 9  # weights of a 3x3 kernel, per pair of channels
FLUX = "FluxControlNetModel"


def controlnet_shape(config: Mapping[str, Any]) -> NetworkShape:
    """The shape of a ControlNet."""
    return flux_shape(config) if config["_class_name"] == FLUX else unet_shape(config)


def controlnet_seconds(
    network: NetworkShape, latency: Latency, num_tokens: int, num_text: int, num_branches: int
) -> float:
    """Seconds that a ControlNet takes for one step of one job."""
    everything = {side: num_tokens // side**2 for side in network.sides}
    demand = Demand(num_tokens, everything, num_text, num_branches)
    blocks = latency.block_costs(network, [demand])
    return latency.outside(network, [demand]) + sum(cost.dense for cost in blocks)


def unet_shape(config: Mapping[str, Any]) -> NetworkShape:
    channels = [int(number) for number in config["block_out_channels"]]
    num_layers, num_text_channels = int(config["layers_per_block"]), int(config["cross_attention_dim"])
    depths = per_level(config.get("transformer_layers_per_block", 1), len(channels))
    first, time_channels = channels[0], 4 * channels[0]
    runs: list[list[BlockShape]] = []
    per_token = product(CONVOLUTION * int(config["in_channels"]), first) + product(first, first)
    per_branch = product(first, time_channels) + product(time_channels, time_channels)
    if added := config.get("projection_class_embeddings_input_dim"):
        per_branch += product(int(added), time_channels) + product(time_channels, time_channels)

    def add_resnet(into: int, out: int, side: int) -> None:
        nonlocal per_token, per_branch
        shortcut = product(into, out) if into != out else 0
        per_token += (CONVOLUTION * (product(into, out) + product(out, out)) + shortcut) // side**2
        per_branch += product(time_channels, out)

    into = first
    for level, (out, kind) in enumerate(zip(channels, config["down_block_types"], strict=True)):
        side = 2**level
        for _ in range(num_layers):
            add_resnet(into, out, side)
            per_token += product(out, out) // side**2
            if "CrossAttn" in kind:
                runs.append(transformer(out, num_text_channels, depths[level], side))
            into = out
        if level + 1 < len(channels):
            per_token += (CONVOLUTION + 1) * product(out, out) // (2 * side) ** 2
    last = channels[-1]
    if config.get("mid_block_type", "UNetMidBlock2DCrossAttn"):
        add_resnet(last, last, side)
        add_resnet(last, last, side)
        runs.append(transformer(last, num_text_channels, depths[-1], side))
    per_token += product(last, last) // side**2
    return NetworkShape(tuple(block for run in runs for block in run), tuple(map(len, runs)), per_token, per_branch)


def transformer(channels: int, num_text_channels: int, depth: int, side: int) -> list[BlockShape]:
    """The blocks of one transformer; the projections into and out of it count with the first and the last."""
    square = product(channels, channels)
    block = BlockShape(
        per_token=(4 + 2 + 12) * square,  # attention over the picture, over the text, and a gated layer of 4 widths
        per_text=2 * product(num_text_channels, channels),
        per_rest=0,
        per_pair=4 * channels,
        per_branch=0,
        width=channels,
        side=side,
    )
    blocks = [block] * depth
    blocks[0] = replace(blocks[0], per_token=blocks[0].per_token + square)
    blocks[-1] = replace(blocks[-1], per_token=blocks[-1].per_token + square)
    return blocks


def flux_shape(config: Mapping[str, Any]) -> NetworkShape:
    width = int(config["num_attention_heads"]) * int(config["attention_head_dim"])
    square, into = product(width, width), product(int(config["in_channels"]), width)
    num_text, num_pooled = int(config["joint_attention_dim"]), int(config["pooled_projection_dim"])
    double = BlockShape(13 * square, 12 * square, 0, 4 * width, 12 * square, width, joint=True)
    single = BlockShape(13 * square, 12 * square, 0, 4 * width, 3 * square, width, joint=True)
    blocks = (double,) * int(config["num_layers"]) + (single,) * int(config["num_single_layers"])
    first = replace(
        blocks[0], per_token=blocks[0].per_token + 2 * into, per_text=blocks[0].per_text + product(num_text, width)
    )
    num_embedders = 2 if config.get("guidance_embeds") else 1
    per_branch = num_embedders * (product(256, width) + square) + product(num_pooled, width) + square
    return NetworkShape((first, *blocks[1:]), (len(blocks),), per_token=0, per_branch=per_branch)


def product(into: int, out: int) -> int:
    """FLOPs of a product with a matrix, per row."""
    return 2 * into * out


def per_level(given: Any, num_levels: int) -> Sequence[int]:
    return [int(given)] * num_levels if isinstance(given, int) else [int(number) for number in given]
