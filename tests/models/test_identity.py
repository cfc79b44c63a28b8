"""The digest of a model: equal for equal weights, different for any change."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from instgenie.models.identity import add_up, identify
from instgenie.models.loading.load import load
from instgenie.models.model import Model


def test_the_same_weights_are_the_same_model(
    folders: dict[str, Path], models: dict[str, Model], tmp_path: Path
) -> None:
    shutil.copytree(folders["fill"], tmp_path / "copy")
    copy = load(str(tmp_path / "copy"), "cpu")
    assert copy.name != models["fill"].name
    assert copy.digest == models["fill"].digest
    assert len({model.digest for model in models.values()}) == len(models)


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder", "text_encoder_2"])
def test_one_value_makes_another_model(
    part: str, folders: dict[str, Path], models: dict[str, Model], tmp_path: Path
) -> None:
    """Two checkpoints of the same name have different digests."""
    name = str(tmp_path / "pipeline")
    shutil.copytree(folders["fill"], name)
    before = load(name, "cpu")
    [path] = Path(name, part).glob("*.safetensors")
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    tensors = load_file(path)
    changed = tensors[max(tensors, key=lambda name: tensors[name].numel())].view(-1)
    changed[len(changed) // 3] += 0.01
    save_file(tensors, path, header)
    assert before.digest == models["fill"].digest != load(name, "cpu").digest


def test_configs_and_tokenizers_count(models: dict[str, Model]) -> None:
    model = models["fill"]
    parts = {"vae": model.vae, "tokenizer": model.tokenizer, "flag": True}
    assert identify(parts) == identify(dict(reversed(parts.items())))
    assert identify(parts) != identify(parts | {"flag": False})
    before = identify(parts)
    original = model.vae.config.scaling_factor
    model.vae.register_to_config(scaling_factor=0.5)
    other = identify(parts)
    model.vae.register_to_config(scaling_factor=original)
    assert before == identify(parts) != other
    length = model.tokenizer.model_max_length
    model.tokenizer.model_max_length = length + 1
    other = identify(parts)
    model.tokenizer.model_max_length = length
    assert before == identify(parts) != other
    model.tokenizer.chat_template = "{{ messages[0].content }}"
    other = identify(parts)
    model.tokenizer.chat_template = None
    assert before == identify(parts) != other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (0,), (5000, 3), (64, 4096)])
def test_every_value_and_place_counts(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).remainder(251).view(shape).to(dtype)
    before = summed(tensor)
    assert summed(tensor.clone()) == before
    flat = tensor.view(-1)
    for place in {0, len(flat) // 2, len(flat) - 1} if len(flat) else ():
        changed = flat.clone()
        changed[place] += 1
        assert summed(changed) != before
    for places in ([0, 1], [0, 16]):  # in one word; in two words of one row
        if len(flat) > max(places):
            swapped = flat.clone()
            swapped[places] = flat[places[::-1]]
            assert summed(swapped) != before


def summed(tensor: torch.Tensor) -> list[bytes]:
    return [sums.numpy().tobytes() for sums in add_up(tensor)]


def test_views_count_as_what_they_show() -> None:
    tensor = torch.randn(300, 301)
    odd = torch.empty(1 + tensor.numel())[1:].view(tensor.shape).copy_(tensor)
    turned = tensor.T.contiguous().T
    assert summed(odd) == summed(turned) == summed(tensor)
