"""The built-in model: plain diffusers runs it, and its files are small enough to ship."""

import numpy as np
import torch
from diffusers import FluxFillPipeline
from PIL import Image
from safetensors import safe_open

from instgenie.adapters.shipped import CONTROLNETS, LORAS
from instgenie.machine.model_folders import BUILTIN

MEBIBYTE = 2**20


def test_plain_diffusers_runs_it() -> None:
    pipeline = FluxFillPipeline.from_pretrained(BUILTIN)
    pipeline.set_progress_bar_config(disable=True)
    picture = Image.fromarray(np.full((256, 256, 3), 128, np.uint8))
    whole = Image.new("L", (256, 256), 255)
    cat, rose = (
        np.asarray(
            pipeline(
                prompt=prompt,
                image=picture,
                mask_image=whole,
                height=256,
                width=256,
                num_inference_steps=4,
                guidance_scale=3.5,
                max_sequence_length=16,
                generator=torch.Generator().manual_seed(0),
            ).images[0]
        ).astype(float)
        for prompt in ("a photo of a Bombay cat", "a photo of a rose")
    )
    assert cat.shape == (256, 256, 3)
    assert min(cat.std(), rose.std()) > 20  # pictures, not a flat grey
    assert np.abs(cat - rose).mean() > 20  # that depend on the prompt


def test_files_are_small_enough_to_ship() -> None:
    sizes = {path: path.stat().st_size for path in BUILTIN.rglob("*") if path.is_file()}
    assert max(sizes.values()) < 16 * MEBIBYTE
    adapters = sum(size for path, size in sizes.items() if path.relative_to(BUILTIN).parts[0] in (LORAS, CONTROLNETS))
    assert sum(sizes.values()) - adapters <= 64 * MEBIBYTE
    assert adapters <= 20 * MEBIBYTE


def test_weights_are_float16_safetensors() -> None:
    files = sorted(BUILTIN.rglob("*.safetensors"))
    assert len(files) >= 5
    for path in files:
        with safe_open(path, framework="pt") as tensors:
            assert {tensors.get_tensor(name).dtype for name in tensors.keys()} == {torch.float16}  # noqa: SIM118
    assert not [path for path in BUILTIN.rglob("*") if path.suffix in {".bin", ".pt", ".pth", ".ckpt"}]
