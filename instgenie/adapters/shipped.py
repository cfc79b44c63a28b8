"""The LoRAs and ControlNets that lie in a model's own folder: offered wherever the model is. Needs no torch.

`loras/NAME.safetensors` is a LoRA, and `controlnets/NAME/` a folder of a ControlNet.
"""

from pathlib import Path

from instgenie.machine.model_folders import model_folder

LORAS, CONTROLNETS = "loras", "controlnets"


def shipped_loras(model: str) -> dict[str, str]:
    """Paths of LoRAs by their names."""
    return {path.stem: path_of(path) for path in sorted((model_folder(model) / LORAS).glob("*.safetensors"))}


def shipped_controlnets(model: str) -> dict[str, str]:
    """Folders of ControlNets by their names."""
    found = sorted((model_folder(model) / CONTROLNETS).glob("*/config.json"))
    return {config.parent.name: path_of(config.parent) for config in found}


def path_of(path: Path) -> str:
    return str(path.resolve())
