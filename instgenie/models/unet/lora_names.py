"""Names that the original code of Stable Diffusion gives to the layers of a UNet, as LoRAs for SDXL use them."""

from collections.abc import Iterator

from diffusers import UNet2DConditionModel

from instgenie.adapters.keys import underscored
from instgenie.adapters.layers import Alias

AROUND = {  # the layers outside the blocks
    "input_blocks_0_0": "conv_in",
    "time_embed_0": "time_embedding.linear_1",
    "time_embed_2": "time_embedding.linear_2",
    "label_emb_0_0": "add_embedding.linear_1",
    "label_emb_0_2": "add_embedding.linear_2",
    "out_2": "conv_out",
}
RESNET = {
    "in_layers_2": "conv1",
    "emb_layers_1": "time_emb_proj",
    "out_layers_3": "conv2",
    "skip_connection": "conv_shortcut",
}


def original_names(unet: UNet2DConditionModel) -> dict[str, Alias]:
    """By underscored name, the layer that it stands for."""
    names = dict(AROUND)
    for original, path in modules(unet):
        if ".resnets." in path:
            names |= {f"{original}_{old}": f"{path}.{new}" for old, new in RESNET.items()}
        elif ".attentions." in path:
            inner = unet.get_submodule(path).named_modules()
            names |= {f"{original}_{underscored(name)}": f"{path}.{name}" for name, _ in inner if name}
        else:
            names[original] = path
    known = {name for name, _ in unet.named_modules()}
    return {original: Alias((path,)) for original, path in names.items() if path in known}


def modules(unet: UNet2DConditionModel) -> Iterator[tuple[str, str]]:
    """Yield the resnets, transformers and samplers of all blocks: the original name and diffusers' path."""
    number = 1
    for level, block in enumerate(unet.down_blocks):
        for index in range(len(block.resnets)):
            yield f"input_blocks_{number}_0", f"down_blocks.{level}.resnets.{index}"
            yield from attention(block, index, f"input_blocks_{number}_1", f"down_blocks.{level}")
            number += 1
        if block.downsamplers:
            yield f"input_blocks_{number}_0_op", f"down_blocks.{level}.downsamplers.0.conv"
            number += 1
    for original, path in (("0", "resnets.0"), ("1", "attentions.0"), ("2", "resnets.1")):
        if unet.mid_block is not None:
            yield f"middle_block_{original}", f"mid_block.{path}"
    number = 0
    for level, block in enumerate(unet.up_blocks):
        for index in range(len(block.resnets)):
            yield f"output_blocks_{number}_0", f"up_blocks.{level}.resnets.{index}"
            yield from attention(block, index, f"output_blocks_{number}_1", f"up_blocks.{level}")
            number += 1
        if block.upsamplers:
            place = 2 if has_attention(block) else 1
            yield f"output_blocks_{number - 1}_{place}_conv", f"up_blocks.{level}.upsamplers.0.conv"


def attention(block: object, index: int, original: str, path: str) -> Iterator[tuple[str, str]]:
    if has_attention(block):
        yield original, f"{path}.attentions.{index}"


def has_attention(block: object) -> bool:
    return bool(getattr(block, "attentions", None))
