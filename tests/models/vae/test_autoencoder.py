"""Encoding and decoding against diffusers' autoencoders."""

from collections.abc import Callable

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderTiny
from torch import Tensor

from instgenie.models.vae.autoencoder import decode_latents, encode_pictures, is_known

WIDTHS = (32, 64, 64)


def make_vae(**config: object) -> AutoencoderKL:
    torch.manual_seed(0)
    blocks = {
        "down_block_types": ("DownEncoderBlock2D",) * len(WIDTHS),
        "up_block_types": ("UpDecoderBlock2D",) * len(WIDTHS),
    }
    options = {"block_out_channels": WIDTHS, "layers_per_block": 2, **blocks, **config}
    return AutoencoderKL(**options).eval()


@torch.inference_mode()
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_quant_conv": False, "use_post_quant_conv": False, "latent_channels": 16},
        {"mid_block_add_attention": False},
    ],
)
def test_equals_diffusers(device: str, config: dict[str, object]) -> None:
    vae = make_vae(**config).to(device)
    assert is_known(vae)
    pictures = torch.randn(2, 3, 48, 64, device=device)
    latents = vae.encode(pictures).latent_dist.mode()
    decoded = vae.decode(latents).sample
    if device == "cuda":  # like loaded models
        vae.to(memory_format=torch.channels_last)
    close(encode_pictures(vae, pictures), latents)
    close(decode_latents(vae, latents), decoded)


def close(found: Tensor, expected: Tensor) -> None:
    """Bit-identical on a CPU; on CUDA convolutions may sum in another order."""
    tolerance = 0.0 if expected.device.type == "cpu" else 1e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


OTHERS: dict[str, Callable[[], AutoencoderKL | AutoencoderTiny]] = {
    "tiny": AutoencoderTiny,
    "gelu": lambda: make_vae(act_fn="gelu"),
    "attention": lambda: make_vae(up_block_types=("AttnUpDecoderBlock2D",) * len(WIDTHS)),
}


@torch.inference_mode()
@pytest.mark.parametrize("name", OTHERS)
def test_other_autoencoders_run_unchanged(name: str) -> None:
    vae = OTHERS[name]().eval()
    assert not is_known(vae)
    pictures = torch.randn(1, 3, 32, 32)
    encoded = vae.encode(pictures)
    latents = encoded.latents if name == "tiny" else encoded.latent_dist.mode()
    assert torch.equal(encode_pictures(vae, pictures), latents)
    assert torch.equal(decode_latents(vae, latents), vae.decode(latents).sample)


def test_tiled_autoencoders_run_in_diffusers() -> None:
    vae = make_vae()
    vae.enable_tiling()
    assert not is_known(vae)
