"""Writes the weights of a trained network for the page, eight bits each:

python -m training.outlines.weights TRAINED.safetensors instgenie/server/static/select/outline.weights.gz
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from training.outlines.network import OutlineNetwork


def layers_of(network: OutlineNetwork) -> list[tuple[Tensor, Tensor]]:
    """Return kernel and bias of each convolution, with the normalisation after it folded in."""
    units = network.layers()
    layers = []
    for conv, norm in zip(units[0:-1:2], units[1:-1:2], strict=True):
        assert isinstance(conv, nn.Conv2d)
        assert isinstance(norm, nn.BatchNorm2d)
        assert norm.running_var is not None
        assert norm.running_mean is not None
        gain = norm.weight / (norm.running_var + norm.eps).sqrt()
        layers.append((conv.weight * gain[:, None, None, None], norm.bias - norm.running_mean * gain))
    last = units[-1]
    assert isinstance(last, nn.Conv2d)
    assert last.bias is not None
    return [*layers, (last.weight, last.bias)]


def packed(network: OutlineNetwork) -> bytes:
    """Return, for each layer, one scale and one bias per output (bfloat16) and the kernels (int8)."""
    parts = []
    for kernel, bias in layers_of(network):
        scale = (kernel.abs().amax((1, 2, 3)).clamp(min=1e-8) / 126).bfloat16()  # 127 may not fit after rounding
        whole = (kernel / scale.float()[:, None, None, None]).round().clamp(-127, 127).to(torch.int8)
        parts += [half_floats(scale), half_floats(bias), whole.numpy()]
    return b"".join(np.ascontiguousarray(part).tobytes() for part in parts)


def half_floats(values: Tensor) -> np.ndarray:
    """Return the upper half of each float32."""
    return values.bfloat16().view(torch.int16).numpy().astype("<i2")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the weights of the outlines' network for the page.")
    parser.add_argument("trained", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    network = OutlineNetwork()
    network.load_state_dict(load_file(given.trained))
    with torch.no_grad():
        given.out.write_bytes(gzip.compress(packed(network.eval()), mtime=0))
    print(given.out, f"{given.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
