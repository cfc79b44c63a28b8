"""LoRAs and ControlNets in a model's own folder are there without an option, in the editor and on a server."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.controlnets import save_controlnet
from helpers.edits import make_edit
from helpers.loras import save_lora

from instgenie.adapters.shipped import shipped_controlnets, shipped_loras
from instgenie.editor import Editor
from instgenie.errors import ConfigError
from instgenie.models.model import Model
from instgenie.server.config import read_config


@pytest.fixture(scope="module")
def folder(folders: dict[str, Path], models: dict[str, Model], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a LoRA and a ControlNet of its own."""
    found = shutil.copytree(folders["fill"], tmp_path_factory.mktemp("shipped") / "model")
    (found / "loras").mkdir()
    save_lora(found / "loras" / "pencil.safetensors", models["fill"])
    save_controlnet(found / "controlnets" / "edges", models["fill"])
    return found


def test_an_editor_has_what_its_model_ships(folder: Path) -> None:
    editor, edit = Editor(str(folder), device="cpu"), make_edit()

    def paint(**fields: object) -> np.ndarray:
        return editor.edit(edit.picture, edit.mask, edit.prompt, steps=2, size=edit.size, **fields).picture

    plain = paint()
    for fields in ({"loras": ["pencil"]}, {"controls": [{"name": "edges", "image": "canny"}]}):
        painted = paint(**fields)
        assert not np.array_equal(plain, painted)
        assert np.array_equal(plain[~edit.mask], painted[~edit.mask])


def test_a_server_offers_what_its_model_ships(folder: Path, models: dict[str, Model], tmp_path: Path) -> None:
    config = read_config({"model": str(folder), "device": "cpu"}, {}).cluster
    assert dict(config.loras.modules) == shipped_loras(str(folder))
    assert dict(config.controls.modules) == shipped_controlnets(str(folder))
    assert list(shipped_loras(str(folder))) == ["pencil"]
    assert config.controls.devices == ()  # no process of their own
    asked = {"model": str(folder), "device": "cpu", "controlnet_devices": "cpu"}
    assert read_config(asked, {}).cluster.controls.devices == ("cpu",)
    other = save_lora(tmp_path / "other.safetensors", models["fill"])
    given = {"model": str(folder), "device": "cpu", "lora_modules": [f"pencil={other}", f"second={other}"]}
    named = dict(read_config(given, {}).cluster.loras.modules)
    assert named == {"pencil": str(other.resolve()), "second": str(other.resolve())}


def test_a_model_without_adapters_ships_none_and_a_broken_one_is_told(folder: Path, tmp_path: Path) -> None:
    assert shipped_loras("dummy:flux.1-dev") == shipped_controlnets("owner/name") == {}
    (tmp_path / "loras").mkdir()
    (tmp_path / "loras" / "cut.safetensors").write_bytes(b"cut")
    with pytest.raises(ConfigError, match=r"cut\.safetensors"):
        read_config({"model": str(tmp_path), "device": "cpu"}, {})
