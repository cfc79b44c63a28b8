"""Dummies as folders: what is written loads as what was drawn."""

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, DiffusionPipeline, UNet2DConditionModel

from instgenie.errors import ModelError
from instgenie.models.families import FAMILIES
from instgenie.models.loading import write as write_module
from instgenie.models.loading.load import load
from instgenie.models.loading.write import write_dummy
from instgenie.models.recipe import Recipe
from instgenie.models.unet.family import sd21_others

CPU = torch.device("cpu")


def tiny_unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(sample_size=16, block_out_channels=(8, 8), norm_num_groups=4, cross_attention_dim=1024,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=2)  # fmt: skip


def test_what_has_no_form_in_files_is_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="its processor has no form in files"):
        write_dummy("dummy:qwen-image-edit", tmp_path / "model", CPU)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_a_dummy_is_written_as_a_pipeline(shard_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(
        "StableDiffusionPipeline",
        tiny_unet,
        lambda: AutoencoderKL(norm_num_groups=4, block_out_channels=(8,)),
        sd21_others,
    )
    monkeypatch.setattr(write_module, "find_dummy", lambda _: (FAMILIES["unet"], recipe))
    monkeypatch.setattr(write_module, "SHARD_BYTES", shard_bytes)
    num_bytes = write_dummy("dummy:tiny", tmp_path / "model", CPU)
    files = [*(tmp_path / "model" / "unet").glob("*.safetensors"), *(tmp_path / "model" / "vae").glob("*.safetensors")]
    assert (len(files) == 2) == (shard_bytes == 10**9)
    ours = load(str(tmp_path / "model"), "cpu", "bfloat16")
    assert num_bytes == sum(value.nbytes for part in (ours.network, ours.vae) for value in part.state_dict().values())
    stock = DiffusionPipeline.from_pretrained(tmp_path / "model", dtype=torch.bfloat16, safety_checker=None)
    for name, value in stock.unet.state_dict().items():
        assert ours.network.state_dict()[name].equal(value)
    assert stock.unet.conv_in.weight.std() > 0.01
    with pytest.raises(ModelError, match="is not empty"):
        write_dummy("dummy:tiny", tmp_path / "model", CPU)
